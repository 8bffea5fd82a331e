from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightserve.ipc.messages import (
    AbortMsg,
    DetokenizerInbox,
    DownMsg,
    DrainMsg,
    ErrorInfo,
    FailMsg,
    FatalMsg,
    GenerateMsg,
    HttpInbox,
    LauncherInbox,
    LoadMsg,
    LoadReply,
    NewReq,
    ReadyMsg,
    RouterInbox,
    ServeMsg,
    ServingMsg,
    StartMsg,
    StepPlan,
    StepResult,
    StopMsg,
    TextEvent,
    TextMsg,
    TextParams,
    TokensMsg,
    list_float32,
    list_int32,
    pack_float32,
    pack_int32,
    pack_int64,
    unpack_float32,
    unpack_int32,
    unpack_int64,
)
from lightserve.sampling_params import SamplingParams

counts = st.integers(0, 2**31 - 1)
req_ids = st.integers(0, 2**63 - 1)
floats = st.floats(allow_nan=False)
raw = st.binary(max_size=64)
texts = st.text(max_size=40)  # U+0000 and every plane included
sampling = st.builds(
    SamplingParams,
    max_new_tokens=counts,
    temperature=floats,
    top_p=floats,
    top_k=counts,
    min_p=floats,
    repetition_penalty=floats,
    presence_penalty=floats,
    frequency_penalty=floats,
    seed=req_ids,
    min_new_tokens=counts,
    stop_token_ids=st.lists(counts, max_size=4).map(tuple),
    ignore_eos=st.booleans(),
)
text_params = st.builds(
    TextParams,
    stop=st.lists(texts, max_size=3).map(tuple),
    skip_special_tokens=st.booleans(),
    min_new_tokens=counts,
)
errors = st.builds(ErrorInfo, status=counts, code=texts, message=texts)
id_lists = st.lists(req_ids, max_size=5)
loads = st.builds(LoadMsg, *[counts] * 7)
events = st.builds(
    TextEvent,
    req_id=req_ids,
    text=texts,
    token_ids=raw,
    logprobs=raw,
    finish_reason=st.none() | texts,
    error=st.none() | errors,
)

router_messages = st.one_of(
    st.builds(GenerateMsg, req_ids, raw, sampling, text_params),
    st.builds(AbortMsg, id_lists),
    st.builds(StopMsg, id_lists),
)
detokenizer_messages = st.one_of(
    st.builds(StartMsg, req_ids, text_params),
    st.builds(TokensMsg, raw, raw, raw, raw),
    st.builds(FailMsg, req_ids, errors),
    loads,
)
http_messages = st.one_of(
    st.builds(TextMsg, st.lists(events, max_size=4)),
    loads,
    st.builds(ServeMsg, counts, counts),
    st.builds(DrainMsg, floats),
    st.builds(DownMsg, texts),
)
launcher_messages = st.one_of(
    st.builds(ReadyMsg, texts, counts, texts),
    st.builds(ServingMsg, texts),
    st.builds(FatalMsg, texts, texts),
)
new_reqs = st.builds(NewReq, counts, raw, counts, raw, sampling)
plans = st.builds(StepPlan, counts, raw, st.lists(new_reqs, max_size=3), raw, raw, raw, raw, raw)


def round_trip(message: Any, union_type: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=union_type)


@given(router_messages)
def test_what_goes_to_the_router_arrives_unchanged(message: RouterInbox) -> None:
    assert round_trip(message, RouterInbox) == message


@given(detokenizer_messages)
def test_what_goes_to_the_detokenizer_arrives_unchanged(message: DetokenizerInbox) -> None:
    assert round_trip(message, DetokenizerInbox) == message


@given(http_messages)
def test_what_goes_to_an_http_server_arrives_unchanged(message: HttpInbox) -> None:
    assert round_trip(message, HttpInbox) == message


@given(launcher_messages)
def test_what_goes_to_the_launcher_arrives_unchanged(message: LauncherInbox) -> None:
    assert round_trip(message, LauncherInbox) == message


@given(plans)
def test_a_step_plan_arrives_unchanged(plan: StepPlan) -> None:
    assert round_trip(plan, StepPlan) == plan


@given(st.builds(StepResult, counts, raw, raw) | st.builds(LoadReply, counts, texts))
def test_a_worker_reply_arrives_unchanged(reply: StepResult | LoadReply) -> None:
    assert round_trip(reply, type(reply)) == reply


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_int32_arrays_are_packed_without_loss(values: list[int]) -> None:
    assert unpack_int32(pack_int32(values)).tolist() == list_int32(pack_int32(values)) == values


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_int64_arrays_are_packed_without_loss(values: list[int]) -> None:
    assert unpack_int64(pack_int64(values)).tolist() == values


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_float32_arrays_are_packed_without_loss(values: list[float]) -> None:
    assert unpack_float32(pack_float32(values)).tolist() == list_float32(pack_float32(values)) == values


def test_packed_arrays_are_little_endian() -> None:
    assert pack_int32([1, -2]) == b"\x01\0\0\0\xfe\xff\xff\xff"
    assert pack_int64(np.array([1], dtype=">i8")) == b"\x01" + b"\0" * 7


@pytest.mark.parametrize("link", [RouterInbox, DetokenizerInbox, HttpInbox, LauncherInbox])
def test_a_message_of_another_link_is_refused(link: Any) -> None:
    for message in (StopMsg([1]), StartMsg(1, TextParams()), DownMsg("x"), ReadyMsg("x")):
        if not isinstance(message, link):
            with pytest.raises(msgspec.ValidationError):
                round_trip(message, link)
