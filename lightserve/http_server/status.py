"""Whether this HTTP server takes requests now, and the limits it learnt when the others were ready."""

from enum import Enum

from lightserve.errors import RequestError
from lightserve.ipc.messages import LoadMsg, ServeMsg


class Phase(Enum):
    """Where the server stands between start and end."""

    STARTING = "The server is starting."
    SERVING = "The server is serving."
    DRAINING = "The server is shutting down."
    DOWN = "The server has failed and is stopping."


class Status:
    """The server's phase, limits and last reported load.

    Args:
        max_req_total_len: Most tokens of prompt and answer together, as far as the model is concerned.
    """

    def __init__(self, max_req_total_len: int) -> None:
        self.phase = Phase.STARTING
        self.max_req_total_len = max_req_total_len
        self.max_total_token_num = 0
        self.load: LoadMsg | None = None

    def serve(self, message: ServeMsg) -> None:
        """Take requests from now on, within the limits of the message."""
        self.phase = Phase.SERVING
        self.max_total_token_num = message.max_total_token_num
        self.max_req_total_len = message.max_req_total_len

    def check_serving(self) -> None:
        """Go on only if requests are taken.

        Raises:
            RequestError: 503, they are not.
        """
        if self.phase is not Phase.SERVING:
            raise RequestError(self.phase.value, status=503, code=f"server_{self.phase.name.lower()}")
