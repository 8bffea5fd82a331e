import io
import logging
import sys

import pytest

from lightserve.model_worker.weights.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(progress: Progress) -> None:
    for _ in range(4):
        progress.add(1_000_000_000)
    progress.finish()


def test_a_terminal_sees_a_bar_that_fills_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    run(Progress(4_000_000_000, shown=True))
    text = terminal.getvalue()
    assert "100% of 4.00 GB" in text
    assert text.endswith("\r\x1b[K")


def test_without_a_terminal_one_line_is_logged(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run(Progress(4_000_000_000, shown=True))
    assert capsys.readouterr().err == ""
    (message,) = caplog.messages
    assert message.startswith("loaded 4.00 GB of weights in")


def test_other_ranks_say_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    run(Progress(4_000_000_000, shown=False))
    assert terminal.getvalue() == ""
    assert not caplog.messages
