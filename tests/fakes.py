"""A model worker without a model: speaks the router's real protocol and answers with each prompt's own ids, in a loop.

As a program it is a child process of the launcher in place of the real worker; as a library it makes the tiny model
folder that such a server serves. ``FakeWorkerScript`` says how it misbehaves.
"""

import os
import signal
import sys
import time
from dataclasses import dataclass

import msgspec
import numpy as np
import rpyc

from lightserve.boot import read_boot
from lightserve.child import process_name, run_child
from lightserve.errors import ConfigError, InvariantError
from lightserve.ipc.messages import (
    LoadReply,
    NewReq,
    StepPlan,
    StepResult,
    pack_float32,
    pack_int32,
    unpack_int32,
)
from lightserve.ipc.worker_link import serve_worker

SCRIPT_VARIABLE = "LIGHTSERVE_FAKE_WORKER"
DEFAULT_POOL = 4096


class FakeWorkerScript(msgspec.Struct, frozen=True):
    """What the fake worker does; handed over as JSON in the environment.

    Attributes:
        load_s: Seconds that loading takes.
        loads_while: Loading takes as long as this file exists.
        step_s: Seconds that a step takes.
        config_error: Loading fails with this ``ConfigError``.
        load_error: Loading fails with this ``RuntimeError``.
        kill_at_step: The process kills itself in this step (the first is 0).
        hang_at_step: This step never ends.
        nan_prompt_id: A request whose prompt holds this id gets -1 as its second token.
    """

    load_s: float = 0.0
    loads_while: str = ""
    step_s: float = 0.0
    config_error: str | None = None
    load_error: str | None = None
    kill_at_step: int | None = None
    hang_at_step: int | None = None
    nan_prompt_id: int | None = None

    def environment(self) -> dict[str, str]:
        """The variables that hand this script to the process."""
        return {SCRIPT_VARIABLE: msgspec.json.encode(self).decode()}


@dataclass
class _Row:
    """One running request as the fake sees it; ``slots[i]`` holds position i."""

    ids: list[int]
    prompt_len: int
    max_new_tokens: int
    slots: list[int]
    prefix_hash: int = 0  # of the ids whose positions are in slots

    def next_id(self, script: FakeWorkerScript) -> int:
        """The prompt again, id by id."""
        output_len = len(self.ids) - self.prompt_len
        if output_len == 1 and script.nan_prompt_id in self.ids[: self.prompt_len]:
            return -1
        return self.ids[output_len % self.prompt_len]


