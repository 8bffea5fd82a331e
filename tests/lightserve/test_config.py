import argparse
import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from lightserve.config import ServerConfig, add_flags, check_bounds, setting, underscored
from lightserve.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    eager: bool = setting(False, "do not wait")
    limit: int | None = setting(None, "100 % of something", at_least=2)
    share: float = setting(0.5, "a share", at_least=0, at_most=1)
    kind: Literal["plain", "fancy"] = setting("plain", "which kind")
    name: str | None = setting(None, "a name")


def parse(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, Settings)
    return vars(parser.parse_args(underscored(arguments)))


def test_unset_flags_have_the_defaults_of_the_fields() -> None:
    assert parse() == dataclasses.asdict(Settings())


def test_flags_have_the_types_of_the_fields() -> None:
    values = parse("--eager", "--limit", "7", "--share=0.25", "--kind", "fancy", "--name", "x")

    assert values == {"eager": True, "limit": 7, "share": 0.25, "kind": "fancy", "name": "x"}


@pytest.mark.parametrize("arguments", [["--limit", "7.5"], ["--kind", "ugly"], ["--share", "x"], ["--lim", "7"]])
def test_a_wrong_flag_is_named_and_ends_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        parse(*arguments)

    assert exit.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_help_shows_the_text_and_the_default_of_every_field() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, ServerConfig)

    help = " ".join(parser.format_help().split())

    for field in dataclasses.fields(ServerConfig):
        assert f"--{field.name} " in help
        assert field.metadata["help"] in help
        assert field.default is None or field.default is False or f"(default: {field.default})" in help


def test_a_percent_sign_in_help_is_shown() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Settings)

    assert "100 % of something" in parser.format_help()


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["--max-total-token-num", "5"], ["--max_total_token_num", "5"]),
        (["--max-total-token-num=5"], ["--max_total_token_num=5"]),
        (["--model-dir=/a-b/c-d"], ["--model_dir=/a-b/c-d"]),
        (["--model_dir", "/a-b"], ["--model_dir", "/a-b"]),
        (["-h", "a-b"], ["-h", "a-b"]),
    ],
)
def test_dashes_in_flags_become_underscores_and_values_stay(given: list[str], read: list[str]) -> None:
    assert underscored(given) == read


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"limit": 1}, "--limit must be at least 2, not 1"),
        ({"share": 1.5}, "--share must be at most 1, not 1.5"),
        ({"share": math.nan}, "--share must be at least 0, not nan"),
        ({"name": ""}, "--name must not be empty"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_the_name_of_its_flag(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_bounds(Settings(**values))


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"port": -1}, "--port"),
        ({"port": 65536}, "--port"),
        ({"tp": 0}, "--tp"),
        ({"max_total_token_num": 0}, "--max_total_token_num"),
        ({"drain_timeout_s": -1.0}, "--drain_timeout_s"),
        ({"model_dir": ""}, "--model_dir"),
        ({"api_key": ""}, "--api_key"),
        ({"batch_max_tokens": 16, "running_max_req_size": 16}, "--batch_max_tokens"),
    ],
)
def test_server_settings_are_checked(values: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        ServerConfig(**values)


def test_bounds_themselves_are_allowed() -> None:
    ServerConfig(port=65535, max_total_token_num=16, drain_timeout_s=0.0, batch_max_tokens=17, running_max_req_size=16)
