"""All that the processes say to one another.

Every process has one inbox; one union per inbox lists what may arrive there, so that a ``match`` is exhaustive. Integer
arrays travel as raw little-endian bytes (``Int32s``, ``Int64s``, ``Float32s``): a 4,000-id message costs 0.3 µs so, and
38 µs as a list.
"""

import struct
from enum import IntEnum
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from lightserve.sampling_params import SamplingParams

Int32s: TypeAlias = bytes
Int64s: TypeAlias = bytes
Float32s: TypeAlias = bytes

_INT32_BYTES = 4
_FLOAT32_BYTES = 4


def pack_int32(values: npt.ArrayLike) -> Int32s:
    """Encode integers as raw little-endian int32."""
    return np.asarray(values, dtype="<i4").tobytes()


def pack_int64(values: npt.ArrayLike) -> Int64s:
    """Encode integers as raw little-endian int64."""
    return np.asarray(values, dtype="<i8").tobytes()


def pack_float32(values: npt.ArrayLike) -> Float32s:
    """Encode numbers as raw little-endian float32."""
    return np.asarray(values, dtype="<f4").tobytes()


def unpack_int32(raw: Int32s) -> npt.NDArray[np.int32]:
    """Decode raw little-endian int32 to a read-only array, without a copy."""
    return np.frombuffer(raw, dtype="<i4")


def unpack_int64(raw: Int64s) -> npt.NDArray[np.int64]:
    """Decode raw little-endian int64 to a read-only array, without a copy."""
    return np.frombuffer(raw, dtype="<i8")


def unpack_float32(raw: Float32s) -> npt.NDArray[np.float32]:
    """Decode raw little-endian float32 to a read-only array, without a copy."""
    return np.frombuffer(raw, dtype="<f4")


def list_int32(raw: Int32s) -> list[int]:
    """Decode raw little-endian int32 to a list: where there are few, a third of an array's time."""
    return list(struct.unpack(f"<{len(raw) // _INT32_BYTES}i", raw))


def list_float32(raw: Float32s) -> list[float]:
    """Decode raw little-endian float32 to a list: where there are few, a third of an array's time."""
    return list(struct.unpack(f"<{len(raw) // _FLOAT32_BYTES}f", raw))


def count_int32(raw: Int32s) -> int:
    """Return how many integers raw int32 bytes hold, without decoding them."""
    return len(raw) // _INT32_BYTES


class FinishCode(IntEnum):
    """Why a request ended, as one byte of a ``TokensMsg``."""

    NONE = 0  # it runs on
    STOP = 1  # an end-of-sequence id or one of the client's stop ids; that id's text is not shown
    LENGTH = 2  # max_new_tokens reached
    ABORT = 3  # the client left; carries no token (token id -1)


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class TextParams(msgspec.Struct, frozen=True, array_like=True):
    """What the detokenizer must know about one request.

    Attributes:
        stop: Stop strings, none empty. The text ends before the first match.
        skip_special_tokens: Leave special tokens out of the text.
        min_new_tokens: Stop strings are not looked for before so many ids.
    """

    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    min_new_tokens: int = 0


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    """An error on its way to a client: the fields of ``RequestError`` (status may be 500 when it is ours)."""

    status: int
    code: str
    message: str


class GenerateMsg(_Message, frozen=True):
    """HTTP server -> router: one new request.

    Attributes:
        req_id: Unique over the server's life. ``req_id >> HTTP_INDEX_SHIFT`` is the index of the HTTP server it
            belongs to.
        prompt_ids: [prompt_len] int32, at least one.
        priority: Higher goes first. Others are passed a bounded number of times.
        timeout_s: Seconds from its arrival at the router after which it fails with 504; 0: never.
        cache_salt: Cached prompts are shared only under the same salt.
    """

    req_id: int
    prompt_ids: Int32s
    sampling: SamplingParams
    text: TextParams
    priority: int = 0
    timeout_s: float = 0.0
    cache_salt: str = ""


class AbortMsg(_Message, frozen=True):
    """HTTP server -> router: the clients of these requests have gone. Unknown ids are no error."""

    req_ids: list[int]


class StopMsg(_Message, frozen=True):
    """Detokenizer -> router: these requests met a stop string and their clients know it. Unknown ids are no error."""

    req_ids: list[int]


RouterInbox: TypeAlias = GenerateMsg | AbortMsg | StopMsg

HTTP_INDEX_SHIFT = 48  # room for 2**48 requests per HTTP server


class StartMsg(_Message, frozen=True):
    """Router -> detokenizer: tokens of this request will follow."""

    req_id: int
    text: TextParams


class TokensMsg(_Message, frozen=True):
    """Router -> detokenizer: one step's new tokens, one entry per request that produced one or ended.

    Attributes:
        req_ids: [n] int64.
        token_ids: [n] int32; -1 where an entry only ends a request.
        logprobs: [n] float32, of the chosen token under the raw distribution (before temperature and filters).
        finish: [n] one byte each, a ``FinishCode``.
        cached_lens: [n] int32, for the request's first token: its prompt's ids found in the prefix cache, else 0. Empty
            when all are 0.
    """

    req_ids: Int64s
    token_ids: Int32s
    logprobs: Float32s
    finish: bytes
    cached_lens: Int32s = b""


class FailMsg(_Message, frozen=True):
    """Router -> detokenizer: this request ends with an error. It may never have started."""

    req_id: int
    error: ErrorInfo


