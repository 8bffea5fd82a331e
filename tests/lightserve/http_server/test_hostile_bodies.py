"""Any body whatever: the reply is bounded, well formed, and the next plain request works."""

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.lightserve.http_server.endpoints import ENDPOINTS, Endpoint, sse_payloads
from tests.lightserve.http_server.live_server import LiveServer

_FIELD_NAMES = """
    inputs parameters prompt messages model stream stream_options n stop stop_sequences max_tokens max_new_tokens
    temperature top_p top_k min_p seed min_tokens min_new_tokens stop_token_ids ignore_eos role content do_sample
    repetition_penalty logit_bias tools echo text tokens include_usage
"""
FIELDS = st.sampled_from(_FIELD_NAMES.split())
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["user", "hi", 0, 1, 2**31, 2**63, 10**30, -1, 1e308, "\x00", "\u2028"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELDS | st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
WELL_FORMED = st.fixed_dictionaries(
    {},
    optional={
        "inputs": st.sampled_from(["hi", [1, 2]]),
        "prompt": st.sampled_from(["hi", [1, 2], ["a", "b"]]),
        "messages": st.just([{"role": "user", "content": "hi"}]),
        "stream": st.booleans(),
    },
)
BODIES = st.one_of(
    st.binary(max_size=200),
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.tuples(WELL_FORMED, st.dictionaries(FIELDS, VALUES, max_size=3)).map(
        lambda parts: json.dumps({**parts[0], **parts[1]}).encode()
    ),
)
PATHS = st.sampled_from(
    ["/generate", "/generate_stream", "/v1/completions", "/v1/chat/completions", "/tokens", "/tokenize", "/detokenize"]
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=PATHS, body=BODIES)
def test_any_body_gets_a_proper_reply(server: LiveServer, path: str, body: bytes) -> None:
    response = server.client.post(path, content=body)
    assert response.status_code in (200, 400, 404, 413), response.text
    assert len(response.content) < 400_000
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert len(response.content) < 2000
    elif "event-stream" in response.headers["content-type"]:
        assert sse_payloads(response.text)
    else:
        response.json()


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(endpoint=st.sampled_from(ENDPOINTS), name=FIELDS, value=VALUES)
def test_a_plain_request_works_after_any_other(server: LiveServer, endpoint: Endpoint, name: str, value: Any) -> None:
    body = json.dumps({**endpoint.body(), name: value})
    assert server.client.post(endpoint.path, content=body).status_code in (200, 400, 404)
    assert endpoint.ask(server.client).text == "Hello"
