"""Sends one process's share of the load, each request at its time, and follows the answers."""

import asyncio
import time

from benchmark.api import API_FAMILIES
from benchmark.connection import Connection, ConnectionPool
from benchmark.endpoint import Endpoint
from benchmark.messages import Job, Outcome, Progress, TimedRequest
from benchmark.stream import Stream


class Client:
    """Runs one job.

    Args:
        job: What to send, and where to.

    Attributes:
        outcomes: Of the requests that have ended so far.
    """

    def __init__(self, job: Job) -> None:
        endpoint = Endpoint.parse(job.base_url)
        self._job = job
        self._family = API_FAMILIES[job.api]
        self._pool = ConnectionPool(endpoint)
        self._head = _request_head(endpoint, self._family.path, job.api_key)
        self._room = asyncio.Semaphore(job.max_concurrency or max(1, len(job.requests)))
        self._num_sent = 0
        self._num_failed = 0
        self.outcomes: list[Outcome] = []

    @property
    def progress(self) -> Progress:
        """Where it stands."""
        num_ended = len(self.outcomes)
        return Progress(num_ended - self._num_failed, self._num_failed, self._num_sent - num_ended)

    async def run(self, start_s: float) -> None:
        """Send every request at its offset from ``start_s`` (``time.monotonic``), or as soon after as there is room.

        When it is cancelled, ``outcomes`` are those of the requests that had ended.
        """
        async with asyncio.TaskGroup() as answers:
            for request in self._job.requests:
                wait_s = start_s + request.offset_s - time.monotonic()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                await self._room.acquire()
                answers.create_task(self._follow(request))
                self._num_sent += 1
        self._pool.close()

    async def _follow(self, request: TimedRequest) -> None:
        stream = Stream(self._family, request.index)
        connection: Connection | None = None
        try:
            async with asyncio.timeout(self._job.timeout_s):
                connection = await self._pool.take()
                connection.send(self._head % len(request.body) + request.body, stream)
                await stream.ended
        except TimeoutError:
            stream.fail("timeout", f"not finished after {self._job.timeout_s} s")
            if connection is not None:
                connection.abort()
        except OSError as error:
            stream.fail("connect", str(error))
        outcome = stream.outcome()
        self._num_failed += outcome.failure is not None
        self.outcomes.append(outcome)
        self._room.release()


def _request_head(endpoint: Endpoint, path: str, api_key: str | None) -> bytes:
    lines = [
        f"POST {endpoint.prefix}{path} HTTP/1.1",
        f"Host: {endpoint.authority}",
        "Content-Type: application/json",
        "Accept: text/event-stream",
    ]
    if api_key is not None:
        lines.append(f"Authorization: Bearer {api_key}")
    head = "\r\n".join(lines).replace("%", "%%")
    return f"{head}\r\nContent-Length: %d\r\n\r\n".encode()
