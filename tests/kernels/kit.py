"""What the kernel tests share: the device, dtypes with their tolerances, poisoned outputs, random caches."""

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Of ‖out - ref‖ / ‖ref‖. The interpreter cuts off what does not fit into a bfloat16, where a GPU rounds.
TOLERANCE = {
    torch.float32: 2e-5,
    torch.bfloat16: 1e-2 if DEVICE.type == "cuda" else 2e-2,
    torch.float16: 2e-3,
}
DTYPES = list(TOLERANCE)
HEADS = [(9, 3, 64), (32, 8, 64), (32, 8, 128), (7, 1, 80), (2, 2, 256)]  # query heads, kv heads, head_dim


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Measure ‖out - ref‖ / ‖ref‖ in float64; NaN when either holds one."""
    difference = (out.double() - reference.double()).norm()
    return float(difference / reference.double().norm().clamp_min(1e-30))


def assert_close(out: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Compare within the tolerance of ``dtype`` (of ``out`` when not given); NaN never passes."""
    assert out.shape == reference.shape
    if out.numel():
        assert relative_error(out, reference) <= TOLERANCE[dtype or out.dtype]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Draw normal numbers on the device, the same on every device."""
    return torch.randn(shape).to(dtype).to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Make an output that shows every element left unwritten."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def short(x: torch.Tensor) -> torch.Tensor:
    """Leave out the last entry: a kernel that took it would read past its end."""
    return x[:-1]


def sparse(x: torch.Tensor) -> torch.Tensor:
    """Put the same entries twice as far apart along the last dimension."""
    return x.repeat_interleave(2, -1)[..., ::2]


def int32(values: list[int]) -> torch.Tensor:
    """Make a batch tensor."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def random_slots(seq_lens: list[int], table_width: int, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scatter requests over the cache.

    Returns:
        req_to_slots [len(seq_lens) + 2, table_width] int32, whose unused entries lie far outside the cache, and
        req_rows [len(seq_lens)] int32, in no order.
    """
    table = torch.full((len(seq_lens) + 2, table_width), 1 << 30, dtype=torch.int32)
    req_rows = torch.randperm(len(seq_lens) + 2)[: len(seq_lens)].int()
    slots = torch.randperm(num_slots).int()
    start = 0
    for req_row, seq_len in zip(req_rows.tolist(), seq_lens, strict=True):
        table[req_row, :seq_len] = slots[start : start + seq_len]
        start += seq_len
    return table.to(DEVICE), req_rows.to(DEVICE)
