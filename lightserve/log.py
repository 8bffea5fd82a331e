"""Logging: one line per event on stderr, with the process it comes from."""

import logging


def configure_logging(process: str, level: str) -> None:
    """Send this process's log to stderr.

    Args:
        process: Name at the head of each line, such as ``router`` or ``model_worker-1``.
        level: Least severe level shown of our own events; other libraries show warnings and worse.
    """
    logging.basicConfig(format=f"%(asctime)s %(levelname)s {process}: %(message)s", level=logging.WARNING, force=True)
    logging.getLogger("lightserve").setLevel(level.upper())
