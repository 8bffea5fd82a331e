"""The router's side of the model workers: one rpyc connection per rank."""

import time
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import msgspec
import rpyc

from lightserve.child import process_name
from lightserve.errors import InvariantError
from lightserve.ipc.messages import LoadReply, StepPlan, StepResult
from lightserve.ipc.worker_link import connect_worker

Call: TypeAlias = Callable[..., bytes]
AsyncCall: TypeAlias = Callable[..., Any]

_CONNECT_PAUSE_S = 0.02


class WorkerClient:
    """All ranks, called with the same bytes; rank 0 answers.

    Args:
        run_dir: The server's run directory.
        num_ranks: Tensor-parallel ranks; waits until each one listens.
    """

    def __init__(self, run_dir: str, num_ranks: int) -> None:
        self._connections = [_connect(f"{run_dir}/{process_name('model_worker', rank)}") for rank in range(num_ranks)]
        first, *others = (connection.root for connection in self._connections)
        # Fetched once: looking a method up is a round trip of its own.
        self._step: Call = first.step
        self._flush: Call = first.flush
        self._async_steps: list[AsyncCall] = [rpyc.async_(root.step) for root in others]
        self._async_flushes: list[AsyncCall] = [rpyc.async_(root.flush) for root in others]
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StepResult)

    def load(self) -> LoadReply:
        """Let every rank load its part of the model.

        Returns:
            The reply of the rank with the fewest slots.
        """
        pending = [rpyc.async_(connection.root.load)(b"") for connection in self._connections]
        replies = [msgspec.msgpack.decode(self._await(reply), type=LoadReply) for reply in pending]
        return min(replies, key=lambda reply: reply.max_total_token_num)

    def step(self, plan: StepPlan) -> StepResult | None:
        """Launch a step, and wait for the result of the one before it.

        Returns:
            That result; None when every earlier one has been returned.

        Raises:
            InvariantError: A worker has gone.
        """
        return self._call(self._step, self._async_steps, self._encoder.encode(plan))

    def flush(self) -> StepResult | None:
        """Wait for the result of the step launched last, as ``step`` does, without launching another."""
        return self._call(self._flush, self._async_flushes)

    def ask(self, question: Literal["stats", "profile"], payload: bytes = b"") -> bytes:
        """Put a question to rank 0 that is not about steps: see the worker's service for payload and answer."""
        answer: bytes = getattr(self._connections[0].root, question)(payload)
        return answer

    def close(self) -> None:
        """Hang up."""
        for connection in self._connections:
            connection.close()

    def _call(self, call: Call, async_calls: list[AsyncCall], *payload: bytes) -> StepResult | None:
        try:
            pending = [async_call(*payload) for async_call in async_calls]
            reply = call(*payload)
        except EOFError as error:
            raise InvariantError("a model worker has closed its connection") from error
        for other in pending:
            self._await(other)
        return self._decoder.decode(reply) if reply else None

    def _await(self, pending: Any) -> bytes:
        try:
            value: bytes = pending.value
        except EOFError as error:
            raise InvariantError("a model worker has closed its connection") from error
        return value


def _connect(path: str) -> "rpyc.Connection":
    """Connect to a worker, which starts at the same time as this process and may not listen yet."""
    while True:
        try:
            return connect_worker(path)
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(_CONNECT_PAUSE_S)
