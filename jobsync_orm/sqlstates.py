"""What went wrong in the database, whatever the driver calls it, and what is done again then."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy.exc import DBAPIError

__all__ = ["CONFLICTS", "SERIALIZATION_FAILURE", "repeated", "sqlstate"]

T = TypeVar("T")

# A row has changed since the transaction's snapshot.
SERIALIZATION_FAILURE = "40001"

# That, and a deadlock: the server has rolled the transaction back, and asks to repeat it.
CONFLICTS = frozenset((SERIALIZATION_FAILURE, "40P01"))


def sqlstate(error: BaseException | None) -> str | None:
    """SQLSTATE of a driver's error; None for any other error, and for none."""
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)


# So often a transaction is repeated that met others, after a moment of so many seconds, doubled up to the second one.
TRIES = 20
MOMENT_SEC, MOST_SEC = 0.002, 0.1


def repeated(send: Callable[[], T]) -> T:
    """What ``send`` returns, which is a transaction of its own: repeated where the server asks for that."""
    for number in range(TRIES):
        try:
            return send()
        except DBAPIError as error:
            if sqlstate(error.orig) not in CONFLICTS:
                raise
        time.sleep(random.uniform(0, min(MOMENT_SEC * 2**number, MOST_SEC)))
    return send()
