"""Sampling parameters as clients write them: the same names, ranges and rules on every endpoint.

Rules, beyond the ranges below:
  * Absent or ``null``: the default of ``SamplingParams``.
  * Greedy: ``temperature`` 0, ``top_p`` 0, ``min_p`` 1, or (on ``/generate``) ``do_sample`` false.
  * ``top_k`` -1 and 0 turn it off; more than the vocabulary means the vocabulary.
  * ``seed`` -1 or absent: one is drawn. Choice i of a request samples with seed + i, so that choices differ and repeat.
  * The token limit absent: as many as the context has room for. More than that: clamped to it.
  * ``min_new_tokens`` more than the (clamped) limit means the limit.
  * Stop strings: one or a list; empty ones are ignored. Stop ids: in the vocabulary.
  * ``priority``: higher goes first, 0 by default. ``timeout``: seconds from arrival to the end, then 504.
    ``cache_salt``: only requests with the same one share cached prompts.
"""

import secrets
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from lightserve.errors import RequestError
from lightserve.http_server.choice import Choice
from lightserve.http_server.limits import MAX_SALT_CHARS, MAX_STOP_CHARS, MAX_STOPS
from lightserve.ipc.messages import Int32s, TextParams
from lightserve.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams

_SEEDS = 2**63

Limit: TypeAlias = Annotated[int, Meta(ge=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Stops: TypeAlias = str | Annotated[list[str], Meta(max_length=MAX_STOPS)]


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameters that have one name everywhere."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-1, le=_SEEDS - 1)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARS)] | None = None

    @property
    def greedy(self) -> bool:
        """The most probable token is wanted, always."""
        return self.temperature == 0 or self.top_p == 0 or self.min_p == 1

    def sampling_params(
        self,
        *,
        max_new_tokens: int | None,
        min_new_tokens: int | None,
        greedy: bool,
        room: int,
        vocab_size: int,
    ) -> SamplingParams:
        """Fill in every default.

        Args:
            max_new_tokens: As the client wrote it.
            min_new_tokens: As the client wrote it.
            greedy: Whether randomness is off.
            room: Tokens that still fit behind the prompt.
            vocab_size: Ids are below it.

        Raises:
            RequestError: A stop id is not in the vocabulary.
        """
        limit = room if max_new_tokens is None else min(max_new_tokens, room)
        return SamplingParams(
            max_new_tokens=limit,
            temperature=0.0 if greedy else _or_default(self.temperature, 1.0),
            top_p=1.0 if greedy else _or_default(self.top_p, 1.0),
            top_k=min(max(self.top_k or 0, 0), vocab_size),
            min_p=0.0 if greedy else _or_default(self.min_p, 0.0),
            repetition_penalty=_or_default(self.repetition_penalty, 1.0),
            presence_penalty=_or_default(self.presence_penalty, 0.0),
            frequency_penalty=_or_default(self.frequency_penalty, 0.0),
            seed=secrets.randbelow(_SEEDS) if self.seed in (None, -1) else self.seed or 0,
            min_new_tokens=min(min_new_tokens or 0, limit),
            stop_token_ids=self._checked_stop_ids(vocab_size),
            ignore_eos=bool(self.ignore_eos),
        )

    def text_params(self, stops: str | list[str] | None, params: SamplingParams, param: str) -> TextParams:
        """Say what the detokenizer must know.

        Args:
            stops: As the client wrote them.
            params: The sampling parameters, complete.
            param: The field that ``stops`` are from.

        Raises:
            RequestError: The stop strings are too long.
        """
        listed = [stops] if isinstance(stops, str) else stops or []
        if sum(map(len, listed)) > MAX_STOP_CHARS:
            message = f"{param} may have at most {MAX_STOP_CHARS} characters in all."
            raise RequestError(message, code="invalid_value", param=param)
        return TextParams(
            stop=tuple(stop for stop in listed if stop),
            skip_special_tokens=self.skip_special_tokens is not False,
            min_new_tokens=params.min_new_tokens,
        )

    def choice(self, prompt_ids: Int32s, params: SamplingParams, text: TextParams) -> Choice:
        """Put one answer to generate together: how it is queued stands in these fields."""
        return Choice(prompt_ids, params, text, self.priority or 0, self.timeout or 0.0, self.cache_salt or "")

    def _checked_stop_ids(self, vocab_size: int) -> tuple[int, ...]:
        ids = self.stop_token_ids or []
        if not all(0 <= token_id < vocab_size for token_id in ids):
            raise RequestError(
                f"stop_token_ids must be in [0, {vocab_size}).", code="invalid_value", param="stop_token_ids"
            )
        return tuple(ids)


def for_choice(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of choice ``index`` of a request: the same but for the seed."""
    return params if index == 0 else msgspec.structs.replace(params, seed=(params.seed + index) % _SEEDS)


def _or_default(value: float | None, default: float) -> float:
    return default if value is None else value
