"""What the checks of a machine share: that it lacks something, which is neither passed nor failed."""

import torch


class NotRunError(Exception):
    """This machine lacks what the check needs; the text says what."""


def require_gpus(num_gpus: int) -> None:
    """See to it that a check runs on GPUs or not at all.

    Raises:
        NotRunError: There are fewer.
    """
    found = torch.cuda.device_count()
    if found < num_gpus:
        raise NotRunError(f"needs {num_gpus} GPU{'s' if num_gpus > 1 else ''}; there are {found}")
