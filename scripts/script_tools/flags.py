"""Types of flags that several scripts have."""


def integers(text: str) -> list[int]:
    """Read "1,8,64".

    Raises:
        ValueError: One of them is no integer.
    """
    return [int(part) for part in text.split(",")]
