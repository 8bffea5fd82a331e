"""decode_attention against its reference."""

import pytest
import torch

from lightserve.kernels.decode_attention import decode_attention, decode_attention_reference
from lightserve.kernels.decode_plan import SHORT_CHUNK, plan_decode
from lightserve.kernels.rope_kv_write import Rotation
from tests.kernels.kit import DTYPES, HEADS, assert_close, int32, poisoned, randn, random_slots

CHUNK = 2 * SHORT_CHUNK  # one so long is cut where requests are few


def check(seq_lens: list[int], heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    num_heads, num_kv_heads = heads
    num_slots = sum(seq_lens) + 5
    cache = poisoned(num_slots, 2, num_kv_heads, head_dim, dtype=dtype)  # unwritten slots may hold anything
    req_to_slots, req_rows = random_slots(seq_lens, max(seq_lens, default=0) + 3, num_slots)
    for req_row, seq_len in zip(req_rows.tolist(), seq_lens, strict=True):
        cache[req_to_slots[req_row, :seq_len].long()] = randn(seq_len, 2, num_kv_heads, head_dim, dtype=dtype)
    q = randn(len(seq_lens), num_heads, head_dim, dtype=dtype)
    arguments = (q, cache, req_to_slots, req_rows, int32(seq_lens))
    out = decode_attention(*arguments, scale=head_dim**-0.5, out=poisoned(*q.shape, dtype=dtype))
    assert_close(out, decode_attention_reference(*arguments, scale=head_dim**-0.5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_decode_attention_equals_its_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    check([1, 63, 64, 65, 0, 131], (num_heads, num_kv_heads), head_dim, dtype)


@pytest.mark.parametrize("heads", [(9, 3), (7, 1), (16, 4)])
@pytest.mark.parametrize("multiprocessors", [1, 16])
def test_the_items_of_long_requests_are_merged_inside_the_kernel_and_after_it(
    multiprocessors: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightserve.kernels.decode_plan.num_multiprocessors", lambda device: multiprocessors)
    check([3 * CHUNK + 1, 7, 2 * CHUNK], heads, 64, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("norm", [False, True])
def test_with_a_rotation_it_first_writes_the_new_keys_and_values(
    num_heads: int, num_kv_heads: int, head_dim: int, norm: bool, dtype: torch.dtype
) -> None:
    check_with_rotation(num_heads, num_kv_heads, head_dim, norm, dtype)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (7, 1)])
def test_of_a_request_that_is_cut_the_last_item_alone_writes(
    num_heads: int, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightserve.kernels.decode_plan.num_multiprocessors", lambda device: 16)
    check_with_rotation(num_heads, num_kv_heads, 64, False, torch.float32)


def check_with_rotation(num_heads: int, num_kv_heads: int, head_dim: int, norm: bool, dtype: torch.dtype) -> None:
    seq_lens, num_slots = [1, 64, 65, 2 * CHUNK + 3, 0, 0], 1000
    q_norm, k_norm = (randn(head_dim, dtype=dtype), randn(head_dim, dtype=dtype)) if norm else (None, None)
    rotation = Rotation(randn(300, head_dim), q_norm, k_norm, 1e-6)
    req_to_slots, req_rows = random_slots(seq_lens, max(seq_lens), num_slots)
    cache = randn(num_slots, 2, num_kv_heads, head_dim, dtype=dtype)
    for req_row, seq_len in zip(req_rows.tolist(), seq_lens, strict=True):
        cache[req_to_slots[req_row, seq_len - 1 : seq_len].long()] = float("nan")  # what is to be written
    expected_cache = cache.clone()
    qkv = randn(5, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)  # of the last padding row there is none
    batch = (req_to_slots, req_rows, int32(seq_lens))
    expected = decode_attention_reference(qkv, expected_cache, *batch, scale=head_dim**-0.5, rotation=rotation)
    out = poisoned(len(seq_lens), num_heads, head_dim, dtype=dtype)
    decode_attention(qkv, cache, *batch, scale=head_dim**-0.5, rotation=rotation, out=out)
    assert_close(out, expected)
    assert_close(cache, expected_cache)


@pytest.mark.parametrize(("width", "angles"), [(8 * 64 - 1, 64), (8 * 64, 32)])
def test_heads_and_angles_of_another_width_are_refused(width: int, angles: int) -> None:
    cache, batch = randn(9, 2, 2, 64), (int32([0] * 4).view(1, 4), int32([0]), int32([1]))
    with pytest.raises(ValueError, match="as wide as cos_sin"):
        decode_attention(randn(1, width), cache, *batch, scale=1.0, rotation=Rotation(randn(9, angles)))


def test_no_requests_are_no_work() -> None:
    check([], (4, 2), 64, torch.float32)


def test_a_plan_serves_many_launches() -> None:
    seq_lens, req_rows = int32([2 * CHUNK, 3]), int32([0, 1])
    req_to_slots = torch.randperm(4 * CHUNK, device=seq_lens.device).int().view(2, -1)
    cache, q = randn(4 * CHUNK, 2, 2, 64), randn(2, 4, 64)
    plan = plan_decode(req_rows, seq_lens, num_heads=4, num_kv_heads=2, head_dim=64)
    arguments = (q, cache, req_to_slots, req_rows, seq_lens)
    first = decode_attention(*arguments, scale=0.125, plan=plan)
    assert torch.equal(decode_attention(*arguments, scale=0.125, plan=plan), first)
    assert_close(first, decode_attention_reference(*arguments, scale=0.125))


def test_an_output_of_another_shape_is_refused() -> None:
    cache, batch = randn(9, 2, 2, 64), (int32([0] * 4).view(1, 4), int32([0]), int32([1]))
    with pytest.raises(ValueError, match=r"out of shape \(2, 4, 64\) must be of shape \(1, 4, 64\)"):
        decode_attention(randn(1, 4, 64), cache, *batch, scale=1.0, out=randn(2, 4, 64))
