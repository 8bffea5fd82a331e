"""Router and detokenizer in one, without processes: answers each ``GenerateMsg`` as its script says."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from lightserve.http_server.streams import Streams
from lightserve.ipc.messages import (
    AbortMsg,
    ErrorInfo,
    GenerateMsg,
    LoadMsg,
    TextEvent,
    pack_float32,
    pack_int32,
    unpack_int32,
)
from tests.tiny_model import EOS_ID

POOL = 4096


@dataclass(frozen=True)
class Script:
    """What the model would say.

    Attributes:
        text: One id per character (its code, modulo 256), one event per id, then the end-of-sequence id.
        step_s: Seconds before each event.
        refusal: Instead of anything else.
        error_after: After so many events, fail with status 500.
        silent_after: After so many events, say nothing more.
        deaf: Go on after an abort.
        burst: All events come at once.
        cached_len: Prompt ids found in the prefix cache, told with the first event.
        ids_per_letter: Ids of each character, whose text comes with the last of them.
    """

    text: str = "Hello"
    step_s: float = 0.0
    refusal: ErrorInfo | None = None
    error_after: int | None = None
    silent_after: int | None = None
    deaf: bool = False
    burst: bool = False
    cached_len: int = 0
    ids_per_letter: int = 1


@dataclass
class FakeEngine:
    """Runs requests as tasks of the running loop.

    Attributes:
        script_for: The script of a request.
        requests: Every ``GenerateMsg`` that came.
        aborts: Every ``AbortMsg`` that came.
    """

    streams: Streams | None = None
    script_for: Callable[[GenerateMsg], Script] = lambda message: Script()
    requests: list[GenerateMsg] = field(default_factory=list)
    aborts: list[AbortMsg] = field(default_factory=list)
    on_load: Callable[[LoadMsg], None] = lambda load: None
    _running: dict[int, tuple[asyncio.Task[None], bool]] = field(default_factory=dict)

    def send(self, message: GenerateMsg | AbortMsg) -> None:
        """Take in a message, as the router would."""
        match message:
            case GenerateMsg():
                self.requests.append(message)
                script = self.script_for(message)
                task = asyncio.get_running_loop().create_task(self._run(message, script))
                self._running[message.req_id] = (task, script.deaf)
            case AbortMsg():
                self.aborts.append(message)
                for task, deaf in (self._running[i] for i in message.req_ids if i in self._running):
                    if not deaf:
                        task.cancel()
        self._report()

    @property
    def num_running(self) -> int:
        """Requests that have neither ended nor been aborted."""
        return len(self._running)

    def reset(self) -> None:
        """Forget what came, and speak by the default script again."""
        self.script_for = lambda message: Script()
        self.requests.clear()
        self.aborts.clear()

    async def _run(self, message: GenerateMsg, script: Script) -> None:
        try:
            events = _events(message, script)
            steps = [events] if script.burst else [[event] for event in events]
            for number, step in enumerate(steps):
                await asyncio.sleep(script.step_s)
                if number == script.silent_after:
                    await asyncio.Event().wait()
                self._deliver(step)
        finally:
            del self._running[message.req_id]
            self._report()

    def _deliver(self, events: list[TextEvent]) -> None:
        assert self.streams is not None
        self.streams.heard()
        self.streams.deliver(events)

    def _report(self) -> None:
        running = len(self._running)
        self.on_load(LoadMsg(running, 0, 10 * running, 0, 20 * running, 20 * running, POOL))


def prompt_of(message: GenerateMsg) -> list[int]:
    """Return the prompt's ids."""
    ids: list[int] = unpack_int32(message.prompt_ids).tolist()
    return ids


def _events(message: GenerateMsg, script: Script) -> list[TextEvent]:
    req_id = message.req_id
    if script.refusal is not None:
        return [TextEvent(req_id, "", b"", b"", error=script.refusal)]
    limit = message.sampling.max_new_tokens
    silent = [""] * (script.ids_per_letter - 1)
    said = [(text, ord(letter) % 256) for letter in script.text for text in (*silent, letter)]
    if message.sampling.ignore_eos:
        said = (said * (limit // len(said) + 1))[:limit]
    produced = [*said, ("", EOS_ID)][:limit]
    events = [_event(req_id, text, token_id) for text, token_id in produced]
    last_text, last_id = produced[-1]
    events[-1] = _event(req_id, last_text, last_id, "stop" if last_id == EOS_ID else "length")
    events[0] = msgspec.structs.replace(events[0], cached_len=script.cached_len)
    if script.error_after is not None:
        failure = ErrorInfo(500, "bad_logits", "The model's output was not finite.")
        events[script.error_after :] = [TextEvent(req_id, "", b"", b"", error=failure)]
    return events


def _event(req_id: int, text: str, token_id: int, finish_reason: str | None = None) -> TextEvent:
    return TextEvent(req_id, text, pack_int32([token_id]), pack_float32([-0.5]), finish_reason)
