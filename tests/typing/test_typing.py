"""The files beside this one are right for mypy --strict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(path.name for path in HERE.glob("*_surface.py")))
def test_mypy_strict(file: str) -> None:
    pytest.importorskip("mypy")
    # A cache of its own: these options would void that of `make lint`, and the other way round.
    cache = ROOT / ".mypy_cache" / "surface"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", f"--cache-dir={cache}", str(HERE / file)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
