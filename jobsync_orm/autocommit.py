"""Single statements on the application's engine, each a transaction of its own.

So no transaction of these calls is open while this process is not inside a round trip: a process that is paused for a
minute right here holds no lock for a minute. (On an engine from :func:`bounded`, for as long as a statement may take.)

Such a transaction is of the isolation level that is the default of the database or the role. READ COMMITTED waits for
who writes a row and goes on from what that one has left; the others end with a serialization failure there, and under
all of them two may meet in a deadlock. Nothing has been done then: the statement is sent again, in a new snapshot.

Of an engine from :func:`bounded` the server gives up a statement that takes too long. The limit is the transaction's,
not the session's: through a pooler the connection goes to others afterwards. Such a transaction has a COMMIT of its own
to be sent; if it does not come within the same time, because this process is paused, the server ends the session, so
that the row it has written, the cluster's perhaps, is not locked until somebody notices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Engine, TextClause
from sqlalchemy.exc import DBAPIError

from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.sqlstates import repeated
from jobsync_orm.status import WITHIN

__all__ = ["Autocommit", "bounded", "check_engine", "instant", "limit_of", "listed", "micros"]

# Execution option of an engine.
LIMIT = "jobsync_within_sec"

Row = Sequence[Any]


def bounded(engine: Engine, within_sec: float) -> Engine:
    """``engine``, on whose statements by this library the server spends ``within_sec`` seconds each at most."""
    return engine.execution_options(**{LIMIT: within_sec})


def limit_of(engine: Engine) -> float | None:
    """Seconds that a statement on ``engine`` may take. None: any time."""
    limit: float | None = engine.get_execution_options().get(LIMIT)
    return limit


def check_engine(engine: Any) -> None:
    """Raise ConfigurationError unless ``engine`` is a synchronous one."""
    if not isinstance(engine, Engine):
        # Not shown: it may well be a URL with a password.
        raise ConfigurationError(
            f"a synchronous Engine is needed, not a {type(engine).__name__}: give what create_engine(...) returns "
            "(of an AsyncEngine: create_engine of its url)"
        )


class Autocommit:
    """Executes statements on connections of ``engine``, without BEGIN and COMMIT unless it is :func:`bounded`.

    ``explained`` may give the error to raise instead of the database's.

    Raises
    ------
    ConfigurationError
        ``engine`` is none, or an asynchronous one.
    """

    def __init__(
        self, engine: Engine, explained: Callable[[DBAPIError], Exception | None] = lambda error: None
    ) -> None:
        check_engine(engine)
        self._limit = limit_of(engine)
        level = "AUTOCOMMIT" if self._limit is None else "READ COMMITTED"
        self._engine = engine.execution_options(isolation_level=level)
        self._explained = explained

    def execute(self, statement: TextClause, values: Mapping[str, object]) -> list[Row]:
        """The rows of a statement that must not be sent twice."""

        def send() -> list[Row]:
            if self._limit is None:
                with self._engine.connect() as connection:
                    return list(connection.execute(statement, values))
            with self._engine.begin() as connection:
                connection.execute(WITHIN, {"limit": f"{self._limit * 1000:.0f}"})
                return list(connection.execute(statement, values))

        try:
            return repeated(send)
        except DBAPIError as error:
            if (told := self._explained(error)) is None:
                raise
            raise told from error

    def repeat(self, statement: TextClause, values: Mapping[str, object]) -> tuple[list[Row], bool]:
        """The rows of a statement that may be executed twice, and whether it may have been.

        It is sent once more if the connection turns out to be broken: a pooled one may have been dead for long, and
        one that broke on the way may have lost nothing but the answer.
        """
        try:
            return self.execute(statement, values), False
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
        return self.execute(statement, values), True


def listed(parameter: str, type: str) -> str:
    """SQL of a parameter that is the text of an array (see ``array()``), for every driver the same.

    A driver that asks the server what a parameter is would hear of an array and want a list.
    """
    return f"CAST(CAST(:{parameter} AS text) AS {type}[])"


def micros(timestamp: str) -> str:
    """SQL of a timestamptz as microseconds since 1970: exact, and no setting of a session changes how it is read."""
    return f"round(extract(epoch FROM {timestamp}) * 1000000)::bigint"


def instant(microseconds: str) -> str:
    """SQL of the timestamptz that :func:`micros` was made of."""
    return f"(timestamptz 'epoch' + {microseconds} * interval '1 microsecond')"
