"""How many tokens a text has: by a tokenizer folder, or by the server.

Special tokens that the tokenizer puts around a text (such as BOS) count, in prompts and in answers: the usual filter of
ShareGPT counts so.
"""

from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from benchmark.endpoint import ServerError, ServerQueries


class TokenCounter(Protocol):
    """Counts the tokens of texts."""

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""


class FileTokens:
    """Counts with a ``tokenizer.json``.

    Args:
        path: The file, or a folder that holds it.

    Raises:
        FileNotFoundError: There is none.
    """

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(f"--tokenizer: {file} does not exist")
        self._tokenizer = Tokenizer.from_file(str(file))

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self._tokenizer.encode(text).ids)

    @property
    def vocab_size(self) -> int:
        """Number of ids that have a text."""
        return int(self._tokenizer.get_vocab_size())


class ServerTokens:
    """Counts with the server's ``/tokenize``."""

    def __init__(self, queries: ServerQueries, model: str) -> None:
        self._queries = queries
        self._model = model

    def count(self, text: str) -> int:
        """Return the number of tokens of a text.

        Raises:
            ServerError: The server has no such route, or refuses.
        """
        model = {"model": self._model} if self._model else {}
        reply = self._queries.post("/tokenize", {"prompt": text, **model})
        if not isinstance(reply, dict) or not isinstance(reply.get("count"), int):
            raise ServerError("POST /tokenize: the reply has no count")
        return int(reply["count"])
