import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from lightserve.detokenizer.stop_strings import StopMatcher, StopStrings

LETTERS = "aabc\ud800"  # few letters: many matches and near matches
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=4)


def shown_by(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    matcher = StopMatcher(StopStrings(stops))
    shown = []
    for piece in pieces:
        shown.append(matcher.feed(piece))
        if matcher.matched:
            return shown, True
    return [*shown, matcher.finish()], False


def naive_cut(text: str, stops: list[str]) -> str | None:
    """Cut before the match that ends first, of several the longest."""
    matches = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    return text[: min(matches)[1]] if matches else None


def naive_held(text: str, stops: list[str]) -> int:
    """Return the length of the longest end of ``text`` that begins a stop string."""
    beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
    return max((length for length in range(1, len(text) + 1) if text[-length:] in beginnings), default=0)


@given(stops=STOPS, pieces=st.lists(st.text(LETTERS, max_size=4)))
def test_the_text_ends_before_the_first_match_wherever_it_is_cut(stops: list[str], pieces: list[str]) -> None:
    shown, matched = shown_by(stops, pieces)
    expected = naive_cut("".join(pieces), stops)
    assert matched == (expected is not None)
    assert "".join(shown) == ("".join(pieces) if expected is None else expected)


class StopMatcherMachine(RuleBasedStateMachine):
    """The matcher against a model that keeps the whole text."""

    def __init__(self) -> None:
        super().__init__()
        self.matcher: StopMatcher | None = None
        self.text = ""
        self.shown = ""

    @precondition(lambda self: self.matcher is None or self.matcher.matched)
    @rule(stops=STOPS)
    def start(self, stops: list[str]) -> None:
        self.stops = stops
        self.matcher, self.text, self.shown = StopMatcher(StopStrings(stops)), "", ""

    @precondition(lambda self: self.matcher is not None and not self.matcher.matched)
    @rule(piece=st.text(LETTERS, max_size=4))
    def feed(self, piece: str) -> None:
        assert self.matcher is not None
        self.text += piece
        self.shown += self.matcher.feed(piece)
        cut = naive_cut(self.text, self.stops)
        assert self.matcher.matched == (cut is not None)
        num_held = naive_held(self.text, self.stops)
        assert self.shown == (self.text[: len(self.text) - num_held] if cut is None else cut)

    @precondition(lambda self: self.matcher is not None and not self.matcher.matched)
    @rule()
    def finish(self) -> None:
        assert self.matcher is not None
        assert self.shown + self.matcher.finish() == self.text
        assert self.matcher.finish() == ""
        self.matcher = None


TestStopMatcher = StopMatcherMachine.TestCase


def test_a_stop_string_spread_over_pieces_is_never_shown() -> None:
    assert shown_by(["34567"], ["1", "23", "45", "678"]) == (["1", "2", "", ""], True)


def test_text_that_cannot_begin_a_stop_string_is_shown_at_once() -> None:
    assert shown_by(["zzzzzzzzzz"], ["hello", " world"]) == (["hello", " world", ""], False)


def test_only_as_much_as_begins_a_stop_string_is_held_back() -> None:
    assert shown_by(["abcd"], ["xab", "cx", "abc"]) == (["x", "abcx", "", "abc"], False)


def test_a_false_start_inside_a_longer_one_is_found() -> None:
    assert shown_by(["aab"], ["aa", "ab", "z"]) == (["", "a"], True)


@pytest.mark.parametrize("pieces", [["xabcd"], ["xab", "cd"], list("xabcd")])
def test_of_two_stop_strings_the_one_that_ends_first_counts(pieces: list[str]) -> None:
    shown, matched = shown_by(["abcd", "bc"], pieces)
    assert ("".join(shown), matched) == ("xa", True)


def test_of_two_that_end_together_the_longer_counts() -> None:
    assert shown_by(["c", "abc"], ["xabc"]) == (["x"], True)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_a_matcher_looks_at_each_character_a_bounded_number_of_times() -> None:
    class CountingStopStrings(StopStrings):
        num_steps = 0

        def step(self, state: int, char: str) -> int:
            CountingStopStrings.num_steps += 1
            return super().step(state, char)

    stops = CountingStopStrings(["a" * 1000 + "b"])
    matcher = StopMatcher(stops)
    CountingStopStrings.num_steps = 0
    for _ in range(5000):
        matcher.feed("a")
    assert CountingStopStrings.num_steps == 5000
