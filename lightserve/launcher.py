"""The parent: starts every process of a server, says when it is ready, watches, drains, and leaves nothing behind."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import setproctitle
import zmq

from lightserve.boot import Boot, write_boot
from lightserve.children import Children, describe_exit
from lightserve.config import ServerConfig
from lightserve.ipc.links import Inbox, Outbox
from lightserve.ipc.messages import DownMsg, DrainMsg, FatalMsg, LauncherInbox, ReadyMsg, ServeMsg, ServingMsg
from lightserve.listener import base_url, listen
from lightserve.log import configure_logging
from lightserve.preparation import prepare
from lightserve.ready_text import ready_text
from lightserve.run_dir import run_directory
from lightserve.stop_signals import SignalInbox, exit_on_stop_signals

logger = logging.getLogger(__name__)

# What Python runs for each kind of child, in the order in which a failure spreads.
CHILD_COMMANDS: Mapping[str, Sequence[str]] = {
    kind: ("-m", f"lightserve.{kind}.process") for kind in ("model_worker", "router", "detokenizer", "http_server")
}

_BLAME_S = 0.3  # the cause of a failure may be noticed a little later than its consequences
_GOODBYE_S = 5.0  # for HTTP servers to end what is open with an error


class _ChildFailure(Exception):
    """A child ended, or said that it cannot go on; the message names it and says why."""


def serve(
    config: ServerConfig,
    announce: Callable[[str], None],
    complain: Callable[[str], None],
    child_commands: Mapping[str, Sequence[str]] = CHILD_COMMANDS,
) -> int:
    """Serve until SIGINT or SIGTERM asks to stop.

    Open requests may then finish, for at most ``config.drain_timeout_s``; a second signal ends them with an error.

    Args:
        config: The operator's settings.
        announce: Called once, with the text that says that the server is ready.
        complain: Called once if a child fails, with the cause, before the others are ended.
        child_commands: For each kind of child, the arguments to Python that run it.

    Returns:
        The exit status: 0 when asked to stop, 1 when a child failed.

    Raises:
        ConfigError: The settings do not fit the machine or the model.
    """
    setproctitle.setproctitle("lightserve launcher")  # this also takes the api_key off the process list
    configure_logging("launcher", config.log_level)
    exit_on_stop_signals()
    with listen(config.host, config.port) as listener, run_directory() as run_dir:
        url = base_url(listener)
        boot = prepare(config, run_dir, listener.fileno())
        write_boot(boot)
        launcher = Launcher(boot, child_commands)
        try:
            launcher.start()
            listener.close()  # from now on the port is open exactly as long as there is an HTTP server
            if launcher.await_ready():
                announce(ready_text(boot, url, launcher.router_ready))
                launcher.await_stop()
                launcher.drain()
        except _ChildFailure as failure:
            complain(str(failure))
            launcher.say_goodbye()
            return 1
        finally:
            launcher.close()
    return 0


@dataclass(frozen=True, order=True)
class _Failure:
    """Ordered by how likely it is the cause of the others.

    Attributes:
        spread: Failures spread from one kind of child to the next: its place in ``CHILD_COMMANDS``.
        ended_by_itself: Not killed by a signal. Ranks wait for one another, so that when one is killed the others fail.
        arrival: Of two ranks that failed, the first had the cause.
    """

    is_clean_exit: bool
    spread: int
    ended_by_itself: bool
    arrival: int
    process: str
    reason: str


class Launcher:
    """The children of one server, from their start to their end.

    Args:
        boot: What the children are told.
        child_commands: For each kind of child, the arguments to Python that run it.
    """

    def __init__(self, boot: Boot, child_commands: Mapping[str, Sequence[str]]) -> None:
        self._boot = boot
        self._signals = SignalInbox()
        self._inbox: Inbox[LauncherInbox] = Inbox(boot.run_dir, "launcher", LauncherInbox)
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.socket, zmq.POLLIN)
        self._poller.register(self._signals.fd, zmq.POLLIN)
        self._children = Children(child_commands, boot.run_dir)
        self._http: dict[str, Outbox] = {}
        self._ready: dict[str, ReadyMsg] = {}
        self._serving: set[str] = set()
        self._failures: dict[str, _Failure] = {}
        self._num_stops = 0
        self._draining = False

    @property
    def router_ready(self) -> ReadyMsg:
        """What the router said of the pool."""
        return self._ready["router"]

    def start(self) -> None:
        """Start every child."""
        config = self._boot.config
        for rank in range(config.tp):
            self._children.spawn("model_worker", rank)
        self._children.spawn("router", 0)
        self._children.spawn("detokenizer", 0)
        for index in range(config.httpserver_workers):
            name = self._children.spawn("http_server", index, pass_fds=[self._boot.listen_fd])
            self._http[name] = Outbox(self._boot.run_dir, name)

    def await_ready(self) -> bool:
        """Wait until every child is ready, and HTTP servers take requests; False if told to stop before."""
        # The router is ready once its model workers are.
        awaited = {"router", "detokenizer", *self._http}
        while not (awaited <= self._ready.keys() or self._num_stops):
            self._wait()
        if not self._num_stops:
            num_slots = self.router_ready.max_total_token_num
            self._tell_http(ServeMsg(num_slots, min(num_slots, self._boot.max_req_total_len)))
        while not (self._serving == self._http.keys() or self._num_stops):
            self._wait()
        return not self._num_stops

    def await_stop(self) -> None:
        """Wait until told to stop."""
        while not self._num_stops:
            self._wait()

    def drain(self) -> None:
        """Let open requests finish, until the limit or another stop signal; what is left ends with an error."""
        self._draining = True
        limit_s = self._boot.config.drain_timeout_s
        logger.info("open requests may finish within %g s; another signal stops at once", limit_s)
        self._tell_http(DrainMsg(limit_s))
        deadline = time.monotonic() + limit_s
        while self._num_stops < 2 and self._children.any_runs(self._http) and time.monotonic() < deadline:
            self._wait(deadline)
        if self._children.any_runs(self._http):
            logger.info("stopping at once: %s", "another signal" if self._num_stops >= 2 else "the limit has passed")
            self._end_open_requests(DrainMsg(0.0))

    def say_goodbye(self) -> None:
        """Let HTTP servers end every open request with an error that names the child that failed."""
        self._end_open_requests(DownMsg(f"its {self._cause().process} process ended"))

    def _end_open_requests(self, message: DrainMsg | DownMsg) -> None:
        """Let HTTP servers do what ``message`` says, and end; the other children are of no use any more."""
        self._children.kill(set(self._children.names) - self._http.keys())
        self._tell_http(message)
        deadline = time.monotonic() + _GOODBYE_S
        while self._children.any_runs(self._http) and time.monotonic() < deadline:
            self._receive(deadline)

    def close(self) -> None:
        """End what still runs, at once."""
        self._children.close()
        for outbox in self._http.values():
            outbox.close()
        self._inbox.close()

    def _tell_http(self, message: msgspec.Struct) -> None:
        for outbox in self._http.values():
            outbox.send(message)

    def _wait(self, deadline: float | None = None) -> None:
        """Take in what comes next, at the latest at ``deadline``; raise _ChildFailure for the failure of a child."""
        self._receive(deadline)
        if self._failures:
            blame_at = time.monotonic() + _BLAME_S
            while time.monotonic() < blame_at:
                self._receive(blame_at)
            cause = self._cause()
            for failure in self._failures.values():
                if failure is not cause:
                    logger.warning("%s %s", failure.process, failure.reason.partition("\n")[0])
            raise _ChildFailure(f"{cause.process} {cause.reason}")

    def _cause(self) -> _Failure:
        return min(self._failures.values())

    def _receive(self, deadline: float | None) -> None:
        timeout_ms = None if deadline is None else max(0, round((deadline - time.monotonic()) * 1000))
        self._poller.poll(timeout_ms)
        self._num_stops += self._signals.count_stops()
        for message in self._inbox.drain():
            match message:
                case ReadyMsg():
                    self._ready[message.process] = message
                case ServingMsg():
                    self._serving.add(message.process)
                case FatalMsg():
                    self._failures[message.process] = self._failure(message.process, f"failed: {message.message}")
        for name, code in self._children.reap().items():
            asked_to_end = self._draining and name in self._http and code == 0
            if not asked_to_end:
                self._failures.setdefault(name, self._failure(name, describe_exit(code), code))

    def _failure(self, process: str, reason: str, code: int = 1) -> _Failure:
        return _Failure(
            is_clean_exit=code == 0,
            spread=list(CHILD_COMMANDS).index(process.partition("-")[0]),
            ended_by_itself=code >= 0,
            arrival=len(self._failures),
            process=process,
            reason=reason,
        )
