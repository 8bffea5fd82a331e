"""The fields of a body, and what is said of one that is wrong, missing or unknown.

A name that the client made up is repeated only if it is short and plain. Bodies nest one level deep.
"""

import difflib
import re
from typing import TypeAlias, get_args

import msgspec
from msgspec import Raw, UnsetType

from lightserve.errors import RequestError

# The type of fields that are not read, or hardly: their values are never built.
Unread: TypeAlias = Raw | UnsetType

_MAX_MESSAGE_CHARS = 300
_MAX_LISTED_FIELDS = 8  # of a longer list only those that the client may have meant are told
_PATH = r" - at `\$\.(?P<path>\w{1,64}(?:\.\w{1,64})*)"
_AT_PATH = re.compile(_PATH)
_MISSING_FIELD = re.compile(r"missing required field `(?P<name>\w{1,64})`")
_UNKNOWN_FIELD = re.compile(rf"unknown field `(?P<name>[\w.-]{{1,64}})`(?:{_PATH})?")


def invalid_field(problem: str, body_type: type[msgspec.Struct]) -> RequestError:
    """Return what to answer to a body that is JSON, but not ``body_type``.

    Args:
        problem: The decoder's words.
        body_type: What the body should have been.
    """
    if unknown := _UNKNOWN_FIELD.search(problem):
        return _unknown_field(unknown["name"], unknown["path"], body_type)
    if "unknown field" in problem:
        return RequestError("The request body has a field with an unknown name.", code="unknown_field")
    if missing := _MISSING_FIELD.search(problem):
        return RequestError(f"The field `{missing['name']}` is missing.", code="invalid_value", param=missing["name"])
    path = _AT_PATH.search(problem)
    return RequestError(
        f"{problem[:_MAX_MESSAGE_CHARS]}.", code="invalid_value", param=_bare(path["path"]) if path else None
    )


def _unknown_field(name: str, path: str | None, body_type: type[msgspec.Struct]) -> RequestError:
    inner = _inner_structs(body_type).get(path or "")  # of a made-up name that looks like a path: None
    if inner is None:
        message, param = f"Unknown field `{name}`. {_advice(name, body_type)}", name
    else:
        message, param = f"Unknown field `{name}` in `{path}`. {_advice(name, inner)}", _bare(f"{path}.{name}")
    return RequestError(message, code="unknown_field", param=param)


def _advice(name: str, struct: type[msgspec.Struct]) -> str:
    """Say where the field belongs, or which fields there are."""
    for outer, inner in _inner_structs(struct).items():
        if name in inner.__struct_fields__:
            return f"It belongs in `{outer}`."
    known = [field.name for field in msgspec.structs.fields(struct) if field.type != Unread]
    if len(known) <= _MAX_LISTED_FIELDS:
        return f"The fields are: {_quoted(known)}."
    close = difflib.get_close_matches(name, known)
    return f"The closest are: {_quoted(close)}." if close else "All fields are listed at /docs."


def _inner_structs(struct: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    return {
        field.name: choice
        for field in msgspec.structs.fields(struct)
        for choice in get_args(field.type)  # all of them may be null, too
        if isinstance(choice, type) and issubclass(choice, msgspec.Struct)
    }


def _quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _bare(path: str) -> str:
    return path.removeprefix("parameters.")  # LightLLM's bodies keep the same fields one level down
