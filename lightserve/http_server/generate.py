"""LightLLM's API: ``/generate`` and ``/generate_stream``.

One prompt per call, as text or as ids; a list of texts is refused. ``do_sample`` is false unless the client says
otherwise, as LightLLM has it, and then the answer is greedy whatever ``temperature`` says. Usage counts every id the
model produced, an end-of-sequence id included, whether or not its text is shown.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from lightserve.http_server.answer import Answer
from lightserve.http_server.choice import Choice
from lightserve.http_server.error_reply import error_body
from lightserve.http_server.fields import Unread
from lightserve.http_server.front_end import FrontEnd
from lightserve.http_server.replies import StreamedReply, WholeReply
from lightserve.http_server.sampling_fields import Limit, SamplingFields, Stops
from lightserve.http_server.sse import lightllm_event
from lightserve.http_server.unsupported import refuse_unsupported
from lightserve.ipc.messages import ErrorInfo, TextEvent, list_float32, list_int32

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "return_details": (False,),
    "return_logprob": (False,),
    "print_eos_token": (False,),
    "add_spaces_between_special_tokens": (False,),
    "exponential_decay_length_penalty": (),
    "logit_bias": ({},),
    "guided_grammar": ("",),
    "guided_json": ("",),
    "regular_constraint": ("",),
    "allowed_token_ids": ([],),
    "group_request_id": (),
    "input_penalty": (False,),
}


class GenerateParameters(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """``parameters``: LightLLM's names."""

    max_new_tokens: Limit | None = None
    min_new_tokens: Limit | None = None
    do_sample: bool | None = None
    stop_sequences: Stops | None = None
    n: Unread = UNSET
    best_of: Unread = UNSET
    return_details: Unread = UNSET
    return_logprob: Unread = UNSET
    print_eos_token: Unread = UNSET
    add_spaces_between_special_tokens: Unread = UNSET
    exponential_decay_length_penalty: Unread = UNSET
    logit_bias: Unread = UNSET
    guided_grammar: Unread = UNSET
    guided_json: Unread = UNSET
    regular_constraint: Unread = UNSET
    allowed_token_ids: Unread = UNSET
    group_request_id: Unread = UNSET
    input_penalty: Unread = UNSET


class GenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of both routes."""

    inputs: str | list[int]
    parameters: GenerateParameters | None = None
    multimodal_params: Unread = UNSET


class GenerateReply(msgspec.Struct, frozen=True):
    """The reply of ``/generate``."""

    generated_text: list[str]
    count_output_tokens: int
    finish_reason: str
    prompt_tokens: int


class StreamToken(msgspec.Struct, frozen=True):
    """One token of a stream. Text that several tokens make together comes with the last of them."""

    id: int
    text: str
    logprob: float | None
    special: bool
    count_output_tokens: int
    prompt_tokens: int


class StreamEvent(msgspec.Struct, frozen=True):
    """One event of ``/generate_stream``."""

    token: StreamToken
    generated_text: None = None
    finished: bool = False
    finish_reason: str | None = None
    details: None = None


class GenerateStreamFormat:
    """Writes one event per token.

    Args:
        front: Knows which tokens are special.
        num_prompt_tokens: Of the one prompt.
    """

    def __init__(self, front: FrontEnd, num_prompt_tokens: int) -> None:
        self._front = front
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0

    def write(self, events: list[TextEvent], first_req_id: int) -> bytes:
        """Write what has come."""
        return b"".join([lightllm_event(event) for each in events for event in self._stream_events(each)])

    def end(self) -> bytes:
        """Write nothing: the last event says that it is."""
        return b""

    def error(self, error: ErrorInfo) -> bytes:
        """Write an error event."""
        return lightllm_event(error_body(error))

    def _stream_events(self, event: TextEvent) -> Iterator[StreamEvent]:
        if not (event.token_ids or event.text or event.finish_reason):
            return
        token_ids = list_int32(event.token_ids) or [-1]  # -1: text or an end without a new token
        logprobs: Sequence[float | None] = list_float32(event.logprobs) or [None]
        for token_id, logprob in zip(token_ids[:-1], logprobs[:-1], strict=True):
            yield StreamEvent(self._token(token_id, "", logprob))
        yield StreamEvent(
            self._token(token_ids[-1], event.text, logprobs[-1]),
            finished=event.finish_reason is not None,
            finish_reason=event.finish_reason,
        )

    def _token(self, token_id: int, text: str, logprob: float | None) -> StreamToken:
        self._num_tokens += token_id >= 0
        special = self._front.prompts.is_special(token_id)
        return StreamToken(token_id, text, logprob, special, self._num_tokens, self._num_prompt_tokens)


def generate_routes(front: FrontEnd) -> APIRouter:
    """Make the routes."""
    router = APIRouter()

    @router.post("/generate")
    async def generate(request: Request) -> Response:
        """Generate one answer and reply when it is complete."""
        choice = await _read_choice(front, request)

        def make_body(answers: list[Answer]) -> GenerateReply:
            answer = answers[0]
            return GenerateReply([answer.text], answer.num_tokens, answer.finish_reason, choice.num_prompt_tokens)

        return WholeReply(front.streams, [choice], make_body)

    @router.post("/generate_stream")
    async def generate_stream(request: Request) -> Response:
        """Generate one answer, an event per token."""
        choice = await _read_choice(front, request)
        return StreamedReply(front.streams, [choice], GenerateStreamFormat(front, choice.num_prompt_tokens))

    return router


async def _read_choice(front: FrontEnd, request: Request) -> Choice:
    with front.metrics.counting_failures():
        front.status.check_serving()
        body = await front.bodies.read(request, GenerateRequest)
        refuse_unsupported(body, {"multimodal_params": ({},)})
        parameters = body.parameters or GenerateParameters()
        refuse_unsupported(parameters, _UNSUPPORTED)
        ids = await front.prompts.encode_text(body.inputs, "inputs") if isinstance(body.inputs, str) else body.inputs
        prompt_ids = front.prompts.check(ids, "inputs")
        params = parameters.sampling_params(
            max_new_tokens=parameters.max_new_tokens,
            min_new_tokens=parameters.min_new_tokens,
            greedy=parameters.greedy or not parameters.do_sample,
            room=front.status.max_req_total_len - len(ids),
            vocab_size=front.prompts.vocab_size,
        )
        text = parameters.text_params(parameters.stop_sequences, params, "stop_sequences")
        return parameters.choice(prompt_ids, params, text)
