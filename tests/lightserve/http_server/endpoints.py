"""Every way to ask for an answer, under one set of names: LightLLM's and OpenAI's routes, streamed and not."""

import json
from dataclasses import dataclass
from typing import Any

import httpx

_LIGHTLLM_NAMES = {"max_tokens": "max_new_tokens", "stop": "stop_sequences", "min_tokens": "min_new_tokens"}


@dataclass(frozen=True)
class Reply:
    """An answer, whatever route it came by."""

    status: int
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: dict[str, Any] | None = None


@dataclass(frozen=True)
class Endpoint:
    """One route in one mode.

    Attributes:
        path: The route.
        streamed: Whether events or a whole reply are asked for.
    """

    path: str
    streamed: bool

    def __str__(self) -> str:
        return f"{self.path.strip('/').replace('/', '-')}-{'stream' if self.streamed else 'whole'}"

    @property
    def is_lightllm(self) -> bool:
        return self.path.startswith("/generate")

    @property
    def is_chat(self) -> bool:
        return "chat" in self.path

    def body(self, prompt: Any = "hi", **parameters: Any) -> dict[str, Any]:
        """Make a body from OpenAI's parameter names; the others are passed on as they are."""
        if self.is_lightllm:
            return {"inputs": prompt, "parameters": {_LIGHTLLM_NAMES.get(k, k): v for k, v in parameters.items()}}
        mode: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if self.streamed else {}
        content = {"messages": [{"role": "user", "content": prompt}]} if self.is_chat else {"prompt": prompt}
        return {**content, **mode, **parameters}

    def param(self, name: str) -> str:
        """Say how an error names a parameter."""
        return _LIGHTLLM_NAMES.get(name, name) if self.is_lightllm else name

    def ask(self, client: httpx.Client, prompt: Any = "hi", **parameters: Any) -> Reply:
        """Ask and read the whole answer."""
        return self.read(client.post(self.path, json=self.body(prompt, **parameters)))

    def read(self, response: httpx.Response) -> Reply:
        """Make sense of a reply."""
        if response.status_code != 200:
            return Reply(response.status_code, error=response.json()["error"])
        if not self.streamed:
            return _whole(response.json())
        return _joined([json.loads(event) for event in sse_payloads(response.text) if event != "[DONE]"])


ENDPOINTS = [
    Endpoint("/generate", streamed=False),
    Endpoint("/generate_stream", streamed=True),
    Endpoint("/v1/completions", streamed=False),
    Endpoint("/v1/completions", streamed=True),
    Endpoint("/v1/chat/completions", streamed=False),
    Endpoint("/v1/chat/completions", streamed=True),
]


def sse_payloads(text: str) -> list[str]:
    """Return the data of each event, checking the framing: one ``data:`` line, one blank line, nothing else."""
    if not text:
        return []
    assert text.endswith("\n\n"), "the last event is not closed"
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data:") and "\n" not in event and "\r" not in event for event in events)
    return [event.removeprefix("data:").removeprefix(" ") for event in events]


def _whole(reply: dict[str, Any]) -> Reply:
    if "generated_text" in reply:
        return Reply(
            200,
            reply["generated_text"][0],
            reply["finish_reason"],
            reply["prompt_tokens"],
            reply["count_output_tokens"],
        )
    choice, usage = reply["choices"][0], reply["usage"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return Reply(200, text, choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"])


def _joined(events: list[dict[str, Any]]) -> Reply:
    if "error" in events[-1]:
        return Reply(200, error=events[-1]["error"])
    if "token" in events[-1]:
        last = events[-1]
        text = "".join(event["token"]["text"] for event in events)
        token = last["token"]
        return Reply(200, text, last["finish_reason"], token["prompt_tokens"], token["count_output_tokens"])
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)
    usage = events[-1]["usage"]
    return Reply(200, text, choices[-1]["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"])
