"""How many attempts end in each few seconds of the last minutes, for a plot.

| statement | locks | if the process stops right there |
|---|---|---|
| span, count | nothing | nothing |
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Engine, text

from jobsync_orm.autocommit import Autocommit
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.naming import Names
from jobsync_orm.operate.missing import ready

__all__ = ["Ended", "Throughput", "throughput"]

# Attempts that are counted at once, at most, and the seconds back that are tried for that, the longest first.
COUNTED_UP_TO = 50_000
SPANS = (300, 60, 10)

# How an attempt ended that is told as failed.
FAILED = "('failed', 'timeout', 'discarded', 'died')"


@dataclass(frozen=True, slots=True)
class Ended:
    """Attempts that ended within one stretch of time.

    Attributes
    ----------
    at : int
        When it begins, in seconds since 1970.
    completed, failed : int
        Failed are those that count as failures, and those discarded.
    """

    at: int
    completed: int
    failed: int


@dataclass(frozen=True, slots=True)
class Throughput:
    """Attempts that ended lately.

    Attributes
    ----------
    at : float
        Now, in seconds since 1970 by the database's clock.
    since : int
        From when on they were counted: where very many end, not as far back as was asked.
    every_sec : int
        How long each stretch is.
    ended : tuple of Ended
        Oldest first. A stretch in which nothing ended is missing.
    """

    at: float
    since: int
    every_sec: int
    ended: tuple[Ended, ...]


def throughput(engine: Engine, names: Names, *, since: int | None = None, every_sec: int = 5) -> Throughput:
    """How many attempts ended in each stretch of ``every_sec`` seconds of the last five minutes, at most.

    Parameters
    ----------
    engine, names : Engine, Names
        The cluster.
    since : int, optional
        Only from this moment on, in seconds since 1970. Who counts again and again asks for the last stretch it has
        seen and what came after.
    every_sec : int
        Length of a stretch, in seconds.

    Raises
    ------
    ConfigurationError
        ``every_sec`` is below 1.
    SchemaNotReady
        There are no tables.
    """
    if every_sec < 1:
        raise ConfigurationError(f"every_sec={every_sec!r} must be at least 1")
    attempt = names.text("job_attempt")
    ago = "now() - {} * interval '1 second'"
    tried = " ".join(
        f"WHEN (SELECT count(*) FROM (SELECT 1 FROM {attempt} WHERE ended_at > {ago.format(seconds)}"
        f" LIMIT {COUNTED_UP_TO}) AS s{seconds}) < {COUNTED_UP_TO} THEN {seconds}"
        for seconds in SPANS[:-1]
    )
    database = Autocommit(engine)
    with ready(names):
        if since is None:
            statement = f"SELECT CAST(extract(epoch FROM now()) AS float8), CASE {tried} ELSE {SPANS[-1]} END"
        else:
            statement = f"SELECT CAST(extract(epoch FROM now()) AS float8), {SPANS[0]}"
        ((at, span), *_), _ = database.repeat(text(statement), {})
        first = int(at - span) // every_sec * every_sec
        first = first if since is None else max(first, since // every_sec * every_sec)
        rows, _ = database.repeat(
            text(f"""
                SELECT CAST(floor(extract(epoch FROM ended_at) / :every) * :every AS bigint) AS begins,
                    count(*) FILTER (WHERE outcome = 'completed'), count(*) FILTER (WHERE outcome IN {FAILED})
                FROM {attempt} WHERE ended_at >= to_timestamp(:first) GROUP BY begins ORDER BY begins"""),
            {"every": every_sec, "first": first},
        )
    return Throughput(at, first, every_sec, tuple(Ended(*row) for row in rows))
