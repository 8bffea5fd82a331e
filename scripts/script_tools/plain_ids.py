"""Ids that stand for text: prompts of any others would be of special tokens."""

import numpy as np
import numpy.typing as npt

# Special ids, and those of single bytes, stand at either end of a vocabulary.
_EDGE_FRAC = 0.02


def plain_ids(vocab_size: int) -> range:
    """Leave out a fiftieth of a vocabulary at either end."""
    edge = int(vocab_size * _EDGE_FRAC)
    return range(edge, vocab_size - edge)


def draw_ids(random: np.random.Generator, vocab_size: int, count: int) -> npt.NDArray[np.int32]:
    """Draw [count] plain ids of a vocabulary."""
    plain = plain_ids(vocab_size)
    return random.integers(plain.start, plain.stop, count, dtype=np.int32)
