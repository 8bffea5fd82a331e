"""Sampling on a CPU."""

import torch

from lightserve.kernels.penalties import forbid_reference, penalties_reference
from lightserve.kernels.sampling import greedy_reference, sample_reference


class CpuSamplingOps:
    """Implements ``SamplingOps``."""

    def greedy(self, logits: torch.Tensor, *, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the greatest logit of each row."""
        return greedy_reference(logits, vocab_size=vocab_size)

    def sample(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        *,
        vocab_size: int,
        scores: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one id of each row."""
        return sample_reference(
            logits, temperature, top_k, top_p, min_p, seeds, positions, vocab_size=vocab_size, scores=scores
        )

    def penalties(
        self,
        logits: torch.Tensor,
        token_counts: torch.Tensor,
        req_rows: torch.Tensor,
        repetition: torch.Tensor,
        presence: torch.Tensor,
        frequency: torch.Tensor,
    ) -> torch.Tensor:
        """Lower the logits of ids that a request has seen."""
        return penalties_reference(logits, token_counts, req_rows, repetition, presence, frequency)

    def forbid(self, scores: torch.Tensor, forbidden_ids: torch.Tensor) -> None:
        """Set scores to -inf, in place."""
        forbid_reference(scores, forbidden_ids)
