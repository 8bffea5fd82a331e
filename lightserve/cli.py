"""The command: ``lightserve serve [flags]``."""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import NoReturn

from lightserve.config import ServerConfig, add_flags, underscored
from lightserve.errors import ConfigError
from lightserve.launcher import CHILD_COMMANDS, serve

_SUMMARY = "An LLM server whose key/value cache is managed token by token."


def main(arguments: Sequence[str] | None = None, child_commands: Mapping[str, Sequence[str]] = CHILD_COMMANDS) -> int:
    """Run the command.

    Args:
        arguments: Unset: the process's own.
        child_commands: For each kind of child process, the arguments to Python that run it.

    Returns:
        The exit status: 0 when the server was asked to stop, 1 when it failed, with one reason on stderr. Wrong flags
        exit with 2.
    """
    config = parse_config(sys.argv[1:] if arguments is None else arguments)
    try:
        return serve(config, _announce, _complain, child_commands)
    except ConfigError as error:
        _complain(str(error))
        return 1


def parse_config(arguments: Sequence[str]) -> ServerConfig:
    """Read the command line; a wrong one ends the process with status 2 and a message that names the flag."""
    parser = _Parser(prog="lightserve", allow_abbrev=False, description=_SUMMARY)
    parser.add_argument("--version", action="version", version=f"lightserve {version('lightserve')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    serve_parser = commands.add_parser(
        "serve",
        allow_abbrev=False,
        help="serve one model over HTTP",
        description="Serve one model over HTTP. Flags may be spelled with _ or with -.",
    )
    add_flags(serve_parser, ServerConfig)
    parsed, unknown = parser.parse_known_args(underscored(arguments))
    if unknown:
        serve_parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options = vars(parsed)
    try:
        return ServerConfig(**{field.name: options[field.name] for field in dataclasses.fields(ServerConfig)})
    except ConfigError as error:
        serve_parser.error(str(error))


class _Parser(argparse.ArgumentParser):
    """Says what was wrong and where help is; the usage, which lists every flag, would bury it."""

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        _complain(f"{message}\nsee {self.prog} --help")
        sys.exit(2)


def _announce(text: str) -> None:
    print(text, flush=True)


def _complain(text: str) -> None:
    print(f"lightserve: error: {text}", file=sys.stderr, flush=True)
