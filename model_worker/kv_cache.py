"""The key/value cache, one slot per token, and how many slots the memory allows."""

from dataclasses import dataclass

import torch

from lightserve.errors import ConfigError

GIB = 1 << 30


class KVCache:
    """K and V of every token, addressed by slot.

    Args:
        num_slots: Slots that requests may use. One more, the last, is read and written in place of absent tokens; it
            begins as zeros.
        num_layers: Decoder layers.
        num_kv_heads: This rank's.
        head_dim: Of K and V.
        dtype: Of K and V.
        device: Where they lie.

    Attributes:
        layers: One [num_slots + 1, 2, num_kv_heads, head_dim] tensor per layer: K and V of a token lie together.
        padding_slot: Number of the last slot.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Not filled: on a CPU, pages that no token has reached cost nothing.
        whole = torch.empty(num_layers, num_slots + 1, 2, num_kv_heads, head_dim, dtype=dtype, device=device)
        whole[:, -1] = 0
        self.layers = list(whole.unbind(0))
        self.padding_slot = num_slots


def slot_bytes(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one slot takes on one rank."""
    return num_layers * 2 * num_kv_heads * head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many slots, and the arithmetic behind it in words."""

    num_slots: int
    note: str


def size_pool(
    requested: int | None, *, free_bytes: int, default_bytes: int, bytes_per_slot: int, max_useful: int
) -> PoolSize:
    """Decide how many slots the pool gets.

    Args:
        requested: ``--max_total_token_num``, or None.
        free_bytes: Memory that the pool may take on this rank at most.
        default_bytes: Memory that it takes when no number is asked for; at most ``free_bytes``.
        bytes_per_slot: From ``slot_bytes``.
        max_useful: Slots that all the requests together could ever fill.

    Raises:
        ConfigError: The number asked for does not fit (names the one that does), or nothing fits.
    """
    # One slot more is kept for padding.
    max_slots = free_bytes // bytes_per_slot - 1
    arithmetic = f"{_gib(free_bytes)} free / {bytes_per_slot:,} bytes per token"
    if requested is not None:
        if requested > max_slots:
            raise ConfigError(
                f"--max_total_token_num {requested} does not fit: at most {max(max_slots, 0)} ({arithmetic})"
            )
        return PoolSize(requested, f"as asked for; {_gib(requested * bytes_per_slot)} of {_gib(free_bytes)} free")
    by_default = default_bytes // bytes_per_slot - 1
    if by_default < 1:
        raise ConfigError(f"no memory is left for the KV cache ({arithmetic})")
    if by_default > max_useful:
        return PoolSize(max_useful, "running_max_req_size × max_req_total_len, the most that can ever be filled")
    return PoolSize(
        by_default, f"{_gib(default_bytes)} of {_gib(free_bytes)} free / {bytes_per_slot:,} bytes per token"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
