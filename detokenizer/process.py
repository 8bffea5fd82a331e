"""The detokenizer process: a step's ids in, each request's new text out, and the word of how each request ended."""

import logging
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import assert_never

from lightserve.boot import read_boot
from lightserve.child import freeze_garbage_collector, process_name, run_child
from lightserve.detokenizer.answer import Answer, AnswerFactory
from lightserve.detokenizer.incremental import TextTables
from lightserve.ipc.links import Inbox, Outbox
from lightserve.ipc.messages import (
    HTTP_INDEX_SHIFT,
    DetokenizerInbox,
    ErrorInfo,
    FailMsg,
    FinishCode,
    LoadMsg,
    ReadyMsg,
    StartMsg,
    StopMsg,
    TextEvent,
    TextMsg,
    TextParams,
    TokensMsg,
    unpack_int32,
    unpack_int64,
)
from lightserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_ENTRY_BYTES = 4  # of an id (int32) and of a logprob (float32)
_REASONS = {FinishCode.STOP: "stop", FinishCode.LENGTH: "length", FinishCode.ABORT: "abort"}
_INTERNAL_ERROR = ErrorInfo(500, "internal_error", "The answer could not be turned into text.")


class Detokenizer:
    """All open answers. Messages go in; what they brought comes out of the ``take`` functions, once."""

    def __init__(self, answers: AnswerFactory) -> None:
        self._factory = answers
        self._open: dict[int, Answer] = {}
        self._touched: dict[int, Answer] = {}
        self._stopped: list[int] = []
        self._load: LoadMsg | None = None

    def handle(self, message: DetokenizerInbox) -> None:
        """Take in one message."""
        match message:
            case TokensMsg():
                self._handle_tokens(message)
            case StartMsg():
                self._start(message)
            case FailMsg():
                self._end_with_error(message.req_id, message.error)
            case LoadMsg():
                self._load = message
            case _:
                assert_never(message)

    def take_texts(self) -> Iterator[tuple[int, TextMsg]]:
        """Yield one message per HTTP server, by its index, with all that is new for its requests."""
        events: dict[int, list[TextEvent]] = defaultdict(list)
        for req_id, answer in self._touched.items():
            events[req_id >> HTTP_INDEX_SHIFT].append(answer.take_event())
        self._touched.clear()
        for http_index, new_events in events.items():
            yield http_index, TextMsg(new_events)

    def take_stopped(self) -> StopMsg | None:
        """Return the requests that ended here and not in the router."""
        if not self._stopped:
            return None
        message, self._stopped = StopMsg(self._stopped), []
        return message

    def take_load(self) -> LoadMsg | None:
        """Return the latest word on how full the server is, if it is new."""
        load, self._load = self._load, None
        return load

    def _start(self, message: StartMsg) -> None:
        try:
            self._open[message.req_id] = self._factory.make(message.req_id, message.text)
        except ValueError as error:
            logger.error("req_id %d: cannot be started: %s", message.req_id, error)
            self._end_with_error(message.req_id, _INTERNAL_ERROR)
            self._stopped.append(message.req_id)

    def _end_with_error(self, req_id: int, error: ErrorInfo) -> None:
        if req_id in self._touched and req_id not in self._open:
            return  # it has just ended
        answer = self._open.pop(req_id, None) or self._factory.make(req_id, TextParams())
        answer.fail(error)
        self._touched[req_id] = answer

    def _handle_tokens(self, message: TokensMsg) -> None:
        req_ids, token_ids = unpack_int64(message.req_ids).tolist(), unpack_int32(message.token_ids).tolist()
        cached_lens = unpack_int32(message.cached_lens).tolist()
        for i, (req_id, token_id, code) in enumerate(zip(req_ids, token_ids, message.finish, strict=True)):
            answer = self._open.get(req_id)
            if answer is None:
                continue  # it has ended here; the router does not know yet
            if token_id >= 0:
                entry = slice(_ENTRY_BYTES * i, _ENTRY_BYTES * (i + 1))
                answer.count(message.token_ids[entry], message.logprobs[entry])
            if cached_lens:
                answer.cached_len += cached_lens[i]
            self._advance(req_id, answer, token_id, code)
            self._touched[req_id] = answer
            if answer.ended:
                del self._open[req_id]
                if code == FinishCode.NONE:
                    self._stopped.append(req_id)

    def _advance(self, req_id: int, answer: Answer, token_id: int, code: int) -> None:
        if token_id >= 0 and code != FinishCode.STOP:
            try:
                answer.feed(token_id)
            except IndexError:
                logger.error("req_id %d: token id %d has no text", req_id, token_id)
                answer.fail(_INTERNAL_ERROR)
        if code == FinishCode.ABORT:
            answer.break_off(_REASONS[FinishCode.ABORT])
        elif code != FinishCode.NONE and not answer.ended:
            answer.finish(_REASONS[FinishCode(code)])


class _Links:
    """The process's inbox and those it sends to."""

    def __init__(self, run_dir: str, num_http_servers: int) -> None:
        self.inbox: Inbox[DetokenizerInbox] = Inbox(run_dir, "detokenizer", DetokenizerInbox)
        self.router = Outbox(run_dir, "router")
        self.launcher = Outbox(run_dir, "launcher")
        self.http_servers = [Outbox(run_dir, process_name("http_server", i)) for i in range(num_http_servers)]


def main(run_dir: str, index: int) -> None:
    """Run the process; it has no end of its own."""
    boot = read_boot(run_dir)
    tokenizer = Tokenizer.load(Path(boot.tokenizer_dir))
    detokenizer = Detokenizer(AnswerFactory(TextTables(tokenizer), tokenizer.special_id_of))
    links = _Links(run_dir, boot.config.httpserver_workers)
    freeze_garbage_collector()
    links.launcher.send(ReadyMsg("detokenizer"))
    while True:
        _turn(detokenizer, links)


def _turn(detokenizer: Detokenizer, links: _Links) -> None:
    """Wait for a message, take in all that have arrived, send what they brought."""
    links.inbox.socket.poll()
    for message in links.inbox.drain():
        detokenizer.handle(message)
    for http_index, texts in detokenizer.take_texts():
        links.http_servers[http_index].send(texts)
    stopped, load = detokenizer.take_stopped(), detokenizer.take_load()
    if stopped is not None:
        links.router.send(stopped)
    if load is not None:
        for http_server in links.http_servers:
            http_server.send(load)


if __name__ == "__main__":
    run_child("detokenizer", main)
