"""Checks of the tensors that wrappers are given: the text of a fault names the tensor, what it is and what it must be.

A kernel takes strides and lengths on trust, and reads past the end of what is too short. The checks run at each launch
that is no replay of a graph, so they look at shapes and strides alone: to check a tensor takes half as long as to make
an empty one.
"""

from collections.abc import Sequence

import torch


def check_contiguous(shape: Sequence[int], **tensors: torch.Tensor) -> None:
    """Check that tensors are contiguous and of one shape.

    Raises:
        ValueError: One is not.
    """
    for name, tensor in tensors.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} must be of shape {tuple(shape)}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} with strides {tensor.stride()} must be contiguous")


def check_rows(num_rows: int, min_width: int, **tensors: torch.Tensor) -> None:
    """Check that tensors are contiguous rows, which may lie apart.

    Raises:
        ValueError: One has not just ``num_rows`` rows of at least ``min_width``, or its rows are not contiguous.
    """
    for name, tensor in tensors.items():
        shape = tensor.shape
        if len(shape) != 2 or shape[0] != num_rows or shape[1] < min_width:
            raise ValueError(f"{name} of shape {tuple(shape)} must be {num_rows} rows of at least {min_width}")
        if tensor.stride(1) != 1:
            raise ValueError(f"{name} with strides {tensor.stride()} must have contiguous rows")
