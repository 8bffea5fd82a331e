"""The engine without a server around it keeps to the settings that a server's router keeps to."""

import dataclasses
from pathlib import Path

import pytest
from engine_bench.engine_host import EngineError, Work, open_engine

from lightserve.config import ServerConfig

PROMPT = list(range(10, 110))


@pytest.fixture
def config(model_dir: Path) -> ServerConfig:
    return ServerConfig(
        model_dir=str(model_dir), load_format="dummy", device="cpu", dtype="float32", max_total_token_num=1000
    )


@pytest.mark.parametrize(("disable_prefix_cache", "num_computed"), [(False, 1), (True, 100)])
def test_the_cache_and_the_queue_are_as_the_flags_say(
    config: ServerConfig, disable_prefix_cache: bool, num_computed: int
) -> None:
    with open_engine(dataclasses.replace(config, disable_prefix_cache=disable_prefix_cache, max_queued_reqs=2)) as host:
        host.run([Work(PROMPT, 2)])
        host.run([Work(PROMPT, 2)])
        assert sum(step.num_prefill_tokens for step in host.steps) == num_computed
        with pytest.raises(EngineError, match="2 requests are waiting"):
            host.run([Work(PROMPT, 2)] * 3)
