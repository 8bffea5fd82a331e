import subprocess
import sys
from importlib.metadata import version

import pytest

from lightserve.cli import main, parse_config
from lightserve.config import ServerConfig


def test_serve_without_flags_is_the_default_configuration() -> None:
    assert parse_config(["serve"]) == ServerConfig()


def test_flags_are_accepted_with_underscores_and_with_dashes() -> None:
    with_underscores = parse_config(["serve", "--max_total_token_num", "120000", "--model_dir=/models/a-b"])
    with_dashes = parse_config(["serve", "--max-total-token-num", "120000", "--model-dir=/models/a-b"])

    assert with_underscores == with_dashes == ServerConfig(max_total_token_num=120000, model_dir="/models/a-b")


def test_settings_that_contradict_each_other_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        parse_config(["serve", "--port", "70000"])

    assert exit.value.code == 2
    assert "--port must be at most 65535, not 70000" in capsys.readouterr().err


def test_a_flag_may_not_be_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(["serve", "--max_total", "5"])

    assert "unrecognized arguments: --max_total" in capsys.readouterr().err


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main([])

    assert exit.value.code == 2
    assert "command" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["-m", "lightserve"], ["-c", "import lightserve.cli as c; c.main()"]])
def test_the_command_runs_as_a_module_too(command: list[str]) -> None:
    shown = subprocess.run([sys.executable, "-P", *command, "--version"], capture_output=True, text=True, check=True)

    assert shown.stdout == f"lightserve {version('lightserve')}\n"


def test_the_command_does_not_import_torch() -> None:
    program = "import sys, lightserve.cli; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-P", "-c", program]).returncode == 0
