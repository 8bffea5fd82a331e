"""Types of the scripts' flags. argparse names the flag; what they raise tells the value and what is wrong with it.

Beside them, how a script says that it needs a package that is not installed.
"""

import importlib.util
import math
import os
from argparse import ArgumentTypeError
from pathlib import Path

_MAX_INT = 2**31 - 1
_PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


def positive_int(text: str) -> int:
    """Read an integer from 1 to 2^31 - 1.

    Raises:
        ArgumentTypeError: It is none.
    """
    return _integer(text, 1, _MAX_INT)


def non_negative_int(text: str) -> int:
    """Read an integer from 0 to 2^31 - 1.

    Raises:
        ArgumentTypeError: It is none.
    """
    return _integer(text, 0, _MAX_INT)


def port(text: str) -> int:
    """Read a TCP port.

    Raises:
        ArgumentTypeError: It is none.
    """
    return _integer(text, 0, 65535)


def positive_ints(text: str) -> list[int]:
    """Read "1,8,64".

    Raises:
        ArgumentTypeError: One of them is no integer from 1 to 2^31 - 1.
    """
    return [positive_int(part) for part in text.split(",")]


def positive_float(text: str) -> float:
    """Read a finite number above 0.

    Raises:
        ArgumentTypeError: It is none.
    """
    value = _number(text)
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"must be a finite number above 0, not {text!r}")
    return value


def non_negative_float(text: str) -> float:
    """Read a finite number from 0 on.

    Raises:
        ArgumentTypeError: It is none.
    """
    value = _number(text)
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"must be a finite number from 0 on, not {text!r}")
    return value


def rate(text: str) -> float:
    """Read a number above 0; ``inf`` is one.

    Raises:
        ArgumentTypeError: It is none.
    """
    value = _number(text)
    if not value > 0:
        raise ArgumentTypeError(f"must be above 0, not {text!r}")
    return value


def fraction(text: str) -> float:
    """Read a number from 0 to 1.

    Raises:
        ArgumentTypeError: It is none.
    """
    value = _number(text)
    if not 0 <= value <= 1:
        raise ArgumentTypeError(f"must be from 0 to 1, not {text!r}")
    return value


def input_file(text: str) -> Path:
    """Name a file that is there.

    Raises:
        ArgumentTypeError: It is not.
    """
    path = Path(text)
    if not path.exists():
        raise ArgumentTypeError(f"there is no file {text!r}")
    if path.is_dir():
        raise ArgumentTypeError(f"{text!r} is a folder")
    return path


def output_file(text: str) -> Path:
    """Name a file that can be written, so that nobody learns that it cannot when everything has been measured.

    Raises:
        ArgumentTypeError: Its folder is not there, it is a folder itself, or may not be written.
    """
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"{text!r} is a folder")
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"{text!r}: there is no folder {str(path.parent)!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentTypeError(f"{text!r} may not be written")
    return path


def output_folder(text: str) -> Path:
    """Name a folder that is there and can be written to.

    Raises:
        ArgumentTypeError: It is not.
    """
    path = Path(text)
    if not path.is_dir():
        raise ArgumentTypeError(f"there is no folder {text!r}")
    if not os.access(path, os.W_OK):
        raise ArgumentTypeError(f"{text!r} may not be written to")
    return path


def output_picture(text: str) -> Path:
    """Name a picture that can be written.

    Raises:
        ArgumentTypeError: It cannot, or its name does not end as those of pictures do.
    """
    path = output_file(text)
    if path.suffix not in _PICTURE_SUFFIXES:
        raise ArgumentTypeError(f"{text!r} must end in one of {', '.join(_PICTURE_SUFFIXES)}")
    return path


def lacking(*packages: str) -> str | None:
    """Say how to install those of some packages that are not there; None if all are."""
    missing = [package for package in packages if not importlib.util.find_spec(package)]
    return f"needs {' and '.join(missing)}: pip install {' '.join(missing)}" if missing else None


def _integer(text: str, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        raise ArgumentTypeError(f"must be an integer from {least} to {most}, not {text!r}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"must be a number, not {text!r}") from None
