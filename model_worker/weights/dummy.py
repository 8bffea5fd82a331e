"""Random weights at a model's real size, for benchmarks without a checkpoint."""

from math import sqrt

import torch

from lightserve.model_config import ModelConfig
from lightserve.model_worker.weights.layout import pieces_of
from lightserve.model_worker.weights.model_weights import ModelWeights
from lightserve.model_worker.weights.sharding import Shard


def fill_dummy(weights: ModelWeights, config: ModelConfig, shard: Shard) -> None:
    """Fill on the device, the same numbers at every start.

    Matrices are uniform with variance 1 / columns of the whole matrix, so that each product keeps its input's scale and
    logits stay of the order of 1, whatever the depth; norms are one; biases are small.
    """
    generator = torch.Generator(weights.embedding.device).manual_seed(shard.rank)
    for piece in pieces_of(weights, config, shard):
        if piece.columns is not None:
            bound = sqrt(3 / piece.shape[1])
            piece.target.uniform_(-bound, bound, generator=generator)
        elif piece.name.endswith(".bias"):
            piece.target.uniform_(-0.1, 0.1, generator=generator)
        else:
            piece.target.fill_(1.0)
