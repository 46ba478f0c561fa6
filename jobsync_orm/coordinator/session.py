"""The coordinator's one connection: statements with a deadline, and notifications.

A coordinator must never hang: a server that does not answer and packets that vanish must end in an error after a
time of its own choosing, and while it waits it must go on telling the world that it is awake. psycopg's own
``execute`` waits for as long as the socket lives, so this module drives the same libpq connection (``psycopg.pq``)
itself, in non-blocking mode, around one ``select``. Values travel as text.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

from psycopg.pq import ConnStatus, ExecStatus, TransactionStatus
from sqlalchemy.pool import Pool

from jobsync_orm.coordinator.clock import now

__all__ = ["Row", "Session", "SessionLost", "StatementFailed", "array", "parse_array"]

Row = tuple[str | None, ...]
Param = str | int | float | bool | None


class SessionLost(Exception):
    """The connection broke, or did not answer in time. Whether the statement was executed is not known."""


class StatementFailed(Exception):
    """The server refused a statement; the connection is fine.

    Attributes
    ----------
    sqlstate : str
        Why.
    in_function : bool
        Whether it was in a function that the statement has called, or a trigger.
    """

    def __init__(self, message: str, sqlstate: str, in_function: bool = False) -> None:
        super().__init__(f"{message} (SQLSTATE {sqlstate})")
        self.sqlstate = sqlstate
        self.in_function = in_function


def array(values: Iterable[object]) -> str:
    """``values`` as the text of a one-dimensional PostgreSQL array."""
    return "{" + ",".join(_element(value) for value in values) + "}"


def _element(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, int):
        return str(value)
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def parse_array(text: str | None) -> list[int]:
    """The integers of a PostgreSQL array's text; NULL is the empty list."""
    if text is None or text == "{}":
        return []
    return list(map(int, text[1:-1].split(",")))


# No such prepared statement (somebody has sent DISCARD ALL), or its tables have changed so that it must be made anew.
_STALE: Final = {"26000", "0A000"}

# poll, not select: an application may have more than 1,024 descriptors open.
_READ: Final = select.POLLIN | select.POLLPRI


def _poll(watch: list[tuple[int, int]], seconds: float) -> dict[int, int]:
    """Wait for one of the descriptors; descriptor -> events."""
    poller = select.poll()
    for descriptor, events in watch:
        poller.register(descriptor, events)
    return dict(poller.poll(seconds * 1000))


def _encoded(params: Iterable[Param]) -> list[bytes | None]:
    """Values as the text that PostgreSQL reads."""
    return [
        None
        if p is None
        else (b"t" if p else b"f")
        if isinstance(p, bool)
        else (p if isinstance(p, str) else str(p)).encode()
        for p in params
    ]


