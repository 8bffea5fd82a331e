"""Prompts of tokenizers other than the usual one: with a BOS, without a chat template."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lightserve.http_server.endpoints import ENDPOINTS, Endpoint
from tests.lightserve.http_server.fake_engine import prompt_of
from tests.lightserve.http_server.live_server import LiveServer, live_server

BOS = "<|im_start|>"
BOS_ID = 257
TEXT_ENDPOINTS = [endpoint for endpoint in ENDPOINTS if not endpoint.is_chat]


@pytest.fixture(scope="module")
def bos_server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = shutil.copytree(model_dir, tmp_path_factory.mktemp("bos") / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "add_bos_token": True}))
    with live_server(folder) as server:
        yield server


@pytest.mark.parametrize("endpoint", TEXT_ENDPOINTS, ids=str)
def test_an_empty_text_runs_on_its_bos(bos_server: LiveServer, endpoint: Endpoint) -> None:
    reply = endpoint.ask(bos_server.client, "")
    assert (reply.text, reply.prompt_tokens) == ("Hello", 1)
    assert prompt_of(bos_server.engine.requests[-1]) == [BOS_ID]


@pytest.mark.parametrize("endpoint", TEXT_ENDPOINTS, ids=str)
def test_ids_get_no_bos(bos_server: LiveServer, endpoint: Endpoint) -> None:
    assert endpoint.ask(bos_server.client, [5]).prompt_tokens == 1


def test_a_model_without_a_template_refuses_chats_alone(bos_server: LiveServer) -> None:
    for endpoint in ENDPOINTS:
        reply = endpoint.ask(bos_server.client)
        if endpoint.is_chat:
            assert reply.status == 400
            assert reply.error is not None
            assert reply.error["code"] == "no_chat_template"
        else:
            assert reply.text == "Hello"
