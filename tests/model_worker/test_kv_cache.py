"""The pool's size, and the cache's layout."""

import pytest
import torch

from lightserve.errors import ConfigError
from lightserve.model_worker.kv_cache import GIB, KVCache, PoolSize, size_pool, slot_bytes


def size(requested: int | None, max_useful: int = 1 << 30, default_bytes: int = GIB) -> PoolSize:
    return size_pool(
        requested, free_bytes=2 * GIB, default_bytes=default_bytes, bytes_per_slot=1 << 20, max_useful=max_useful
    )


def test_a_slot_takes_k_and_v_of_every_layer() -> None:
    assert slot_bytes(30, 3, 64, torch.bfloat16) == 30 * 2 * 3 * 64 * 2


def test_the_pool_fills_its_share_less_the_padding_slot() -> None:
    pool = size(None)
    assert pool.num_slots == 1023
    assert pool.note == "1.00 GiB of 2.00 GiB free / 1,048,576 bytes per token"


def test_the_pool_is_no_larger_than_requests_could_fill() -> None:
    assert size(None, max_useful=100).num_slots == 100


def test_a_number_asked_for_may_take_all_that_is_free() -> None:
    assert size(2047).num_slots == 2047


def test_a_number_that_does_not_fit_is_refused_with_the_one_that_does() -> None:
    with pytest.raises(ConfigError, match=r"--max_total_token_num 2048 does not fit: at most 2047"):
        size(2048)


def test_no_memory_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="no memory"):
        size(None, default_bytes=1 << 20)


def test_the_last_slot_of_every_layer_begins_as_zeros() -> None:
    cache = KVCache(7, num_layers=2, num_kv_heads=3, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))
    assert [layer.shape for layer in cache.layers] == [(8, 2, 3, 4)] * 2
    assert all((layer[cache.padding_slot] == 0).all() for layer in cache.layers)
