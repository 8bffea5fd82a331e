"""What a step sends to the device: one packed copy, from page-locked memory, of everything that its kernels read.

The words of the buffer are int32. A step fills one stretch of it:

    [base - sample words, base)   what sampling reads; its place depends on the sample shape alone
    [base, base + forward words)  what the model reads; its place depends on the forward shape alone

so that a graph captured for a shape finds its inputs at the same addresses in every step, whatever goes with it. Every
section begins at a multiple of 16 bytes: a kernel is compiled for one alignment only.
"""

import functools
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lightserve.errors import InvariantError
from lightserve.kernels.copy_words import copy_words
from lightserve.model_worker.host_batch import HostBatch
from lightserve.model_worker.req_rows import ReqRows
from lightserve.model_worker.sampling_rows import SamplingRows
from lightserve.sampling_params import MAX_STOP_TOKEN_IDS

Words: TypeAlias = npt.NDArray[np.int32]

CHUNKS_PER_LAUNCH = 64  # the kernel that plans prefill attention takes long to compile for more
_ALIGNMENT = 4  # words: 16 bytes


class Sampling(Enum):
    """How much a step's rows ask of sampling."""

    GREEDY = auto()  # every row takes the greatest logit
    DRAW = auto()
    ADJUST = auto()  # penalties or forbidden ids come before the draw


@dataclass(frozen=True, slots=True)
class ForwardShape:
    """How many of each there is room for.

    Attributes:
        num_tokens: Tokens of the batch.
        num_decode: Decode rows; 0: none, and no kernel for them.
        num_chunks: Prefill chunks, a multiple of ``CHUNKS_PER_LAUNCH``; 0: none, and no kernel for them.
        gather_lens: For each launch of prefill attention, how many keys and values it gathers side by side first; 0,
            or left out: none.
    """

    num_tokens: int
    num_decode: int
    num_chunks: int
    gather_lens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleShape:
    """How many rows are sampled, and how."""

    num_sampled: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class ForwardSections:
    """Where the model's inputs lie, relative to the base.

    Attributes:
        given_ids: [num_tokens], -1 where the device knows the id.
        token_rows: [num_tokens].
        positions: [num_tokens].
        out_slots: [num_tokens].
        decode_rows: [num_decode], padded with the padding row.
        decode_lens: [num_decode], length including this step's token; 0 for padding.
        chunk_rows: [num_chunks], padded with the padding row.
        chunk_lens: [num_chunks], length of each request including its chunk; 0 for padding.
        chunk_bounds: [num_chunks + 1]: tokens of chunk i are [chunk_bounds[i], chunk_bounds[i + 1]); none for padding.
    """

    given_ids: slice
    token_rows: slice
    positions: slice
    out_slots: slice
    decode_rows: slice
    decode_lens: slice
    chunk_rows: slice
    chunk_lens: slice
    chunk_bounds: slice

    @property
    def num_words(self) -> int:
        """Words in all."""
        return _aligned(self.chunk_bounds.stop)


@dataclass(frozen=True, slots=True)
class SampleSections:
    """Where sampling's inputs lie, relative to their start. Sections that its kind does not need are empty.

    Attributes:
        sampled_tokens: [num_sampled], index in the batch.
        sampled_rows: [num_sampled], padded with the padding row.
        result_row: [1], the row of the host's memory in which the results belong.
        sampled_positions: [num_sampled], absolute position of each new id.
        temperature: [num_sampled] float32.
        top_k: [num_sampled].
        top_p: [num_sampled] float32.
        min_p: [num_sampled] float32.
        seeds: [num_sampled] int64.
        repetition: [num_sampled] float32.
        presence: [num_sampled] float32.
        frequency: [num_sampled] float32.
        forbidden_ids: [num_sampled, forbidden width], padded with -1.
    """

    sampled_tokens: slice
    sampled_rows: slice
    result_row: slice
    sampled_positions: slice
    temperature: slice
    top_k: slice
    top_p: slice
    min_p: slice
    seeds: slice
    repetition: slice
    presence: slice
    frequency: slice
    forbidden_ids: slice

    @property
    def num_words(self) -> int:
        """Words in all."""
        return _aligned(self.forbidden_ids.stop)


