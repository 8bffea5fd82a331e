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


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--prt", "8100"], "unrecognized arguments: --prt 8100"),
        (["--max_total", "5"], "unrecognized arguments: --max_total 5"),  # a flag may not be shortened
        (["--port", "99999"], "--port must be at most 65535, not 99999"),
        (["--port", "x"], "argument --port: invalid int value: 'x'"),
        (["--port"], "argument --port: expected one argument"),
    ],
)
def test_a_wrong_flag_of_serve_is_named_and_nothing_else_is_printed_but_where_help_is(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["serve", *arguments])

    assert exit.value.code == 2
    assert capsys.readouterr() == ("", f"lightserve: error: {complaint}\nsee lightserve serve --help\n")


@pytest.mark.parametrize("arguments", [[], ["swerve"]])
def test_no_known_command_is_an_error_that_leads_to_the_help_on_commands(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments)

    assert exit.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("lightserve: error: ")
    assert "command" in first
    assert second == "see lightserve --help"


@pytest.mark.parametrize("command", [["-m", "lightserve"], ["-c", "import lightserve.cli as c; c.main()"]])
def test_the_command_runs_as_a_module_too(command: list[str]) -> None:
    shown = subprocess.run([sys.executable, "-P", *command, "--version"], capture_output=True, text=True, check=True)

    assert shown.stdout == f"lightserve {version('lightserve')}\n"


def test_the_command_does_not_import_torch() -> None:
    program = "import sys, lightserve.cli; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-P", "-c", program]).returncode == 0
