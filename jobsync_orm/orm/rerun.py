"""Work that is repeated when the fence refuses it: behind ``job.run`` and ``job.run_async``."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from jobsync_orm.exceptions import ConfigurationError, OwnershipLost
from jobsync_orm.orm.criteria import Owner
from jobsync_orm.orm.owned_session import bind
from jobsync_orm.sqlstates import sqlstate

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

__all__ = ["run", "run_async"]

T = TypeVar("T")

# A serialization failure, a deadlock: the server asks to repeat the transaction. And a session that the server has
# ended because its transaction was idle for too long (idle_in_transaction_session_timeout): it says so only of a
# transaction whose COMMIT it has not begun, and has rolled it back.
REPEATABLE = frozenset(("40001", "40P01", "25P03"))

# Seconds before the second attempt, doubled before each further one: meanwhile this node hears of its new tokens.
PAUSE_SEC, LONGEST_PAUSE_SEC = 0.05, 1.0


def run(job: Owner, session_factory: Callable[[], Session], work: Callable[[Any], T], attempts: int) -> T:
    """See :meth:`jobsync_orm.Job.run`."""
    _check(attempts)
    for attempt in range(1, attempts + 1):
        try:
            with session_factory() as session:
                bind(session, job)
                result = work(session)
                session.commit()
                return result
        except (OwnershipLost, DBAPIError) as error:
            if attempt == attempts or not _is_repeatable(error):
                raise
        time.sleep(_pause(attempt))
    raise AssertionError("unreachable")


async def run_async(
    job: Owner, session_factory: Callable[[], AsyncSession], work: Callable[[Any], Awaitable[T]], attempts: int
) -> T:
    """See :meth:`jobsync_orm.Job.run_async`."""
    _check(attempts)
    for attempt in range(1, attempts + 1):
        try:
            async with session_factory() as session:
                bind(session, job)
                result = await work(session)
                await session.commit()
                return result
        except (OwnershipLost, DBAPIError) as error:
            if attempt == attempts or not _is_repeatable(error):
                raise
        await asyncio.sleep(_pause(attempt))
    raise AssertionError("unreachable")


def _check(attempts: int) -> None:
    if attempts < 1:
        raise ConfigurationError(f"attempts={attempts!r} must be at least 1")


def _is_repeatable(error: OwnershipLost | DBAPIError) -> bool:
    return isinstance(error, OwnershipLost) or sqlstate(error.orig) in REPEATABLE


def _pause(attempt: int) -> float:
    return random.uniform(0.5, 1) * min(PAUSE_SEC * 2.0 ** (attempt - 1), LONGEST_PAUSE_SEC)
