"""One choice's whole answer."""

from lightserve.http_server.events import num_tokens
from lightserve.ipc.messages import TextEvent


class Answer:
    """One choice's answer, gathered event by event."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.num_tokens = 0
        self.cached_len = 0
        self.finish_reason = ""

    def add(self, event: TextEvent) -> None:
        """Append what one event brought."""
        self._texts.append(event.text)
        self.num_tokens += num_tokens(event)
        self.cached_len += event.cached_len
        self.finish_reason = event.finish_reason or self.finish_reason

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._texts)
