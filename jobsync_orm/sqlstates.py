"""What went wrong in the database, whatever the driver calls it."""

from __future__ import annotations

__all__ = ["SERIALIZATION_FAILURE", "sqlstate"]

# A row has changed since the transaction's snapshot.
SERIALIZATION_FAILURE = "40001"


def sqlstate(error: BaseException | None) -> str | None:
    """SQLSTATE of a driver's error; None for any other error, and for none."""
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
