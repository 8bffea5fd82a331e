"""The three kinds of failure: the client's, the operator's, ours."""


class RequestError(Exception):
    """The client's mistake, or a limit the client met: answered over HTTP, and nothing else is disturbed.

    Args:
        message: What was wrong, short, without the client's own text.
        status: HTTP status, 4xx or 503.
        code: A stable word for programs, such as ``context_length_exceeded``.
        param: The request field that was wrong, if one was.
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str = "invalid_request", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param


class ConfigError(Exception):
    """The operator's mistake: raised at start, names the flag or the file, ends the program with one line."""


class InvariantError(Exception):
    """Ours: a promise between parts was broken. Carries the numbers; the process that meets it dies loudly."""