@functools.lru_cache(maxsize=1024)
def forward_sections(shape: ForwardShape) -> ForwardSections:
    """Lay out the model's inputs."""
    num_tokens, num_decode, num_chunks = shape.num_tokens, shape.num_decode, shape.num_chunks
    bounds = num_chunks + 1 if num_chunks else 0
    return ForwardSections(*_lay_out([num_tokens] * 4 + [num_decode] * 2 + [num_chunks] * 2 + [bounds]))


@functools.lru_cache(maxsize=1024)
def sample_sections(shape: SampleShape, forbidden_width: int) -> SampleSections:
    """Lay out sampling's inputs."""
    n = shape.num_sampled
    drawn = 0 if shape.sampling is Sampling.GREEDY else n
    adjusted = n if shape.sampling is Sampling.ADJUST else 0
    return SampleSections(
        *_lay_out([n] * 2 + [1] + [drawn] * 5 + [2 * drawn] + [adjusted] * 3 + [adjusted * forbidden_width])
    )


def _lay_out(lengths: list[int]) -> list[slice]:
    starts = accumulate(map(_aligned, lengths), initial=0)
    return [slice(start, start + length) for start, length in zip(starts, lengths, strict=False)]


def _aligned(num_words: int) -> int:
    return -(-num_words // _ALIGNMENT) * _ALIGNMENT


class StepInputs:
    """The layout of a step's words, and the device's copy of them.

    Args:
        num_rows: Most running requests; also the number of the padding row.
        largest_forward: No forward shape takes more words.
        max_sampled: No sample shape has more rows.
        num_eos_ids: End-of-sequence ids of the model.
        padding_slot: Where padding tokens write.
        device: Of the copy.

    Attributes:
        base: Where the model's inputs begin and sampling's end.
        num_words: Words of the buffer.
        max_sampled: No sample shape has more rows.
        forbidden_width: Most ids that a row can be forbidden.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        largest_forward: ForwardShape,
        max_sampled: int,
        num_eos_ids: int,
        padding_slot: int,
        device: torch.device,
    ) -> None:
        self.forbidden_width = _aligned(num_eos_ids + MAX_STOP_TOKEN_IDS)
        self._num_rows = num_rows
        self._padding_slot = padding_slot
        self.max_sampled = max_sampled
        self.base = sample_sections(SampleShape(max_sampled, Sampling.ADJUST), self.forbidden_width).num_words
        self.num_words = self.base + forward_sections(largest_forward).num_words
        self._device_words = torch.zeros(self.num_words, dtype=torch.int32, device=device)

    def forward(self, shape: ForwardShape) -> torch.Tensor:
        """Give the device's words of a forward shape, for ``forward_sections``."""
        return self._device_words[self.base : self.base + forward_sections(shape).num_words]

    def sample(self, shape: SampleShape) -> torch.Tensor:
        """Give the device's words of a sample shape, for ``sample_sections``."""
        return self._device_words[self.base - sample_sections(shape, self.forbidden_width).num_words : self.base]

    def stage_forward(self, words: Words, batch: HostBatch, shape: ForwardShape) -> int:
        """Write a batch into the host's words, padded to ``shape``.

        Args:
            words: [num_words] int32.
            batch: Fits the shape.
            shape: Of the batch.

        Returns:
            Where the words to copy end.

        Raises:
            InvariantError: There is no room for so many words.
        """
        sections = forward_sections(shape)
        end = self.base + sections.num_words
        if end > self.num_words:
            raise InvariantError(f"a step of shape {shape} takes {end} words, there are {self.num_words}")
        words = words[self.base : end]
        self._stage_tokens(words, batch, sections)
        if shape.num_decode:
            self._stage_decodes(words, batch, sections)
        if shape.num_chunks:
            self._stage_chunks(words, batch, sections)
        return end

    def _stage_tokens(self, words: Words, batch: HostBatch, sections: ForwardSections) -> None:
        tokens = _Filler(batch.num_tokens)
        tokens.fill(words[sections.given_ids], batch.token_ids, padding=0)
        words[sections.given_ids][: batch.num_decode] = -1
        tokens.fill(words[sections.token_rows], batch.token_rows, padding=self._num_rows)
        tokens.fill(words[sections.positions], batch.positions, padding=0)
        tokens.fill(words[sections.out_slots], batch.out_slots, padding=self._padding_slot)

    def _stage_decodes(self, words: Words, batch: HostBatch, sections: ForwardSections) -> None:
        decodes = _Filler(batch.num_decode)
        decodes.fill(words[sections.decode_rows], batch.req_rows[: batch.num_decode], padding=self._num_rows)
        decodes.fill(words[sections.decode_lens], batch.seq_lens[: batch.num_decode], padding=0)

    def _stage_chunks(self, words: Words, batch: HostBatch, sections: ForwardSections) -> None:
        chunks, bounds = _Filler(batch.num_chunks), _Filler(batch.num_chunks + 1)
        chunks.fill(words[sections.chunk_rows], batch.req_rows[batch.num_decode :], padding=self._num_rows)
        chunks.fill(words[sections.chunk_lens], batch.seq_lens[batch.num_decode :], padding=0)
        bounds.fill(words[sections.chunk_bounds], batch.cu_seqlens[batch.num_decode :], padding=batch.num_tokens)

    def stage_sampling(
        self, words: Words, batch: HostBatch, shape: SampleShape, params: SamplingRows, rows: ReqRows, result_row: int
    ) -> int:
        """Write what sampling reads into the host's words, padded to ``shape``.

        Args:
            words: [num_words] int32.
            batch: Of this step.
            shape: Of its sampling.
            params: Sampling parameters of every row.
            rows: For prompt lengths.
            result_row: The row in which the results belong.

        Returns:
            Where the words to copy begin.
        """
        sections = sample_sections(shape, self.forbidden_width)
        start = self.base - sections.num_words
        words = words[start : self.base]
        sampled_rows = batch.sampled_rows
        sampled = _Filler(len(sampled_rows))
        sampled.fill(words[sections.sampled_tokens], batch.sampled_tokens, padding=0)
        sampled.fill(words[sections.sampled_rows], sampled_rows, padding=self._num_rows)
        words[sections.result_row] = result_row
        if shape.sampling is Sampling.GREEDY:
            return start
        padded_rows = words[sections.sampled_rows]
        sampled.fill(words[sections.sampled_positions], batch.sampled_positions, padding=0)
        words[sections.temperature].view(np.float32)[:] = params.temperature[padded_rows]
        words[sections.top_k] = params.top_k[padded_rows]
        words[sections.top_p].view(np.float32)[:] = params.top_p[padded_rows]
        words[sections.min_p].view(np.float32)[:] = params.min_p[padded_rows]
        words[sections.seeds].view(np.int64)[:] = params.seeds[padded_rows]
        if shape.sampling is Sampling.ADJUST:
            words[sections.repetition].view(np.float32)[:] = params.repetition[padded_rows]
            words[sections.presence].view(np.float32)[:] = params.presence[padded_rows]
            words[sections.frequency].view(np.float32)[:] = params.frequency[padded_rows]
            forbidden = words[sections.forbidden_ids].reshape(-1, self.forbidden_width)
            too_short = params.too_short(batch, rows)
            forbidden[: len(sampled_rows)] = params.forbidden_ids(sampled_rows, too_short, self.forbidden_width)
            forbidden[len(sampled_rows) :] = -1
        return start

    def clear(self) -> None:
        """Fill the device's words with zeros: whatever the shape, a batch of padding in slot 0."""
        self._device_words.zero_()

    def copy(self, words: torch.Tensor, start: int, end: int) -> None:
        """Send the words [start, end) to the device, from page-locked memory."""
        copy_words(words[start:end], out=self._device_words[start:end])


class _Filler:
    """Writes so many values to the front of a section and padding behind them."""

    def __init__(self, num_values: int) -> None:
        self._num_values = num_values

    def fill(self, section: Words, values: Words, *, padding: int) -> None:
        section[: self._num_values] = values
        if self._num_values < len(section):
            section[self._num_values :] = padding
