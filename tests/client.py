"""Clients of a whole server: streamed requests, and what became of each."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

TIMEOUT_S = 90.0


@dataclass
class Outcome:
    """What one client saw.

    Attributes:
        text: All the text that came.
        finish_reason: Of the last event, if the answer was finished.
        error: Code of the error that the server sent, or ``cut`` when the connection just ended.
    """

    text: str = ""
    finish_reason: str | None = None
    error: str | None = None

    @property
    def is_over(self) -> bool:
        """There was exactly one end: a result or an error that says why."""
        return (self.finish_reason is None) != (self.error is None) and self.error != "cut"


def generation(prompt: str, max_new_tokens: int, **parameters: object) -> dict[str, object]:
    """Body of ``/generate`` and ``/generate_stream``."""
    return {"inputs": prompt, "parameters": {"max_new_tokens": max_new_tokens, **parameters}}


async def stream(
    client: httpx.AsyncClient, body: dict[str, object], on_text: Callable[[str], None] = lambda text: None
) -> Outcome:
    """Send one request to ``/generate_stream`` and read it to its end."""
    outcome = Outcome()
    try:
        async with client.stream("POST", "/generate_stream", json=body) as response:
            if response.status_code != 200:
                outcome.error = json.loads(await response.aread())["error"]["code"]
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    _take(outcome, json.loads(line.removeprefix("data:")))
                    on_text(outcome.text)
    except httpx.TransportError:
        pass
    if outcome.finish_reason is None and outcome.error is None:
        outcome.error = "cut"
    return outcome


def _take(outcome: Outcome, event: dict[str, object]) -> None:
    match event:
        case {"error": {"code": str(code)}}:
            outcome.error = code
        case {"token": {"text": str(text)}, "finish_reason": (str() | None) as finish_reason}:
            outcome.text += text
            outcome.finish_reason = finish_reason
        case _:
            raise AssertionError(f"unexpected event {event}")


async def stream_all(url: str, bodies: Sequence[dict[str, object]]) -> list[Outcome]:
    """Send all at once and read each to its end."""
    async with open_client(url) as client:
        return await asyncio.gather(*(stream(client, body) for body in bodies))


def open_client(url: str) -> httpx.AsyncClient:
    """Make a client without a limit of its own on connections."""
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None))


class OpenStreams:
    """Streams that run in the background while a test does something to the server. Use inside ``asyncio.run``."""

    def __init__(self, client: httpx.AsyncClient, bodies: Sequence[dict[str, object]]) -> None:
        self._texts = [""] * len(bodies)
        self._tasks = [
            asyncio.create_task(stream(client, body, lambda text, index=index: self._note(index, text)))  # type: ignore[misc]
            for index, body in enumerate(bodies)
        ]

    def _note(self, index: int, text: str) -> None:
        self._texts[index] = text

    async def until_all_have_text(self) -> None:
        """Wait until every client has seen some text."""
        while not all(self._texts):
            ended_early = [task.result() for task in self._tasks if task.done()]
            assert not ended_early, ended_early
            await asyncio.sleep(0.02)

    async def outcomes(self) -> list[Outcome]:
        """Wait until all have ended."""
        return await asyncio.gather(*self._tasks)

    def leave(self) -> None:
        """Close every connection."""
        for task in self._tasks:
            task.cancel()


def get_json(url: str, path: str) -> dict[str, object]:
    """Read one JSON object."""
    reply = httpx.get(url + path, timeout=TIMEOUT_S)
    result = reply.json()
    assert isinstance(result, dict)
    return result


def health(url: str) -> int | None:
    """Status of ``/health``; None when nobody answers."""
    try:
        return httpx.get(url + "/health", timeout=5).status_code
    except httpx.TransportError:
        return None
