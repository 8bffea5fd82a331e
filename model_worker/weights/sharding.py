"""Which part of a model one tensor-parallel rank holds."""

from dataclasses import dataclass

from lightserve.errors import ConfigError
from lightserve.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's half-open ranges, each of equal length on every rank.

    Attributes:
        rank: This rank.
        q_heads: Query heads ``[start, stop)``.
        kv_heads: Key/value heads ``[start, stop)``; ranks share one when there are fewer heads than ranks.
        ffn: Columns of the feed-forward layer.
        vocab: Rows of embedding and head; may reach beyond ``vocab_size``, where rows are zero.
    """

    rank: int
    q_heads: range
    kv_heads: range
    ffn: range
    vocab: range

    @classmethod
    def of(cls, config: ModelConfig, rank: int, world_size: int) -> "Shard":
        """Divide a model.

        Raises:
            ConfigError: The model does not divide so; names the sizes that work.
        """
        if not _divides(config, world_size):
            valid = ", ".join(str(n) for n in range(1, config.num_heads + 1) if _divides(config, n))
            raise ConfigError(
                f"--tp {world_size} does not divide this model ({config.num_heads} heads, {config.num_kv_heads} "
                f"key/value heads, feed-forward width {config.intermediate_size}); --tp may be {valid}"
            )
        kv_rank, kv_world = rank, world_size
        if world_size > config.num_kv_heads:
            kv_rank, kv_world = rank * config.num_kv_heads // world_size, config.num_kv_heads
        return cls(
            rank=rank,
            q_heads=_part(config.num_heads, rank, world_size),
            kv_heads=_part(config.num_kv_heads, kv_rank, kv_world),
            ffn=_part(config.intermediate_size, rank, world_size),
            vocab=_part(-(-config.vocab_size // world_size) * world_size, rank, world_size),
        )


def _divides(config: ModelConfig, world_size: int) -> bool:
    kv_heads = config.num_kv_heads
    return (
        config.num_heads % world_size == 0
        and (kv_heads % world_size == 0 or world_size % kv_heads == 0)
        and config.intermediate_size % world_size == 0
    )


def _part(size: int, rank: int, world_size: int) -> range:
    length = size // world_size
    return range(rank * length, (rank + 1) * length)
