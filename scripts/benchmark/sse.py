"""Server-sent events out of a byte stream, however the network cut it."""


class SseParser:
    """Collects the data of each event.

    Lines end with LF or CRLF, events with an empty line. Names, ids and comments are skipped. An event that is still
    open when the stream ends is dropped, as the standard asks.
    """

    def __init__(self) -> None:
        self._rest = b""  # the line that is not complete yet
        self._data: list[bytes] = []  # data lines of the event that is not complete yet

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take what one read brought; return the data of every event it completed, in order."""
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
