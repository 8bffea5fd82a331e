import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightserve.boot import Boot, write_boot
from lightserve.config import ServerConfig
from lightserve.detokenizer.answer import AnswerFactory
from lightserve.detokenizer.process import Detokenizer
from lightserve.ipc.links import Inbox, Outbox
from lightserve.ipc.messages import (
    HTTP_INDEX_SHIFT,
    ErrorInfo,
    FailMsg,
    FinishCode,
    HttpInbox,
    LauncherInbox,
    LoadMsg,
    ReadyMsg,
    RouterInbox,
    StartMsg,
    StopMsg,
    TextEvent,
    TextMsg,
    TextParams,
    TokensMsg,
    pack_float32,
    pack_int32,
    pack_int64,
    unpack_float32,
    unpack_int32,
)
from lightserve.model_config import load_model_config
from lightserve.tokenizer import Tokenizer
from tests.tiny_model import make_model_folder
from tests.vocabularies import IM_END

L = TypeVar("L", bound=Inbox[Any] | Outbox)

ERROR = ErrorInfo(429, "queue_full", "The queue is full.")
LOAD = LoadMsg(1, 2, 3, 4, 5, 6, 7)


def tokens(*entries: tuple[int, int, FinishCode], logprob: float = -0.5) -> TokensMsg:
    req_ids, token_ids, codes = zip(*entries, strict=True)
    return TokensMsg(pack_int64(req_ids), pack_int32(token_ids), pack_float32([logprob] * len(entries)), bytes(codes))


def running(req_id: int, token_id: int) -> tuple[int, int, FinishCode]:
    return req_id, token_id, FinishCode.NONE


def events_of(detokenizer: Detokenizer) -> dict[int, TextEvent]:
    events = [event for _, message in detokenizer.take_texts() for event in message.events]
    assert len({event.req_id for event in events}) == len(events)
    return {event.req_id: event for event in events}


def stopped_in(detokenizer: Detokenizer) -> list[int]:
    message = detokenizer.take_stopped()
    return [] if message is None else message.req_ids


@pytest.fixture
def detokenizer(answers: AnswerFactory) -> Detokenizer:
    return Detokenizer(answers)


@pytest.fixture(scope="session")
def letter(byte_level: Tokenizer) -> dict[str, int]:
    return {char: byte_level.encode(char, add_special_tokens=False)[0] for char in "abcxyz"}


def test_each_step_brings_each_request_one_event(detokenizer: Detokenizer, letter: dict[str, int]) -> None:
    for req_id in (1, 2):
        detokenizer.handle(StartMsg(req_id, TextParams()))
    detokenizer.handle(tokens(running(1, letter["a"]), running(2, letter["b"]), logprob=-0.25))
    events = events_of(detokenizer)
    assert {req_id: event.text for req_id, event in events.items()} == {1: "a", 2: "b"}
    assert unpack_int32(events[2].token_ids).tolist() == [letter["b"]]
    assert unpack_float32(events[2].logprobs).tolist() == [-0.25]
    assert events[1].finish_reason is None
    assert events_of(detokenizer) == {}


def test_steps_that_arrive_together_become_one_event(detokenizer: Detokenizer, letter: dict[str, int]) -> None:
    detokenizer.handle(StartMsg(1, TextParams()))
    for char in "abc":
        detokenizer.handle(tokens(running(1, letter[char])))
    event = events_of(detokenizer)[1]
    assert event.text == "abc"
    assert unpack_int32(event.token_ids).tolist() == [letter[char] for char in "abc"]


def test_what_the_prefix_cache_had_is_told_once(detokenizer: Detokenizer, letter: dict[str, int]) -> None:
    for req_id in (1, 2):
        detokenizer.handle(StartMsg(req_id, TextParams()))
    first = tokens(running(1, letter["a"]), running(2, letter["b"]))
    detokenizer.handle(msgspec.structs.replace(first, cached_lens=pack_int32([0, 40])))
    assert {req_id: event.cached_len for req_id, event in events_of(detokenizer).items()} == {1: 0, 2: 40}
    detokenizer.handle(first)
    assert {event.cached_len for event in events_of(detokenizer).values()} == {0}


