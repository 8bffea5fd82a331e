"""prefill_attention against its reference."""

from itertools import accumulate

import pytest
import torch

from lightserve.kernels.prefill_attention import (
    GATHERED_RULE,
    gather_len_for,
    plan_prefill,
    prefill_attention,
    prefill_attention_reference,
)
from tests.kernels.kit import DTYPES, HEADS, assert_close, int32, poisoned, randn, random_slots


def check(
    extend_lens: list[int], cached_lens: list[int], heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads = heads
    seq_lens = [extend + cached for extend, cached in zip(extend_lens, cached_lens, strict=True)]
    num_slots = sum(seq_lens) + 5
    cache = poisoned(num_slots, 2, num_kv_heads, head_dim, dtype=dtype)  # unwritten slots may hold anything
    req_to_slots, req_rows = random_slots(seq_lens, max(seq_lens, default=0) + 3, num_slots)
    for req_row, seq_len in zip(req_rows.tolist(), seq_lens, strict=True):
        cache[req_to_slots[req_row, :seq_len].long()] = randn(seq_len, 2, num_kv_heads, head_dim, dtype=dtype)
    q = randn(sum(extend_lens), num_heads, head_dim, dtype=dtype)
    arguments = (q, cache, req_to_slots, req_rows, int32([0, *accumulate(extend_lens)]), int32(seq_lens))
    expected = prefill_attention_reference(*arguments, scale=head_dim**-0.5)
    block_keys = GATHERED_RULE.block_keys
    for gather_len in (0, sum(-(-seq_len // block_keys) for seq_len in seq_lens) * block_keys):
        plan = plan_prefill(
            *arguments[2:],
            num_tokens=len(q),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            gather_len=gather_len,
        )
        out = poisoned(*q.shape, dtype=dtype)
        assert_close(prefill_attention(*arguments, scale=head_dim**-0.5, plan=plan, out=out), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_prefill_attention_equals_its_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    check([1, 35, 17], [0, 0, 60], (num_heads, num_kv_heads), head_dim, dtype)


@pytest.mark.parametrize("heads", [(9, 3), (7, 1), (16, 4)])
def test_mixed_lengths_and_cached_prefixes_share_a_launch(heads: tuple[int, int]) -> None:
    check([70, 1, 0, 33], [0, 90, 0, 64], heads, 64, torch.float32)


def test_no_requests_and_no_tokens_are_no_work() -> None:
    check([], [], (4, 2), 64, torch.float32)
    check([0], [5], (4, 2), 64, torch.float32)


def test_rows_of_padding_are_left_alone() -> None:
    q, cache, out = randn(9, 2, 64), randn(20, 2, 2, 64), poisoned(9, 2, 64, dtype=torch.float32)
    table = torch.arange(20, device=q.device).int().view(1, -1)
    prefill_attention(q, cache, table, int32([0, 0]), int32([0, 4, 4]), int32([7, 0]), scale=0.125, out=out)
    assert not out[:4].isnan().any()
    assert out[4:].isnan().all()


@pytest.mark.parametrize("extend_lens", [[1], [0], [8192], [5, 0, 700, 64], [1] * 300])
def test_a_plan_covers_every_token_once_longest_first(extend_lens: list[int]) -> None:
    cached_lens = [11 * i for i in range(len(extend_lens))]
    tiles = plan_prefill(
        torch.empty(0, 1, dtype=torch.int32),
        int32([i + 7 for i in range(len(extend_lens))]),
        int32([0, *accumulate(extend_lens)]),
        int32([extend + cached for extend, cached in zip(extend_lens, cached_lens, strict=True)]),
        num_tokens=sum(extend_lens),
        num_heads=8,
        num_kv_heads=2,
    ).tiles.tolist()
    used = [tile for tile in tiles if tile[3]]
    rows = sorted((tile[1] + i, tile[0] - 7, tile[2] + i) for tile in used for i in range(tile[3]))
    assert rows == [
        (first + i, req, cached_lens[req] + i)
        for req, (first, extend) in enumerate(zip(accumulate([0, *extend_lens]), extend_lens, strict=False))
        for i in range(extend)
    ]
    for req in range(len(extend_lens)):
        ends = [tile[2] + tile[3] for tile in used if tile[0] == req + 7]
        assert ends == sorted(ends, reverse=True)


def test_gathering_pays_for_many_queries_per_key_alone() -> None:
    assert gather_len_for([2000], [2000]) == 2048
    assert gather_len_for([1000, 1000], [1000, 4096]) == 1024 + 4096
    assert gather_len_for([64], [8192]) == 0
    assert gather_len_for([256, 256], [256, 256]) == 0
    assert gather_len_for([8192], [100_000]) == 0  # the copy would be too large
