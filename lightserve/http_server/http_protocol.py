"""HTTP/1.1 for uvicorn, with the one bound that httptools lacks: how large a request's head may grow."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lightserve.http_server.limits import MAX_HEAD_BYTES


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose request line and headers do not end within ``MAX_HEAD_BYTES``, give or take a read."""

    _in_head = False
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Parse what has come, and count it while it belongs to a head that began earlier."""
        counts = self._in_head
        super().data_received(data)
        self._head_bytes = self._head_bytes + len(data) if counts and self._in_head else 0
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's headers are too large.")

    def on_message_begin(self) -> None:
        """A head begins."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A head ends."""
        self._in_head = False
        super().on_headers_complete()
