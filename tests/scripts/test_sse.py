import itertools

from benchmark.sse import SseParser
from hypothesis import given
from hypothesis import strategies as st

_STREAM = (
    b'data: {"text": "two\\nlines"}\n\n'
    b'data:{"text": "no space"}\n\n'
    b": a comment\n\n"
    b"event: error\r\nid: 7\r\ndata: one\r\ndata: two\r\n\r\n"
    b"data: caf\xc3\xa9 data: [DONE]\n\n"
    b"data: [DONE]\n\n"
)
_EVENTS = [
    b'{"text": "two\\nlines"}',
    b'{"text": "no space"}',
    b"one\ntwo",
    b"caf\xc3\xa9 data: [DONE]",
    b"[DONE]",
]


def test_two_events_in_one_read_are_two_events() -> None:
    assert SseParser().feed(b"data: a\n\ndata: b\n\n") == [b"a", b"b"]


def test_an_event_waits_for_its_empty_line() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\n") == [b"a"]


@given(st.lists(st.integers(0, len(_STREAM)), max_size=20))
def test_events_do_not_depend_on_where_the_network_cuts(cuts: list[int]) -> None:
    parser = SseParser()
    edges = [0, *sorted(cuts), len(_STREAM)]
    events = [e for a, b in itertools.pairwise(edges) for e in parser.feed(_STREAM[a:b])]
    assert events == _EVENTS
