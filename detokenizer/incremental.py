"""Ids to text, one id at a time: the pieces joined are the text of all ids decoded at once.

At most the bytes of one unfinished character are held back; everything else is out at once, whatever it is.
"""

from codecs import utf_8_decode
from collections.abc import Sequence

from lightserve.tokenizer import Tokenizer


class TextTable:
    """What each id adds to a text.

    Attributes:
        texts: [vocab_size], an id's text; None where its bytes do not begin and end with whole characters.
        raw: [vocab_size], an id's bytes.
    """

    def __init__(self, raw: Sequence[bytes]) -> None:
        self.raw = raw
        self.texts = [_whole_text(token) for token in raw]


class TextTables:
    """The tables of one vocabulary: with its special tokens and without them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.with_special = TextTable(tokenizer.bytes_table)
        self.without_special = TextTable(
            [b"" if i in tokenizer.special_ids else raw for i, raw in enumerate(tokenizer.bytes_table)]
        )


class IncrementalDecoder:
    """Decodes one answer. A leading space is kept: the answer continues a prompt.

    Args:
        table: What each id adds.
    """

    __slots__ = ("_pending", "_raw", "_texts")

    def __init__(self, table: TextTable) -> None:
        self._texts = table.texts
        self._raw = table.raw
        self._pending = b""  # the first bytes of one character, at most 3

    def feed(self, token_id: int) -> str:
        """Return the text that ``token_id`` in [0, vocab_size) completes; bytes that are not UTF-8 become U+FFFD."""
        text = self._texts[token_id]
        if text is not None and not (self._pending and text):
            return text
        data = self._pending + self._raw[token_id]
        text, num_bytes = utf_8_decode(data, "replace")
        self._pending = data[num_bytes:]
        return text

    def finish(self) -> str:
        """Return what is left when nothing more comes: U+FFFD for an unfinished character."""
        data, self._pending = self._pending, b""
        return data.decode("utf-8", "replace")


def _whole_text(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None