class Session:
    """One database session of the coordinator.

    Parameters
    ----------
    pool : Pool
        Makes the connection, just as the application's engine would.
    wake_fd : int
        A descriptor that becomes readable when the loop must look up.
    on_look : callable
        Called about every ``tick_sec`` seconds while this session waits, with a time at which the connection showed no
        sign of a break: nothing was left to read, so no end of the connection either. The time is that before the
        look, since this process may be put to sleep between the look and the call.
    tick_sec : float
        Seconds.
    setup : str
        Statements run on each new connection, unless it goes through a pooler (``pooled``).
    """

    def __init__(self, pool: Pool, wake_fd: int, on_look: Callable[[float], None], tick_sec: float, setup: str) -> None:
        self._pool = pool
        self._wake_fd = wake_fd
        self._on_look = on_look
        self._tick_sec = tick_sec
        self._setup = setup
        self._connection: Any = None
        self._heard: dict[str, set[str]] = {}
        self._prepared: dict[str, bytes] = {}
        self.payloads: dict[str, set[str]] = {}  # what came with the notifications that were heard last, by channel
        self.pid = 0
        self.pooled = False
        self.until = math.inf
        """No answer is waited for beyond this moment. Another thread may set it while one is."""
        _sessions.add(self)

    def open(self) -> None:
        """Connect. Raises :class:`SessionLost`."""
        self.close()
        try:
            fairy = self._pool.connect()
            connection: Any = fairy.dbapi_connection
            fairy.detach()
            self._connection = connection
            # A hook may have begun a transaction.
            if connection.pgconn.transaction_status != TransactionStatus.IDLE:
                connection.rollback()
            connection.autocommit = True
        except Exception as error:
            self.close()
            # Whatever the driver, a hook of the application's engine or the network raises: there is no session.
            raise SessionLost(f"cannot connect: {error}") from error
        try:
            connection.pgconn.notify_handler = self._hear
            connection.pgconn.nonblocking = 1
            (row,) = self.execute("SELECT pg_backend_pid()", timeout=10)
            self.pid = int(row[0] or 0)
            # A pooler answers with a process number of its own making.
            self.pooled = connection.pgconn.backend_pid != self.pid
            if not self.pooled:  # settings would stay behind on a server connection that others use next
                self.script(self._setup)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection, if there is one."""
        connection, self._connection = self._connection, None
        self._heard = {}
        self._prepared.clear()
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()

    @property
    def is_open(self) -> bool:
        """Whether there is a connection that has shown no sign of a break."""
        return self._connection is not None and self._connection.pgconn.status == ConnStatus.OK

    def script(self, sql: str, *, timeout: float = 10) -> None:
        """Run statements without parameters or results."""
        self._run(lambda pg: pg.send_query(sql.encode()), timeout)

    def execute(self, sql: str, *params: Param, timeout: float) -> list[Row]:
        """Run one statement in a transaction of its own and return its rows as text.

        Parameters
        ----------
        sql : str
            With ``$1`` and so on.
        *params : str, int, float, bool or None
            The values.
        timeout : float
            Seconds to wait for the answer.

        Raises
        ------
        SessionLost
            No answer in time, or the connection broke; the session is closed then.
        StatementFailed
            The server refused.
        """
        data = _encoded(params)
        return self._run(lambda pg: pg.send_query_params(sql.encode(), data), timeout)

    def prepared(self, sql: str, *params: Param, timeout: float) -> list[Row]:
        """The same for a statement that is sent often: it is parsed once per connection."""
        data = _encoded(params)
        name = self._prepared.get(sql)
        if name is None:
            name = b"jobsync_%d" % len(self._prepared)
            self._run(lambda pg: pg.send_prepare(name, sql.encode()), timeout)
            self._prepared[sql] = name
        try:
            return self._run(lambda pg: pg.send_query_prepared(name, data), timeout)
        except StatementFailed as failed:
            if failed.sqlstate in _STALE:
                self.close()
                raise SessionLost(f"the server has forgotten a prepared statement: {failed}") from failed
            raise

    def _run(self, send: Callable[[Any], None], timeout: float) -> list[Row]:
        if self._connection is None:
            raise SessionLost("there is no connection")
        pg = self._connection.pgconn
        try:
            send(pg)
            deadline = now() + timeout
            while pg.flush():
                self._await_socket(pg, deadline, write=True)
            rows: list[Row] = []
            failure: StatementFailed | None = None
            while True:
                while pg.is_busy():
                    self._await_socket(pg, deadline)
                result = pg.get_result()
                if result is None:
                    break
                if result.status == ExecStatus.FATAL_ERROR:
                    failure = StatementFailed(
                        result.error_message.decode("utf-8", "replace").strip(),
                        (result.error_field(67) or b"").decode(),
                        bool(result.error_field(87)),  # the context: functions, from the innermost
                    )
                elif result.status == ExecStatus.TUPLES_OK:
                    rows = [
                        tuple(
                            None if (v := result.get_value(i, j)) is None else v.decode() for j in range(result.nfields)
                        )
                        for i in range(result.ntuples)
                    ]
        except SessionLost:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise SessionLost(f"connection lost: {error}") from error
        self._collect(pg)
        if failure is not None:
            # 57P0x: the server is going away or has thrown this session out; 08: the connection failed.
            # 25006: it has become a standby.
            gone = failure.sqlstate == "25006" or failure.sqlstate.startswith(("08", "57P0"))
            if gone or pg.status != ConnStatus.OK:
                self.close()
                raise SessionLost(str(failure)) from failure
            raise failure
        return rows

    def _await_socket(self, pg: Any, deadline: float, *, write: bool = False) -> None:
        left = min(deadline, self.until) - now()
        if left <= 0:
            raise SessionLost("the server did not answer in time")
        looked_at = now()
        ready = _poll([(pg.socket, _READ | select.POLLOUT if write else _READ)], min(left, self._tick_sec))
        if ready.get(pg.socket, 0) & ~select.POLLOUT:
            pg.consume_input()
        else:
            self._on_look(looked_at)

    def _hear(self, notification: Any) -> None:
        self._heard.setdefault(notification.relname.decode(), set()).add(notification.extra.decode("utf-8", "replace"))

    def _collect(self, pg: Any) -> None:
        while (notification := pg.notifies()) is not None:
            self._hear(notification)

    def wait(self, timeout: float) -> set[str]:
        """Wait for a notification, for the wake descriptor, or for ``timeout`` seconds.

        Returns
        -------
        set of str
            Channels heard since the last call.

        Raises
        ------
        SessionLost
            The connection broke.
        """
        deadline = now() + timeout
        while True:
            if self._connection is None:
                raise SessionLost("there is no connection")
            pg = self._connection.pgconn
            looked_at = now()
            left = deadline - looked_at
            try:
                ready = _poll([(pg.socket, _READ), (self._wake_fd, _READ)], max(0.0, min(left, self._tick_sec)))
                if pg.socket in ready:
                    pg.consume_input()
                    self._collect(pg)
            except Exception as error:
                self.close()
                raise SessionLost(f"connection lost: {error}") from error
            if pg.socket not in ready:
                self._on_look(looked_at)
            woken = self._wake_fd in ready
            if woken:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_fd, 4096)
            if self._heard or woken or left <= 0:
                return self.heard()

    def heard(self) -> set[str]:
        """Channels heard since the last call of this or of ``wait``, without looking at the connection.

        Their payloads are in ``payloads`` until the next call.
        """
        self.payloads, self._heard = self._heard, {}
        return set(self.payloads)

    def let_go(self) -> None:
        """In a forked child: keep nothing of the parent's connection open, and send it nothing."""
        connection = self._connection
        if connection is None:
            return
        # Not closed: libpq would say good-bye first, for the parent too. And it would use the number of its socket
        # again, whatever that is by then.
        with contextlib.suppress(Exception):  # it was just being closed by another thread
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, connection.pgconn.socket, inheritable=False)
            os.close(null)


# Those of this process. A handler, or another thread of the application, may fork: as long as such a child lives, the
# server would not notice the end of its parent. (What is started with exec is no matter: libpq's sockets are closed.)
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for session in list(_sessions):
        session.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)
