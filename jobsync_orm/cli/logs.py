"""The log of commands that go on: on stderr, unless the application has set up logging itself."""

from __future__ import annotations

import logging
import sys

from jobsync_orm.terminal import PrintableLog

__all__ = ["log_to_stderr"]

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to_stderr(level: int) -> None:
    """Have records of ``level`` and above written. Does nothing if the application was first."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableLog(FORMAT))
    logging.basicConfig(level=level, handlers=[handler])
