"""Parameters we know but do not support yet: accepted at the value that changes nothing, refused by name otherwise."""

from collections.abc import Mapping
from typing import Any

import msgspec

from lightserve.errors import RequestError


def refuse_unsupported(body: msgspec.Struct, harmless: Mapping[str, tuple[Any, ...]]) -> None:
    """Check the fields that are not supported yet.

    Args:
        body: A decoded request; None means that a field is absent.
        harmless: The fields, each with the values that change nothing.

    Raises:
        RequestError: 400 that names a field.
    """
    for name, values in harmless.items():
        value = getattr(body, name)
        # By type too: 0 is not False.
        if value is not None and not any(value == each and type(value) is type(each) for each in values):
            raise RequestError(f"`{name}` is not supported yet.", code="unsupported_parameter", param=name)
