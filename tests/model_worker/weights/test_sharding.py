import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightserve.errors import ConfigError
from lightserve.model_config import ModelConfig
from lightserve.model_worker.weights.sharding import Shard
from lightserve.rope_config import RopeConfig


def config_of(num_heads: int, num_kv_heads: int, intermediate_size: int, vocab_size: int) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        weights_path="m",
        hidden_size=64,
        intermediate_size=intermediate_size,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        vocab_size=vocab_size,
        rms_norm_eps=1e-5,
        rope=RopeConfig(10000.0),
        max_position=64,
        tie_embeddings=False,
        qkv_bias=False,
        qk_norm=False,
        dtype="float32",
        eos_token_ids=(),
        bos_token_id=None,
    )


def joined(parts: list[range]) -> list[int]:
    return [number for part in parts for number in part]


@given(
    kv_heads=st.sampled_from([1, 2, 3, 4, 8]),
    group=st.sampled_from([1, 2, 3, 4, 7]),
    world_size=st.sampled_from([1, 2, 3, 4, 6, 8]),
    vocab_size=st.integers(1, 2000),
)
def test_the_ranks_hold_everything_and_each_query_head_beside_its_kv_head(
    kv_heads: int, group: int, world_size: int, vocab_size: int
) -> None:
    config = config_of(kv_heads * group, kv_heads, 96, vocab_size)
    try:
        shards = [Shard.of(config, rank, world_size) for rank in range(world_size)]
    except ConfigError:
        assert config.num_heads % world_size or (kv_heads % world_size and world_size % kv_heads)
        return
    assert joined([shard.q_heads for shard in shards]) == list(range(config.num_heads))
    assert joined([shard.ffn for shard in shards]) == list(range(96))
    rows = joined([shard.vocab for shard in shards])
    assert rows == list(range(len(rows)))
    assert 0 <= len(rows) - vocab_size < world_size
    assert len({len(shard.vocab) for shard in shards}) == 1
    for shard in shards:
        assert {head // group for head in shard.q_heads} == set(shard.kv_heads)


def test_fewer_kv_heads_than_ranks_are_shared_by_neighbours() -> None:
    shards = [Shard.of(config_of(8, 2, 96, 1003), rank, 4) for rank in range(4)]
    assert [list(shard.kv_heads) for shard in shards] == [[0], [0], [1], [1]]
    assert [len(shard.vocab) for shard in shards] == [251] * 4


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "world_size", "valid"),
    [(9, 3, 2, "1, 3, 9"), (14, 2, 4, "1, 2, 14"), (12, 6, 4, "1, 2, 3, 6, 12")],
)
def test_a_size_that_does_not_divide_is_refused_with_those_that_do(
    num_heads: int, num_kv_heads: int, world_size: int, valid: str
) -> None:
    with pytest.raises(ConfigError, match=f"--tp {world_size} .*--tp may be {valid}$"):
        Shard.of(config_of(num_heads, num_kv_heads, 252, 1003), 0, world_size)
