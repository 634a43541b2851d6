"""Progress says how far, how fast and how long still, as a bar or as lines."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from eagle3.progress import PlainProgress, duration, is_live, progress, rate_text

LOG = logging.getLogger("eagle3.test_progress")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0s"), (8.44, "8.4s"), (59.9, "59.9s"), (192, "3m12s"), (3600, "1h00m"), (7500, "2h05m")],
)
def test_duration_reads_as_people_say_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_slow_rate_is_not_nought() -> None:
    assert [rate_text(rate) for rate in (1234.56, 2.0, 0.5, 0.0433, 0.0)] == ["1,234.6", "2.0", "0.5", "0.043", "0.0"]


def test_lines_come_every_ten_seconds_with_rate_and_time_left(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    plain = PlainProgress(LOG, 100, "samples", "extract", clock=lambda: now[0])
    with caplog.at_level(logging.INFO):
        for _ in range(100):
            now[0] += 0.5
            plain.advance()
        plain.finish()
    assert caplog.messages[0] == "extract 20/100 samples (20%), 2.0 samples/s, 40.0s left"
    assert len(caplog.messages) == 5
    assert caplog.messages[-1] == "extract 100 samples in 50.0s (2.0 samples/s)"


def test_nothing_to_do_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), progress(Console(file=io.StringIO()), LOG, 0, "tokens", "nothing"):
        pass
    assert "nothing 0 tokens" in caplog.messages[-1]


def test_a_terminal_gets_a_bar_and_the_log_the_closing_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with caplog.at_level(logging.INFO), progress(console, LOG, 10, "tokens", "training") as advance:
        for _ in range(10):
            advance(1)
    assert "training" in screen.getvalue()
    assert "tokens/s" in screen.getvalue()
    assert caplog.messages[-1].startswith("training 10 tokens in")


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich draws no bar on one, so that hours would pass in silence."""
    monkeypatch.setenv("TERM", "dumb")
    assert not is_live(Console(file=io.StringIO(), force_terminal=True))
    monkeypatch.setenv("TERM", "xterm")
    assert is_live(Console(file=io.StringIO(), force_terminal=True))
    assert not is_live(Console(file=io.StringIO()))


def test_progress_of_a_failing_stage_does_not_claim_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(ValueError, match="stop"),
        progress(Console(file=io.StringIO()), LOG, 10, "tokens", "x"),
    ):
        raise ValueError("stop")
    assert caplog.messages == []
