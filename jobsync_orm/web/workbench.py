"""The few threads in which the dashboard waits for the database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["Workbench"]

T = TypeVar("T")


class Workbench:
    """Runs blocking calls beside the event loop, so many at a time at most. Threads begin with the first call."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="jobsync-dashboard")

    async def do(self, call: Callable[[], T]) -> T:
        """What ``call`` returns or raises. A request that goes away does not stop it."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)
