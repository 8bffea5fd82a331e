"""A step's work on a GPU, in two parts: the model on a batch, then the sampling of its rows.

Both read all they need from the device's words, and leave what they find on the device and, for the host, in a row of
page-locked memory that the words name. So each can be captured as a graph once for a shape and serve every batch that
fits it.
"""

import torch

from lightserve.kernels.commit_tokens import commit_tokens
from lightserve.kernels.embedding import embedding
from lightserve.kernels.greedy import greedy
from lightserve.kernels.penalties import forbid, penalties
from lightserve.kernels.place_tokens import place_tokens
from lightserve.kernels.sampling import sample
from lightserve.model_worker.cuda.backend import CudaBackend
from lightserve.model_worker.cuda.step_inputs import (
    ForwardShape,
    SampleShape,
    Sampling,
    StepInputs,
    forward_sections,
    sample_sections,
)
from lightserve.model_worker.kv_cache import KVCache
from lightserve.model_worker.models.llama import LlamaModel
from lightserve.model_worker.req_rows import ReqRows
from lightserve.model_worker.token_counts import TokenCounts

# Step n + 1 is launched before the result of step n is read, step n + 2 after it (``WorkerService.exposed_step``).
STEPS_IN_FLIGHT = 2


class CudaStep:
    """Launches the two parts of a step.

    Args:
        model: This rank's.
        kv_cache: This rank's.
        rows: State of the running requests.
        inputs: The device's words.
        max_padded_tokens: No forward shape has more tokens.
        vocab_size: Ids from here on are never sampled.
        dtype: Of hidden states.

    Attributes:
        results: [STEPS_IN_FLIGHT, 2 · most sampled rows] int32, on the host, page-locked where there is a GPU. A step's
            row begins with its ids, then the bits of its logprobs.
        kv_cache: This rank's.
        token_counts: What each row has seen.
    """

    def __init__(
        self,
        model: LlamaModel[CudaBackend],
        kv_cache: KVCache,
        rows: ReqRows,
        inputs: StepInputs,
        *,
        max_padded_tokens: int,
        vocab_size: int,
        dtype: torch.dtype,
    ) -> None:
        device = rows.next_token.device
        self._model = model
        self.kv_cache = kv_cache
        self._rows = rows
        self._inputs = inputs
        self._vocab_size = vocab_size
        self._hidden = torch.zeros(max_padded_tokens, model.hidden_size, dtype=dtype, device=device)
        self.results = torch.zeros(
            STEPS_IN_FLIGHT, 2 * inputs.max_sampled, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self.token_counts = TokenCounts(rows.num_rows, vocab_size, device)

    def forward(self, shape: ForwardShape) -> None:
        """Run the model on the batch in the device's words; keep the hidden states for sampling."""
        words, sections, rows = self._inputs.forward(shape), forward_sections(shape), self._rows
        token_ids = place_tokens(
            words[sections.given_ids],
            rows.next_token,
            words[sections.token_rows],
            words[sections.positions],
            words[sections.out_slots],
            rows.req_to_slots,
        )
        self._model.backend.begin(words, shape, rows.req_to_slots)
        self._model.forward(token_ids, self.kv_cache, out=self._hidden[: shape.num_tokens])

    def sample(self, shape: SampleShape) -> None:
        """Sample the rows in the device's words; keep the ids for the next step and for the host."""
        words, sections = self._inputs.sample(shape), sample_sections(shape, self._inputs.forbidden_width)
        logits = self._model.logits(embedding(words[sections.sampled_tokens], self._hidden))  # a gather of rows
        req_rows = words[sections.sampled_rows]
        if shape.sampling is Sampling.GREEDY:
            token_ids, logprobs = greedy(logits, vocab_size=self._vocab_size)
        else:
            scores = self._adjusted(logits, words, shape) if shape.sampling is Sampling.ADJUST else None
            token_ids, logprobs = sample(
                logits,
                words[sections.temperature].view(torch.float32),
                words[sections.top_k],
                words[sections.top_p].view(torch.float32),
                words[sections.min_p].view(torch.float32),
                words[sections.seeds].view(torch.int64),
                words[sections.sampled_positions],
                vocab_size=self._vocab_size,
                scores=scores,
            )
        commit_tokens(
            token_ids,
            logprobs,
            req_rows,
            self._rows.next_token,
            out_row=words[sections.result_row],
            out=self.results,
            token_counts=self.token_counts.counts if shape.sampling is Sampling.ADJUST else None,
        )

    def _adjusted(self, logits: torch.Tensor, words: torch.Tensor, shape: SampleShape) -> torch.Tensor:
        sections = sample_sections(shape, self._inputs.forbidden_width)
        scores = penalties(
            logits[:, : self._vocab_size],
            self.token_counts.counts,
            words[sections.sampled_rows],
            words[sections.repetition].view(torch.float32),
            words[sections.presence].view(torch.float32),
            words[sections.frequency].view(torch.float32),
        )
        forbid(scores, words[sections.forbidden_ids].view(-1, self._inputs.forbidden_width))
        return scores
