"""Each check's text names the tensor, what it is and what it must be."""

import pytest
import torch

from lightserve.kernels.checks import check_contiguous, check_rows


def test_what_fits_passes() -> None:
    x = torch.zeros(4, 6)
    check_contiguous((4, 6), x=x)
    check_contiguous((0,), x=torch.zeros(0))
    check_rows(4, 3, x=x, part=x[:, 2:5])
    check_rows(0, 3, x=x[:0])


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (torch.zeros(3), "x of shape (3,) must be of shape (4,)"),
        (torch.zeros(4, 1), "x of shape (4, 1) must be of shape (4,)"),
        (torch.zeros(8)[::2], "x with strides (2,) must be contiguous"),
    ],
)
def test_another_shape_and_strides_are_faults_of_their_own(x: torch.Tensor, text: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  # the whole text is compared
        check_contiguous((4,), first=torch.zeros(4), x=x)
    assert str(raised.value) == text


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (torch.zeros(12), "x of shape (12,) must be 4 rows of at least 3"),
        (torch.zeros(5, 3), "x of shape (5, 3) must be 4 rows of at least 3"),
        (torch.zeros(4, 2), "x of shape (4, 2) must be 4 rows of at least 3"),
        (torch.zeros(3, 4).t(), "x with strides (1, 4) must have contiguous rows"),
    ],
)
def test_rows_too_few_too_short_or_strewn_are_named(x: torch.Tensor, text: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  # the whole text is compared
        check_rows(4, 3, first=torch.zeros(4, 3), x=x)
    assert str(raised.value) == text
