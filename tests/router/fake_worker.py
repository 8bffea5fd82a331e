"""A model worker in this process, whose model is a hash of what lies in the slots, and which checks every plan."""

import numpy as np

from lightserve.errors import InvariantError
from lightserve.ipc.messages import StepPlan, StepResult, pack_float32, pack_int32, unpack_int32
from lightserve.sampling_params import SamplingParams

VOCAB_SIZE = 50
_PRIME = 2**61 - 1


def absorb(state: int, token_id: int) -> int:
    """Let a sequence's state take in one more id."""
    return (state * 1_000_003 + token_id + 1) % _PRIME


def next_id(state: int) -> int:
    """Tell which id follows a sequence."""
    return (state >> 7) % VOCAB_SIZE


def expected_ids(prompt_ids: list[int], sampling: SamplingParams, eos_ids: tuple[int, ...] = ()) -> list[int]:
    """Tell what a request alone must produce, the id that ends it included."""
    state, output_ids = 0, list[int]()
    for token_id in prompt_ids:
        state = absorb(state, token_id)
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_ids))
    while len(output_ids) < sampling.max_new_tokens and not (output_ids and output_ids[-1] in ends):
        output_ids.append(next_id(state))
        state = absorb(state, output_ids[-1])
    return output_ids


class FakeWorker:
    """Runs plans one step behind, as the real one does.

    Each slot holds (position, state of the sequence up to there), as K and V depend on all that came before. A decode
    row or chunk must find the right contents in its row's earlier slots.

    Attributes:
        failing_rows: Rows whose next result is -1.
        num_rows: Rows of all steps so far, wasted ones included.
    """

    def __init__(self, num_slots: int, num_rows: int, max_len: int) -> None:
        self.num_slots = num_slots
        self.positions = np.full(num_slots, -1, dtype=np.int64)
        self.states = np.zeros(num_slots, dtype=np.int64)
        self.table = np.full((num_rows, max_len + 1), -1, dtype=np.int64)
        self.ids: dict[int, list[int]] = {}
        self.seq_lens: dict[int, int] = {}
        self.failing_rows: set[int] = set()
        self.plans: list[StepPlan] = []
        self.num_rows = 0
        self._result: StepResult | None = None

    def step(self, plan: StepPlan) -> StepResult | None:
        """Run a plan; return the result of the one before."""
        previous, self._result = self._result, self._run(plan)
        self.plans.append(plan)
        return previous

    def flush(self) -> StepResult | None:
        """Return the last result."""
        previous, self._result = self._result, None
        return previous

    def _run(self, plan: StepPlan) -> StepResult:
        if self.plans and plan.step_id != self.plans[-1].step_id + 1:
            raise InvariantError(f"step {plan.step_id} follows {self.plans[-1].step_id}")
        self._release(plan)
        self._enter(plan)
        sampled = self._forward(plan)
        token_ids = [self._sample(row) for row in sampled]
        return StepResult(plan.step_id, pack_int32(token_ids), pack_float32([-0.5] * len(token_ids)))

    def _release(self, plan: StepPlan) -> None:
        for row in unpack_int32(plan.released_rows).tolist():
            del self.ids[row], self.seq_lens[row]
            self.table[row] = -1

    def _enter(self, plan: StepPlan) -> None:
        for new in plan.new_reqs:
            if new.req_row in self.ids:
                raise InvariantError(f"row {new.req_row} is taken")
            cached_slots = unpack_int32(new.cached_slots)
            self.ids[new.req_row] = unpack_int32(new.ids).tolist()
            self.seq_lens[new.req_row] = len(cached_slots)
            self.table[new.req_row, : len(cached_slots)] = cached_slots

    def _forward(self, plan: StepPlan) -> list[int]:
        decode_rows: list[int] = unpack_int32(plan.decode_rows).tolist()
        prefill_rows = unpack_int32(plan.prefill_rows).tolist()
        out_slots = unpack_int32(plan.out_slots).tolist()
        if len(set(out_slots)) != len(out_slots) or not all(0 <= slot < self.num_slots for slot in out_slots):
            raise InvariantError("a slot is written twice in one step, or lies outside the pool")
        if len(set(decode_rows + prefill_rows)) != len(decode_rows) + len(prefill_rows):
            raise InvariantError("a row runs twice in one step")
        starts, lens = unpack_int32(plan.prefill_starts).tolist(), unpack_int32(plan.prefill_lens).tolist()
        if len(out_slots) != len(decode_rows) + sum(lens):
            raise InvariantError("a token has no slot, or a slot no token")
        slots = iter(out_slots)
        for row in decode_rows:
            if self.seq_lens[row] != len(self.ids[row]) - 1:
                raise InvariantError(f"row {row} decodes although its ids are not in")
            self._write(row, self.seq_lens[row], next(slots))
        sampled = decode_rows
        for row, start, length in zip(prefill_rows, starts, lens, strict=True):
            if start != self.seq_lens[row] or length < 1:
                raise InvariantError(f"row {row} holds {self.seq_lens[row]} positions, its chunk starts at {start}")
            for position in range(start, start + length):
                self._write(row, position, next(slots))
            if start + length == len(self.ids[row]):
                sampled.append(row)
        return sampled

    def _write(self, row: int, position: int, slot: int) -> None:
        state = 0
        if position:
            before = self.table[row, position - 1]
            if self.positions[before] != position - 1:
                raise InvariantError(f"row {row} has lost position {position - 1}")
            state = int(self.states[before])
        self.positions[slot] = position
        self.states[slot] = absorb(state, self.ids[row][position])
        self.table[row, position] = slot
        self.seq_lens[row] = position + 1
        self.num_rows += 1

    def _sample(self, row: int) -> int:
        if row in self.failing_rows:
            self.failing_rows.discard(row)
            self.ids[row].append(0)
            return -1
        slots = self.table[row, : len(self.ids[row])]
        if self.positions[slots].tolist() != list(range(len(slots))):
            raise InvariantError(f"another request has written into row {row}'s slots")
        token_id = next_id(int(self.states[slots[-1]]))
        self.ids[row].append(token_id)
        return token_id