class LoadMsg(_Message, frozen=True):
    """Router -> detokenizer -> every HTTP server: how full the server is. Sent when it changed, at most once a step.

    Attributes:
        num_running: Requests in the batch.
        num_waiting: Requests in the queue.
        used_slots: Slots held by running requests.
        cached_slots: Slots held only by the prefix cache (free on demand).
        promised_slots: The peak the running batch may still reach.
        requested_slots: All that the running and the waiting requests ask for, added up as if all stayed to the end of
            all; may exceed the pool.
        max_total_token_num: Size of the pool.
        num_pauses: How often a request had to leave the batch for want of slots, since the start.
    """

    num_running: int
    num_waiting: int
    used_slots: int
    cached_slots: int
    promised_slots: int
    requested_slots: int
    max_total_token_num: int
    num_pauses: int = 0


DetokenizerInbox: TypeAlias = StartMsg | TokensMsg | FailMsg | LoadMsg


# Without gc=False the thousands of one message would set off collections, and those walk through every open stream.
class TextEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step brought one request. The event with ``finish_reason`` or ``error`` is its last.

    Attributes:
        req_id: The request.
        text: New text, safe to show; may be empty while a character or a possible stop string is unfinished.
        token_ids: [k] int32, the ids counted since the last event (usage counts them all, also an end-of-sequence id).
        logprobs: [k] float32.
        finish_reason: ``stop``, ``length`` or ``abort``; None while it runs.
        error: Set when the request ended with an error.
        cached_len: Ids of the prompt that were found in the prefix cache; 0 in all events but one.
    """

    req_id: int
    text: str
    token_ids: Int32s
    logprobs: Float32s
    finish_reason: str | None = None
    error: ErrorInfo | None = None
    cached_len: int = 0


class TextMsg(_Message, frozen=True):
    """Detokenizer -> HTTP server: one step's events of the requests that belong to that server."""

    events: list[TextEvent]


class ServeMsg(_Message, frozen=True):
    """Launcher -> HTTP server: every process is ready; requests may come.

    Attributes:
        max_total_token_num: Size of the pool.
        max_req_total_len: Most tokens of prompt and answer together: no more than the model allows, or the pool holds.
    """

    max_total_token_num: int
    max_req_total_len: int


class DrainMsg(_Message, frozen=True):
    """Launcher -> HTTP server: refuse new requests (503), let open ones finish for at most ``limit_s``, then exit."""

    limit_s: float


class DownMsg(_Message, frozen=True):
    """Launcher -> HTTP server: a process died. End every open request with this error, turn health to 503, exit."""

    reason: str


HttpInbox: TypeAlias = TextMsg | LoadMsg | ServeMsg | DrainMsg | DownMsg


class ReadyMsg(_Message, frozen=True):
    """Any child -> launcher: this process is ready.

    Attributes:
        process: ``http_server-0``, ``router``, ``detokenizer``, ``model_worker-0``.
        max_total_token_num: From the router: size of the pool, after the workers have measured. 0 from the others.
        note: From the router: how that size was found, for the ready line.
    """

    process: str
    max_total_token_num: int = 0
    note: str = ""


class ServingMsg(_Message, frozen=True):
    """HTTP server -> launcher, answer to ``ServeMsg``: from now on requests are taken."""

    process: str


class FatalMsg(_Message, frozen=True):
    """Any child -> launcher: this process cannot go on; ``message`` is what the operator should see."""

    process: str
    message: str


LauncherInbox: TypeAlias = ReadyMsg | ServingMsg | FatalMsg


class NewReq(msgspec.Struct, frozen=True, array_like=True):
    """A request that enters the batch.

    Attributes:
        req_row: Its row of the Token Table.
        ids: [num_ids] int32: the prompt; after a pause, the prompt and the output so far.
        prompt_len: ``ids[prompt_len:]`` were generated (penalties and min_new_tokens count them as output).
        cached_slots: [cached_len] int32, slots that already hold the first ``cached_len`` ids.
        sampling: Its parameters. The noise of the token at absolute position p depends on (seed, p) alone.
    """

    req_row: int
    ids: Int32s
    prompt_len: int
    cached_slots: Int32s
    sampling: SamplingParams


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step, deltas only. Applied in this order: released_rows, new_reqs, then the forward pass.

    The batch holds the decode rows first, one token each, then the prefill chunks. Sampled are, in this order: every
    decode row, then every chunk that ends its request's ids.

    Attributes:
        step_id: Counts up by one.
        released_rows: [n] int32, rows whose requests ended; may be taken again in the same plan.
        new_reqs: Requests that enter.
        decode_rows: [num_decode] int32; each row's input id is the one sampled for it last.
        prefill_rows: [num_chunks] int32.
        prefill_starts: [num_chunks] int32, position of the chunk's first token.
        prefill_lens: [num_chunks] int32.
        out_slots: [num_decode + sum(prefill_lens)] int32, where each token's K and V go, in batch order.
    """

    step_id: int
    released_rows: Int32s
    new_reqs: list[NewReq]
    decode_rows: Int32s
    prefill_rows: Int32s
    prefill_starts: Int32s
    prefill_lens: Int32s
    out_slots: Int32s


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step sampled, in the plan's sampling order.

    Attributes:
        step_id: The plan's.
        token_ids: [num_sampled] int32; -1 where the row's logits were not finite: only that request fails.
        logprobs: [num_sampled] float32.
        device_waited: The device was done with this step before it got the next one.
    """

    step_id: int
    token_ids: Int32s
    logprobs: Float32s
    device_waited: bool = False


class LoadReply(msgspec.Struct, frozen=True, array_like=True):
    """Worker -> router, answer to ``load``.

    Attributes:
        max_total_token_num: Slots this rank's memory allows (or the number asked for, when it fits).
        note: The arithmetic behind it, for the operator.
    """

    max_total_token_num: int
    note: str
