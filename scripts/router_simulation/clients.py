"""The simulation's clients: what they ask, when, and what they see."""

from collections.abc import Iterator, Sequence

import numpy as np
from benchmark.traces import TraceRow

from lightserve.ipc.messages import (
    DetokenizerInbox,
    FailMsg,
    FinishCode,
    GenerateMsg,
    LoadMsg,
    StartMsg,
    TextParams,
    TokensMsg,
    pack_int32,
    unpack_int32,
    unpack_int64,
)
from lightserve.router.arrays import FloatArray, IdArray
from lightserve.sampling_params import SamplingParams
from router_simulation.modelled_worker import VirtualClock

_BLOCK_LEN = 512
# Gaps between tokens are counted by powers of 2 ** (1 / 8) from 10 µs on: percentiles are right to 9 %.
_SMALLEST_GAP_S = 1e-5
_BINS_PER_OCTAVE = 8
_NUM_BINS = 8 * 40


class Clients:
    """Sends requests as they are due, and notes when each gets its tokens.

    Args:
        rows: What each client asks for, and where its answer really ends.
        arrivals_s: [num_requests] when, ascending.
        clock: The time.
        max_new_tokens: What every client asks for; None: its output length, which it then gets in full.
        max_concurrency: Most requests open at once; None: any number.
    """

    def __init__(
        self,
        rows: Sequence[TraceRow],
        arrivals_s: FloatArray,
        clock: VirtualClock,
        max_new_tokens: int | None,
        max_concurrency: int | None,
    ) -> None:
        self._rows = rows
        self._arrivals_s = arrivals_s
        self._clock = clock
        self._max_new_tokens = max_new_tokens
        self._max_concurrency = max_concurrency or len(rows)
        # The trace's names of blocks may be any hashes; numbered, each has ids of its own.
        names = dict.fromkeys(block_id for row in rows for block_id in row.block_ids)
        self._block_numbers = {name: number for number, name in enumerate(names)}
        self._num_sent = 0
        self.num_ended = 0
        self.failures: list[str] = []
        self.sent_s = np.zeros(len(rows))
        self.first_token_s = np.zeros(len(rows))
        self.last_token_s = np.zeros(len(rows))
        self.num_tokens = np.zeros(len(rows), dtype=np.int64)
        self.num_cached = 0
        self.num_prompt_tokens = sum(row.prompt_len for row in rows)
        self.gap_counts = np.zeros(_NUM_BINS, dtype=np.int64)

    @property
    def all_ended(self) -> bool:
        """Whether nobody waits any more."""
        return self.num_ended == len(self._rows)

    def next_arrival_s(self) -> float:
        """Tell when the next request is due."""
        return float(self._arrivals_s[self._num_sent])

    def due(self) -> Iterator[GenerateMsg]:
        """Yield the requests that are due now."""
        while (
            self._num_sent < len(self._rows)
            and self._num_sent - self.num_ended < self._max_concurrency
            and self._arrivals_s[self._num_sent] <= self._clock.now_s
        ):
            number = self._num_sent
            self._num_sent += 1
            self.sent_s[number] = self._clock.now_s
            yield self._message(number)

    def take(self, message: DetokenizerInbox) -> None:
        """Take in what the router says."""
        match message:
            case TokensMsg():
                self._take_tokens(message)
            case FailMsg(req_id, error):
                self.num_ended += 1
                self.failures.append(f"{req_id}: {error.message}")
            case StartMsg() | LoadMsg():
                pass

    def gap_percentile_s(self, percent: float) -> float:
        """Tell an inter-token latency, over all tokens but the first of each answer."""
        shares = np.cumsum(self.gap_counts) / max(1, int(self.gap_counts.sum()))
        return float(_SMALLEST_GAP_S * 2 ** ((np.searchsorted(shares, percent / 100) + 0.5) / _BINS_PER_OCTAVE))

    def _message(self, number: int) -> GenerateMsg:
        row = self._rows[number]
        blocks = [self._block_numbers[block_id] for block_id in row.block_ids]
        known = self._max_new_tokens is None
        max_new_tokens = row.output_len if self._max_new_tokens is None else self._max_new_tokens
        sampling = SamplingParams(max_new_tokens, seed=number, ignore_eos=known)
        return GenerateMsg(number, pack_int32(_prompt_ids(number, row.prompt_len, blocks)), sampling, TextParams())

    def _take_tokens(self, message: TokensMsg) -> None:
        now_s, req_ids = self._clock.now_s, unpack_int64(message.req_ids)
        first_ids = req_ids[self.num_tokens[req_ids] == 0]
        self.first_token_s[first_ids] = now_s
        later_ids = req_ids[self.num_tokens[req_ids] > 0]
        octaves = np.log2(np.maximum(now_s - self.last_token_s[later_ids], _SMALLEST_GAP_S) / _SMALLEST_GAP_S)
        bins = np.minimum((octaves * _BINS_PER_OCTAVE).astype(np.int64), _NUM_BINS - 1)
        self.gap_counts += np.bincount(bins, minlength=_NUM_BINS)
        self.last_token_s[req_ids] = now_s
        self.num_tokens[req_ids] += 1
        self.num_ended += len(message.finish) - message.finish.count(FinishCode.NONE)
        if message.cached_lens:
            self.num_cached += int(unpack_int32(message.cached_lens).sum())


def _prompt_ids(number: int, prompt_len: int, blocks: Sequence[int]) -> IdArray:
    """Make a prompt that shares with others the blocks that the trace names, and else not even its first id."""
    if not blocks:
        alone = np.zeros(prompt_len, dtype=np.int32)
        alone[0] = number
        return alone
    firsts = np.asarray(blocks, dtype=np.int32) * _BLOCK_LEN
    ids: IdArray = np.add.outer(firsts, np.arange(_BLOCK_LEN, dtype=np.int32)).ravel()[:prompt_len]
    missing = np.full(prompt_len - len(ids), -1 - number, dtype=np.int32)
    return np.concatenate([ids, missing])
