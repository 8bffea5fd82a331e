"""How far the weights have come, for a person who waits."""

import logging
import sys
import time

logger = logging.getLogger(__name__)

_BAR_WIDTH = 30
_REDRAW_S = 0.1


class Progress:
    """A bar on standard error where that is a terminal, and one log line at the end.

    Args:
        total_bytes: What will be loaded.
        shown: Whether this rank speaks for all.
    """

    def __init__(self, total_bytes: int, shown: bool) -> None:
        self._total_bytes = max(total_bytes, 1)
        self._shown = shown
        self._bar = shown and sys.stderr.isatty()
        self._done_bytes = 0
        self._started = time.monotonic()
        self._drawn = 0.0

    def add(self, num_bytes: int) -> None:
        """Count bytes that have arrived."""
        self._done_bytes += num_bytes
        now = time.monotonic()
        if self._bar and (now - self._drawn >= _REDRAW_S or self._done_bytes >= self._total_bytes):
            self._drawn = now
            self._draw()

    def finish(self) -> None:
        """Say how much came, and how fast."""
        if self._bar:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        if self._shown:
            seconds = time.monotonic() - self._started
            gb = self._done_bytes / 1e9
            logger.info("loaded %.2f GB of weights in %.1f s (%.1f GB/s)", gb, seconds, gb / max(seconds, 1e-9))

    def _draw(self) -> None:
        share = self._done_bytes / self._total_bytes
        filled = int(share * _BAR_WIDTH)
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        sys.stderr.write(f"\rweights [{bar}] {share:4.0%} of {self._total_bytes / 1e9:.2f} GB")
        sys.stderr.flush()