def test_each_http_server_gets_one_message_with_its_own_requests(
    detokenizer: Detokenizer, letter: dict[str, int]
) -> None:
    req_ids = [1, (1 << HTTP_INDEX_SHIFT) + 1, 2]
    for req_id in req_ids:
        detokenizer.handle(StartMsg(req_id, TextParams()))
    detokenizer.handle(tokens(*(running(req_id, letter["a"]) for req_id in req_ids)))
    by_server = {i: [event.req_id for event in message.events] for i, message in detokenizer.take_texts()}
    assert by_server == {0: [1, 2], 1: [req_ids[1]]}


@pytest.mark.parametrize(
    ("code", "reason", "text"), [(FinishCode.STOP, "stop", ""), (FinishCode.LENGTH, "length", "a")]
)
def test_the_last_id_is_counted_and_shown_unless_it_ends_the_text(
    detokenizer: Detokenizer, letter: dict[str, int], code: FinishCode, reason: str, text: str
) -> None:
    detokenizer.handle(StartMsg(1, TextParams(skip_special_tokens=False)))
    detokenizer.handle(tokens((1, letter["a"], code)))
    event = events_of(detokenizer)[1]
    assert (event.text, event.finish_reason) == (text, reason)
    assert unpack_int32(event.token_ids).tolist() == [letter["a"]]
    assert stopped_in(detokenizer) == []


@pytest.mark.parametrize("code", [FinishCode.STOP, FinishCode.LENGTH])
def test_an_entry_without_a_token_only_ends_a_request(detokenizer: Detokenizer, code: FinishCode) -> None:
    detokenizer.handle(StartMsg(1, TextParams()))
    detokenizer.handle(tokens((1, -1, code)))
    event = events_of(detokenizer)[1]
    assert (event.text, event.token_ids, event.finish_reason) == ("", b"", code.name.lower())


def test_what_is_held_back_is_released_at_the_end(
    detokenizer: Detokenizer, letter: dict[str, int], byte_level: Tokenizer
) -> None:
    detokenizer.handle(StartMsg(1, TextParams(stop=("abc",))))
    detokenizer.handle(tokens(running(1, letter["a"])))
    assert events_of(detokenizer)[1].text == ""
    detokenizer.handle(tokens(running(1, byte_level.bytes_table.index(b"\xe4"))))
    assert events_of(detokenizer)[1].text == ""
    detokenizer.handle(tokens((1, letter["x"], FinishCode.STOP)))
    event = events_of(detokenizer)[1]
    assert (event.text, event.finish_reason) == ("a\ufffd", "stop")


def test_a_stop_string_ends_a_request_and_the_router_is_told(detokenizer: Detokenizer, letter: dict[str, int]) -> None:
    detokenizer.handle(StartMsg(1, TextParams(stop=("bc",))))
    for char in "abc":
        detokenizer.handle(tokens(running(1, letter[char])))
    event = events_of(detokenizer)[1]
    assert (event.text, event.finish_reason) == ("a", "stop")
    assert unpack_int32(event.token_ids).tolist() == [letter[char] for char in "abc"]
    assert stopped_in(detokenizer) == [1]
    assert stopped_in(detokenizer) == []


def test_tokens_after_a_stop_string_are_dropped(detokenizer: Detokenizer, letter: dict[str, int]) -> None:
    detokenizer.handle(StartMsg(1, TextParams(stop=("a",))))
    detokenizer.handle(tokens(running(1, letter["a"])))
    detokenizer.handle(tokens(running(1, letter["b"])))
    assert unpack_int32(events_of(detokenizer)[1].token_ids).tolist() == [letter["a"]]
    detokenizer.handle(tokens((1, letter["c"], FinishCode.LENGTH)))
    assert events_of(detokenizer) == {}
    assert stopped_in(detokenizer) == [1]


def test_a_stop_string_completed_by_the_last_token_counts_as_stop(
    detokenizer: Detokenizer, letter: dict[str, int]
) -> None:
    detokenizer.handle(StartMsg(1, TextParams(stop=("b",))))
    detokenizer.handle(tokens(running(1, letter["a"])))
    detokenizer.handle(tokens((1, letter["b"], FinishCode.LENGTH)))
    event = events_of(detokenizer)[1]
    assert (event.text, event.finish_reason) == ("a", "stop")
    assert stopped_in(detokenizer) == []  # the router has ended it already


