"""Parameters we know but do not support yet: accepted at the value that changes nothing, refused by name otherwise."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from lightserve.errors import RequestError
from lightserve.http_server.fields import Unread

_MAX_HARMLESS_BYTES = 100


def refuse_unsupported(body: msgspec.Struct, harmless: Mapping[str, tuple[Any, ...]]) -> None:
    """Check the fields that are not supported yet.

    Args:
        body: A decoded request.
        harmless: The fields, each with the values that change nothing.

    Raises:
        RequestError: 400 that names a field.
    """
    for name, values in harmless.items():
        written: Unread = getattr(body, name)
        if written is not UNSET and not _is_one_of(bytes(written), (None, *values)):
            raise RequestError(f"`{name}` is not supported yet.", code="unsupported_parameter", param=name)


def _is_one_of(written: bytes, values: tuple[Any, ...]) -> bool:
    if len(written) > _MAX_HARMLESS_BYTES:
        return False
    try:
        value = msgspec.json.decode(written)
    except msgspec.DecodeError:  # what is not read is not wholly checked either
        return False
    return any(value == each and type(value) is type(each) for each in values)  # by type too: 0 is not False
