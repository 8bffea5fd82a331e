"""rope_kv_write against its reference."""

import pytest
import torch

from lightserve.kernels.rope_kv_write import Rotation, rope_kv_write, rope_kv_write_reference
from tests.kernels.kit import DEVICE, DTYPES, HEADS, assert_close, int32, poisoned, randn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("norm", [False, True])
def test_queries_and_cache_equal_the_references(
    num_heads: int, num_kv_heads: int, head_dim: int, norm: bool, dtype: torch.dtype
) -> None:
    qkv = randn(5, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    q_norm, k_norm = (randn(head_dim, dtype=dtype), randn(head_dim, dtype=dtype)) if norm else (None, None)
    rotation = Rotation(randn(50, head_dim), q_norm, k_norm, 1e-6)
    positions, out_slots = int32([0, 49, 7, 7, 20]), int32([3, 1, 9, 0, 6])
    cache = poisoned(11, 2, num_kv_heads, head_dim, dtype=dtype)
    expected_cache = cache.clone()
    expected = rope_kv_write_reference(qkv, rotation, positions, out_slots, expected_cache, num_heads=num_heads)
    out = poisoned(5, num_heads, head_dim, dtype=dtype)
    rope_kv_write(qkv, rotation, positions, out_slots, cache, num_heads=num_heads, out=out)
    assert_close(out, expected)
    written = out_slots.long()
    assert_close(cache[written], expected_cache[written])
    unwritten = torch.tensor([2, 4, 5, 7, 8, 10], device=DEVICE)
    assert cache[unwritten].isnan().all()


def test_the_layer_may_be_a_view_of_the_whole_cache() -> None:
    whole = torch.zeros(11, 3, 2, 2, 64, device=DEVICE)  # slots outermost: large strides between them
    qkv, rotation, positions, out_slots = randn(2, 8 * 64), Rotation(randn(9, 64)), int32([1, 8]), int32([10, 4])
    expected = whole.clone()
    rope_kv_write_reference(qkv, rotation, positions, out_slots, expected[:, 1], num_heads=4)
    rope_kv_write(qkv, rotation, positions, out_slots, whole[:, 1], num_heads=4)
    assert_close(whole, expected)


def test_no_tokens_are_no_work() -> None:
    cache = torch.zeros(4, 2, 1, 64, device=DEVICE)
    rotation = Rotation(randn(9, 64))
    assert rope_kv_write(randn(0, 3 * 64), rotation, int32([]), int32([]), cache, num_heads=1).shape == (0, 1, 64)


def test_one_norm_without_the_other_is_refused() -> None:
    with pytest.raises(ValueError, match="go together"):
        Rotation(randn(9, 64), q_norm=torch.ones(64))
