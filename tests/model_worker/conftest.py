"""Interpret the kernels where there is no GPU; must come before the first import of triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
