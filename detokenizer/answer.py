"""One request's answer on its way from ids to text: decoded, searched for stop strings, gathered into an event."""

import re
from collections.abc import Mapping
from functools import lru_cache

from lightserve.detokenizer.incremental import IncrementalDecoder, TextTable, TextTables
from lightserve.detokenizer.stop_strings import StopMatcher, StopStrings
from lightserve.ipc.messages import ErrorInfo, TextEvent, TextParams
from lightserve.tokenizer import pattern_of_longest

# Special tokens that are left out of the text but named in a stop string are searched for as halves of surrogate
# pairs, which no text can hold.
_FIRST_MARK = 0xD800


class AnswerFactory:
    """Makes answers for one vocabulary.

    Args:
        tables: What each id adds to a text.
        special_id_of: Ids of the special tokens by their text.
    """

    def __init__(self, tables: TextTables, special_id_of: Mapping[str, int]) -> None:
        self._tables = tables
        self._special_id_of = special_id_of
        self._special = re.compile(pattern_of_longest(list(filter(None, special_id_of))))

    def make(self, req_id: int, params: TextParams) -> "Answer":
        """Make the answer of a new request.

        Raises:
            ValueError: A stop string is empty.
        """
        if not params.skip_special_tokens:
            return Answer(req_id, self._tables.with_special, params.stop, {}, params.min_new_tokens)
        found = dict.fromkeys(token for stop in params.stop for token in self._special.findall(stop))
        mark_of = {token: chr(_FIRST_MARK + i) for i, token in enumerate(found)}
        marked = (self._special.sub(lambda match: mark_of[match[0]], stop) for stop in params.stop)
        stops = tuple(dict.fromkeys([*params.stop, *marked]))
        marks = {self._special_id_of[token]: mark for token, mark in mark_of.items()}
        return Answer(req_id, self._tables.without_special, stops, marks, params.min_new_tokens)


class Answer:
    """One request's answer; ``take_event`` hands over what has come since the last time.

    Args:
        req_id: The request.
        table: What each id adds to the text.
        stops: Stop strings.
        marks: What stands in ``stops`` for special tokens that ``table`` leaves out, by their id.
        min_new_tokens: Stop strings are not looked for in what comes before the id of this number.
    """

    __slots__ = (
        "_decoder",
        "_error",
        "_finish_reason",
        "_id_bytes",
        "_logprob_bytes",
        "_marks",
        "_matcher",
        "_num_ids_unsearched",
        "_req_id",
        "_text",
        "_unmark",
        "cached_len",
    )

    def __init__(
        self, req_id: int, table: TextTable, stops: tuple[str, ...], marks: Mapping[int, str], min_new_tokens: int
    ) -> None:
        self._req_id = req_id
        self._decoder = IncrementalDecoder(table)
        self._matcher = StopMatcher(_stop_strings(stops)) if stops else None
        self._marks = marks
        self._unmark = {ord(mark): None for mark in marks.values()}
        self._num_ids_unsearched = min_new_tokens - 1
        self._finish_reason: str | None = None
        self._error: ErrorInfo | None = None
        self._text = ""
        self._id_bytes = b""
        self._logprob_bytes = b""
        self.cached_len = 0  # for the next event

    @property
    def ended(self) -> bool:
        """The next event is the last."""
        return self._finish_reason is not None or self._error is not None

    def count(self, id_bytes: bytes, logprob_bytes: bytes) -> None:
        """Count one id, with its logprob, both as the messages carry them."""
        self._id_bytes += id_bytes
        self._logprob_bytes += logprob_bytes

    def feed(self, token_id: int) -> None:
        """Add an id's text; ends the answer when that completes a stop string.

        Raises:
            IndexError: The id is not in the vocabulary.
        """
        text = self._decoder.feed(token_id)
        matcher = self._matcher
        if matcher is None:
            self._text += text
        elif self._num_ids_unsearched > 0:
            self._num_ids_unsearched -= 1
            self._text += text
        else:
            self._search(matcher, text + self._marks.get(token_id, ""))

    def finish(self, reason: str) -> None:
        """End the answer with all its text, unless the last of it completes a stop string."""
        text = self._decoder.finish()
        if self._matcher is not None:
            self._search(self._matcher, text)
            text = self._matcher.finish().translate(self._unmark)
        if self._finish_reason is None:
            self._text += text
            self._finish_reason = reason

    def break_off(self, reason: str) -> None:
        """End the answer where it is."""
        self._finish_reason = reason

    def fail(self, error: ErrorInfo) -> None:
        """End the answer with an error."""
        self._error = error

    def take_event(self) -> TextEvent:
        """Return what has come since the last event."""
        event = TextEvent(
            self._req_id,
            self._text,
            self._id_bytes,
            self._logprob_bytes,
            self._finish_reason,
            self._error,
            self.cached_len,
        )
        self._text, self._id_bytes, self._logprob_bytes, self.cached_len = "", b"", b"", 0
        return event

    def _search(self, matcher: StopMatcher, text: str) -> None:
        shown = matcher.feed(text)
        self._text += shown.translate(self._unmark) if self._unmark else shown
        if matcher.matched:
            self._finish_reason = "stop"


@lru_cache(maxsize=64)  # clients of one kind stop at the same strings; the largest sets take 0.4 MB
def _stop_strings(stops: tuple[str, ...]) -> StopStrings:
    return StopStrings(stops)
