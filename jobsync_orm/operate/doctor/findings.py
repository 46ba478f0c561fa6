"""What a check is given, and what it answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from sqlalchemy import Engine, text

from jobsync_orm.autocommit import Autocommit, Row
from jobsync_orm.naming import Names

__all__ = ["TRANSACTION_SEC", "Diagnosis", "Finding", "Limits", "Severity", "Subject"]

TRANSACTION_SEC = 600.0


class Severity(StrEnum):
    """How bad it is."""

    ERROR = "error"
    """Something does not work, or will not when it is needed."""
    WARNING = "warning"
    """It works, and somebody should see to it."""
    NOTE = "note"
    """Nothing is wrong; it may be meant so."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    Attributes
    ----------
    check : str
        Name of the check that found it.
    severity : Severity
    what : str
        What was found.
    why : str
        Why it matters.
    remedy : str
        What to do: a command, SQL, or a sentence where neither will do.
    """

    check: str
    severity: Severity
    what: str
    why: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Limits:
    """From where on something is told.

    Attributes
    ----------
    skew_sec : float
        Difference of two clocks, in seconds.
    transaction_sec : float
        Age of a transaction, in seconds.
    unserved_sec : float
        How long jobs have been ready that no worker runs, in seconds.
    pause_sec : float
        Age of a pause, in seconds.
    connections : float
        Share of the connections that are in use.
    dead_rows : int
        Rows that vacuum has not removed, if they are more than the live ones.
    large_bytes : int
        Size of a table from which a missing index is a warning.
    """

    skew_sec: float = 2.0
    transaction_sec: float = TRANSACTION_SEC
    unserved_sec: float = 60.0
    pause_sec: float = 3600.0
    connections: float = 0.9
    dead_rows: int = 50_000
    large_bytes: int = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Subject:
    """What is examined.

    Parameters
    ----------
    engine : Engine
        A synchronous engine on the cluster's database.
    names : Names
        The cluster.
    role : str, optional
        The role whose rights are checked. None: that of the engine.
    total_tokens, hash_function : int, str, optional
        What the workers' configuration says. If not given, the cluster only has to agree with itself.
    limits : Limits
    clock : callable
        This host's, in seconds since 1970.
    """

    engine: Engine
    names: Names
    role: str | None = None
    total_tokens: int | None = None
    hash_function: str | None = None
    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], float] = time.time

    def rows(self, sql: str, **values: object) -> list[Row]:
        """The rows of one statement that reads."""
        return Autocommit(self.engine).repeat(text(sql.replace("::", r"\:\:")), values)[0]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that was found.

    Attributes
    ----------
    healthy : bool
        Whether there is nothing worse than a note.
    findings : tuple of Finding
        The worst first.
    checks : tuple of str
        What was looked at.
    skipped : tuple of str
        What was not, since the tables cannot be read by this release.
    """

    healthy: bool
    findings: tuple[Finding, ...]
    checks: tuple[str, ...]
    skipped: tuple[str, ...]
