"""What the scenarios must know about a library: one module for each, with the same functions.

Each library lives in an environment of its own, so an adapter is imported only where its library is installed.

| name | what it gives |
|---|---|
| ``PACKAGE`` | name of the distribution |
| ``PERIOD`` | seconds of the slowest timer that an event may fall into |
| ``ENTER_SEC`` | its ``wait_on_enter`` |
| ``make_job`` | a job that has not been entered |
| ``settings`` | its configuration, as JSON, for a mode (``fresh``, ``steady``) and a number of tokens |
| ``prepare`` | make the tables |
| ``leads``, ``condition`` | what a job says about itself |
| ``owners`` | node -> tokens it has in the database |
| ``redistribution_ms`` | milliseconds of the latest one, from its trigger to the last token in place |
| ``hash_calls`` | hash functions by name, for a number of tokens |
| ``planning``, ``pinned_planning``, ``conversion`` | the pure planning step, as functions of no argument |
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from typing import Any

__all__ = ["LIBRARIES", "describe", "load"]

LIBRARIES = ("original", "ours")


def load(library: str) -> Any:
    """The adapter module of ``library``; imports the library."""
    if library not in LIBRARIES:
        raise SystemExit(f"library {library!r} is none of {', '.join(LIBRARIES)}")
    return importlib.import_module(f"{__name__}.{library}")


def describe(adapter: Any) -> dict[str, str]:
    """What every result line says about what was measured."""
    return {
        "package": adapter.PACKAGE,
        "version": importlib.metadata.version(adapter.PACKAGE),
        "python": platform.python_version(),
    }