class FakeEngine:
    """The state behind the protocol, with checks on what the router asks for.

    Args:
        script: What to do.
        num_slots: Size of the pool.
    """

    def __init__(self, script: FakeWorkerScript, num_slots: int) -> None:
        self._script = script
        self._num_slots = num_slots
        self._rows: dict[int, _Row] = {}
        self._contents = [0] * num_slots  # what a slot's K and V depend on: the hash of all ids up to its own
        self._num_steps = 0

    def step(self, plan: StepPlan) -> StepResult:
        """Run one step, to its end: nothing runs when the next one comes."""
        self._misbehave()
        self._num_steps += 1
        time.sleep(self._script.step_s)
        for req_row in unpack_int32(plan.released_rows).tolist():
            del self._rows[req_row]
        for new in plan.new_reqs:
            self._enter(new)
        self._write(plan)
        sampled = [self._sample(req_row) for req_row in self._sampled_rows(plan)]
        logprobs = np.full(len(sampled), -0.5)
        return StepResult(plan.step_id, pack_int32(sampled), pack_float32(logprobs), device_waited=True)

    def _misbehave(self) -> None:
        if self._num_steps == self._script.kill_at_step:
            os.kill(os.getpid(), signal.SIGKILL)
        while self._num_steps == self._script.hang_at_step:
            time.sleep(1)

    def _enter(self, new: NewReq) -> None:
        if new.req_row in self._rows:
            raise InvariantError(f"row {new.req_row} is taken")
        ids = unpack_int32(new.ids).tolist()
        row = _Row(ids, new.prompt_len, new.sampling.max_new_tokens, unpack_int32(new.cached_slots).tolist())
        for token_id, slot in zip(ids, row.slots, strict=False):
            row.prefix_hash = hash((row.prefix_hash, token_id))
            if self._contents[slot] != row.prefix_hash:
                raise InvariantError(f"slot {slot} does not hold what row {new.req_row} shares")
        self._rows[new.req_row] = row

    def _write(self, plan: StepPlan) -> None:
        prefill_lens = unpack_int32(plan.prefill_lens)
        rows = np.concatenate(
            [unpack_int32(plan.decode_rows), np.repeat(unpack_int32(plan.prefill_rows), prefill_lens)]
        ).tolist()
        out_slots = unpack_int32(plan.out_slots).tolist()
        if len(rows) != len(out_slots):
            raise InvariantError(f"{len(rows)} tokens, {len(out_slots)} slots")
        held = {slot for row in self._rows.values() for slot in row.slots}
        for req_row, slot in zip(rows, out_slots, strict=True):
            if not 0 <= slot < self._num_slots or slot in held:
                raise InvariantError(f"slot {slot} given to row {req_row} is held already, or does not exist")
            held.add(slot)
            row = self._rows[req_row]
            row.prefix_hash = self._contents[slot] = hash((row.prefix_hash, row.ids[len(row.slots)]))
            row.slots.append(slot)

    def _sampled_rows(self, plan: StepPlan) -> list[int]:
        ended = [
            req_row
            for req_row, start, num_tokens in zip(
                unpack_int32(plan.prefill_rows).tolist(),
                unpack_int32(plan.prefill_starts).tolist(),
                unpack_int32(plan.prefill_lens).tolist(),
                strict=True,
            )
            if start + num_tokens == len(self._rows[req_row].ids)
        ]
        return [*unpack_int32(plan.decode_rows).tolist(), *ended]

    def _sample(self, req_row: int) -> int:
        row = self._rows[req_row]
        token_id = row.next_id(self._script)
        row.ids.append(token_id)
        if len(row.ids) == row.prompt_len + row.max_new_tokens:
            row.slots = []  # nothing reads them any more: the router may give them away before it releases the row
        return token_id


class FakeWorkerService(rpyc.Service):  # type: ignore[misc]  # rpyc has no types
    """The worker's remote interface: bytes in, bytes out, results one step late."""

    def __init__(self, engine: FakeEngine, num_slots: int) -> None:
        super().__init__()
        self._engine = engine
        self._num_slots = num_slots
        self._last_result = b""

    def exposed_load(self, _: bytes) -> bytes:
        return msgspec.msgpack.encode(LoadReply(self._num_slots, "a fake pool"))

    def exposed_step(self, plan: bytes) -> bytes:
        result = msgspec.msgpack.encode(self._engine.step(msgspec.msgpack.decode(plan, type=StepPlan)))
        previous, self._last_result = self._last_result, result
        return previous

    def exposed_flush(self) -> bytes:
        previous, self._last_result = self._last_result, b""
        return previous


def main(run_dir: str, index: int) -> None:
    """Load as the script says, then serve the router until it leaves."""
    script = msgspec.json.decode(os.environ.get(SCRIPT_VARIABLE, "{}"), type=FakeWorkerScript)
    time.sleep(script.load_s)
    while os.path.exists(script.loads_while):
        time.sleep(0.05)
    if script.config_error is not None:
        raise ConfigError(script.config_error)
    if script.load_error is not None:
        raise RuntimeError(script.load_error)
    num_slots = read_boot(run_dir).config.max_total_token_num or DEFAULT_POOL
    service = FakeWorkerService(FakeEngine(script, num_slots), num_slots)
    serve_worker(run_dir, process_name("model_worker", index), service)


if __name__ == "__main__":
    run_child("model_worker", main)
    sys.exit(0)
