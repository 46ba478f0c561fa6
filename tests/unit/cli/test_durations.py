from __future__ import annotations

import pytest
import typer

from jobsync_orm.cli.durations import duration


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("45s", 45), ("30m", 1800), ("1.5h", 5400), ("7d", 604_800), (" 2 w ", 1_209_600), (3.5, 3.5)],
)
def test_durations(written: str | float, seconds: float) -> None:
    assert duration(written) == seconds


@pytest.mark.parametrize("written", ["", "7", "d", "-1d", "7days", "1h30m", "nan s"])
def test_what_is_no_duration(written: str) -> None:
    with pytest.raises(typer.BadParameter, match="give a number with its unit"):
        duration(written)