def test_a_stop_string_that_is_a_hidden_special_token_ends_a_request(
    detokenizer: Detokenizer, letter: dict[str, int], byte_level: Tokenizer
) -> None:
    detokenizer.handle(StartMsg(1, TextParams(stop=(IM_END,))))
    detokenizer.handle(tokens(running(1, letter["a"])))
    detokenizer.handle(tokens(running(1, byte_level.special_id_of[IM_END])))
    event = events_of(detokenizer)[1]
    assert (event.text, event.finish_reason) == ("a", "stop")
    assert stopped_in(detokenizer) == [1]


def test_an_aborted_request_is_forgotten(detokenizer: Detokenizer, letter: dict[str, int]) -> None:
    detokenizer.handle(StartMsg(1, TextParams()))
    detokenizer.handle(tokens((1, -1, FinishCode.ABORT)))
    assert events_of(detokenizer)[1].finish_reason == "abort"
    for _ in range(1000):
        detokenizer.handle(tokens(running(1, letter["a"])))
    assert events_of(detokenizer) == {}
    assert stopped_in(detokenizer) == []


def test_late_tokens_are_dropped_quietly(
    detokenizer: Detokenizer, letter: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(1000):
        detokenizer.handle(tokens(running(99, letter["a"])))
    assert events_of(detokenizer) == {}
    assert caplog.records == []


def test_a_failure_ends_a_request_that_never_started(detokenizer: Detokenizer) -> None:
    detokenizer.handle(FailMsg(5, ERROR))
    event = events_of(detokenizer)[5]
    assert (event.error, event.finish_reason, event.text, event.token_ids) == (ERROR, None, "", b"")
    assert stopped_in(detokenizer) == []


def test_a_failure_ends_a_running_request_after_its_text(detokenizer: Detokenizer, letter: dict[str, int]) -> None:
    detokenizer.handle(StartMsg(1, TextParams()))
    detokenizer.handle(tokens(running(1, letter["a"])))
    detokenizer.handle(FailMsg(1, ERROR))
    detokenizer.handle(tokens(running(1, letter["b"])))
    event = events_of(detokenizer)[1]
    assert (event.text, event.error) == ("a", ERROR)


def test_a_failure_just_after_the_end_changes_nothing(detokenizer: Detokenizer, letter: dict[str, int]) -> None:
    detokenizer.handle(StartMsg(1, TextParams(stop=("a",))))
    detokenizer.handle(tokens(running(1, letter["a"])))
    detokenizer.handle(FailMsg(1, ERROR))
    event = events_of(detokenizer)[1]
    assert (event.finish_reason, event.error) == ("stop", None)


def test_a_request_that_cannot_be_set_up_ends_alone(detokenizer: Detokenizer, letter: dict[str, int]) -> None:
    for req_id, params in ((1, TextParams()), (2, TextParams(stop=("",))), (3, TextParams())):
        detokenizer.handle(StartMsg(req_id, params))
    detokenizer.handle(tokens(*(running(req_id, letter["a"]) for req_id in (1, 2, 3))))
    events = events_of(detokenizer)
    assert (events[1].text, events[3].text) == ("a", "a")
    assert events[2].error is not None
    assert events[2].error.status == 500
    assert stopped_in(detokenizer) == [2]


def test_an_id_without_text_ends_only_its_request(
    detokenizer: Detokenizer, letter: dict[str, int], byte_level: Tokenizer
) -> None:
    for req_id in (1, 2):
        detokenizer.handle(StartMsg(req_id, TextParams()))
    detokenizer.handle(tokens(running(1, byte_level.vocab_size), running(2, letter["a"])))
    events = events_of(detokenizer)
    assert events[1].error is not None
    assert (events[2].text, events[2].error) == ("a", None)
    assert stopped_in(detokenizer) == [1]


def test_only_the_latest_load_is_passed_on(detokenizer: Detokenizer) -> None:
    detokenizer.handle(msgspec.structs.replace(LOAD, num_running=9))
    detokenizer.handle(LOAD)
    assert detokenizer.take_load() == LOAD
    assert detokenizer.take_load() is None


@given(data=st.data())
def test_every_request_gets_its_whole_text_and_one_last_event(
    answers: AnswerFactory, byte_level: Tokenizer, data: st.DataObject
) -> None:
    """Random ids for several requests, taken out at random moments, against the whole decode of each."""
    detokenizer = Detokenizer(answers)
    num_reqs = data.draw(st.integers(1, 4))
    ids: dict[int, list[int]] = {req_id: [] for req_id in range(num_reqs)}
    texts, reasons = dict.fromkeys(ids, ""), dict[int, list[str]]()
    for req_id in ids:
        detokenizer.handle(StartMsg(req_id, TextParams()))
    lengths = {req_id: data.draw(st.integers(1, 6)) for req_id in ids}

    def take() -> None:
        for req_id, event in events_of(detokenizer).items():
            texts[req_id] += event.text
            if event.finish_reason is not None:
                reasons.setdefault(req_id, []).append(event.finish_reason)

    while alive := [req_id for req_id in ids if len(ids[req_id]) < lengths[req_id]]:
        entries = []
        for req_id in alive:
            ids[req_id].append(data.draw(st.integers(0, byte_level.vocab_size - 1)))
            code = FinishCode.LENGTH if len(ids[req_id]) == lengths[req_id] else FinishCode.NONE
            entries.append((req_id, ids[req_id][-1], code))
        detokenizer.handle(tokens(*entries))
        if data.draw(st.booleans()):
            take()
    take()
    assert texts == {req_id: byte_level.decode(ids[req_id], skip_special_tokens=True) for req_id in ids}
    assert reasons == {req_id: ["length"] for req_id in ids}


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[str]:
    folder = make_model_folder(tmp_path)
    with tempfile.TemporaryDirectory(prefix="lsdt") as short:  # short enough for a socket
        boot = Boot(
            config=ServerConfig(httpserver_workers=2),
            model=load_model_config(folder, "dummy"),
            run_dir=short,
            tokenizer_dir=str(folder),
            served_model_name="tiny",
            listen_fd=0,
            device="cpu",
            max_req_total_len=64,
            chunked_prefill_size=8,
            batch_max_tokens=16,
        )
        write_boot(boot)
        yield short


def test_the_process_survives_a_message_it_cannot_read_and_serves_on(run_dir: str) -> None:
    not_utf8 = 187  # the byte FF
    second = (1 << HTTP_INDEX_SHIFT) + 1
    with ExitStack() as stack:
        launcher: Inbox[LauncherInbox] = _closed_by(stack, Inbox(run_dir, "launcher", LauncherInbox))
        router: Inbox[RouterInbox] = _closed_by(stack, Inbox(run_dir, "router", RouterInbox))
        https: list[Inbox[HttpInbox]] = [
            _closed_by(stack, Inbox(run_dir, f"http_server-{i}", HttpInbox)) for i in range(2)
        ]
        outbox = _closed_by(stack, Outbox(run_dir, "detokenizer"))
        stack.enter_context(_detokenizer_process(run_dir))
        assert launcher.receive(30) == ReadyMsg("detokenizer")
        outbox.socket.send(b"\xc1 not a message")
        outbox.send(StartMsg(1, TextParams(stop=("\ufffd",))))
        outbox.send(StartMsg(second, TextParams()))
        outbox.send(tokens(running(1, 0), running(second, 0)))
        outbox.send(tokens(running(1, not_utf8)))
        assert router.receive(30) == StopMsg([1])
        assert [_text_of(inbox) for inbox in https] == ["!", "!"]
        outbox.send(LOAD)
        assert [_next_load(inbox) for inbox in https] == [LOAD, LOAD]


def _closed_by(stack: ExitStack, link: L) -> L:
    stack.callback(link.close)
    return link


@contextmanager
def _detokenizer_process(run_dir: str) -> Iterator[None]:
    command = [sys.executable, "-P", "-m", "lightserve.detokenizer.process", run_dir, "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            yield
        finally:
            process.kill()


def _text_of(inbox: Inbox[HttpInbox]) -> str:
    message = inbox.receive(30)
    assert isinstance(message, TextMsg)
    return message.events[0].text


def _next_load(inbox: Inbox[HttpInbox]) -> LoadMsg:
    while True:
        message = inbox.receive(30)
        assert message is not None
        if isinstance(message, LoadMsg):
            return message
