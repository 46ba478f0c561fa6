"""How a node finds its database and how it behaves in its cluster."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, create_engine, make_url
from sqlalchemy.engine import Engine
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import Pool

from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.hashing import HASH_FUNCTIONS
from jobsync_orm.naming import DEFAULT_APPNAME, Names

if TYPE_CHECKING:
    from os import PathLike

    from sqlalchemy.ext.asyncio import AsyncEngine

__all__ = ["CoordinationConfig"]

DRIVER = "postgresql+psycopg"

# Connections that an engine of a queue's own keeps; it opens more when there are more handlers that need one.
POOL_SIZE = 20

# token_id is a PostgreSQL integer, and the hash function's 64-bit arithmetic holds up to here.
MAX_TOKENS = 2**31 - 1

_RETIRED = {
    "rebalance_check_interval_sec": "the leader replans as soon as a node joins, leaves or dies",
    "dead_node_check_interval_sec": "use lock_watch_interval_sec",
    "token_refresh_initial_interval_sec": "a node hears of new tokens at once",
    "token_refresh_steady_interval_sec": "a node hears of new tokens at once",
    "token_distribution_timeout_sec": "Job's wait_on_enter is the one deadline for starting",
    "leader_lock_timeout_sec": "there is no leader lock",
    "health_check_interval_sec": "health is known from the heartbeat",
    "stale_leader_lock_age_sec": "there is no leader lock",
    "stale_rebalance_lock_age_sec": "there is no rebalance lock",
}


@dataclass(eq=False)
class CoordinationConfig:
    """Coordination and database settings for a :class:`~jobsync_orm.Job`.

    Name the database in one of three ways: the parts ``host``, ``port``, ``dbname``, ``user``, ``password``; a
    ``url``; or an ``engine`` of yours (sync or async). The job opens one connection of its own for coordination
    in every case and never borrows one from your pool.

    Parameters
    ----------
    total_tokens : int
        Tokens that tasks hash onto. A property of the cluster, fixed when its tables are created; a node that
        says otherwise is refused.
    minimum_nodes : int
        Live nodes that must be there before ``Job.__enter__`` returns.
    heartbeat_interval_sec : float
        Seconds between heartbeats.
    heartbeat_timeout_sec : float
        Seconds of silence after which a node counts as dead. A node itself stops saying yes one
        ``heartbeat_interval_sec / 5`` (at least 0.2 s) earlier.
    hash_function : str
        ``"md5"``, ``"sha256"`` or ``"double_sha256"``. A property of the cluster, like ``total_tokens``.
    host, port, dbname, user, password : str, int, str, str, str
        Where the database is, if neither ``url`` nor ``engine`` is given. Any character is allowed.
    appname : str
        Prefix of every table name, ``[a-z_][a-z0-9_]*``.
    url : str or sqlalchemy.URL, optional
        ``postgresql+psycopg://...`` (a plain ``postgresql://`` is read as that).
    engine : sqlalchemy.Engine or AsyncEngine, optional
        Connect the way this engine does.
    schema : str, optional
        Schema of the library's tables. None leaves it to ``search_path``.
    connection_grace_sec : float
        Seconds for which a node may go on saying yes after its coordination connection broke.
    drain_timeout_sec : float
        Seconds a node may take to let go of a token it was asked for (running ``on_revoke``, finishing
        claims) before the leader moves it anyway.
    rejoin_grace_sec : float
        Seconds for which the tokens of a node that stopped or crashed rest and wait for the same name to come
        back. 0 hands them over at once.
    certainty_wait_sec : float
        Seconds for which ``can_claim_task`` may wait, once per interruption, while this node cannot know
        whether its tokens are still its own.
    lock_watch_interval_sec : float
        Seconds between the leader's looks at who is alive.
    trust_freed_locks : bool
        Replace a worker in about two seconds when the server has ended its session, instead of waiting for its
        heartbeat to be missed. Set it to False where something between worker and server may end the server's side of
        a connection while the worker cannot hear of it (a proxy with an idle timeout behind a broken network).
    callback_timeout_sec : float
        Seconds for which entering and leaving wait for a callback of yours that is still running.
    weight : int
        This node's share of the tokens relative to the others, at least 1.
    can_lead : bool
        Whether this node may become the leader.
    labels : mapping of str to str, optional
        Free information shown with the node.
    create_tables : bool
        Create or upgrade the library's tables when the job starts.
    **retired
        The original library's other settings are accepted and warned about; they have nothing left to set.

    Raises
    ------
    ConfigurationError
        A value out of range, or two settings that contradict each other.
    """

    total_tokens: int = 10_000
    minimum_nodes: int = 1
    heartbeat_interval_sec: float = 5
    heartbeat_timeout_sec: float = 15
    rebalance_check_interval_sec: InitVar[float | None] = None
    dead_node_check_interval_sec: InitVar[float | None] = None
    token_refresh_initial_interval_sec: InitVar[float | None] = None
    token_refresh_steady_interval_sec: InitVar[float | None] = None
    token_distribution_timeout_sec: InitVar[float | None] = None
    leader_lock_timeout_sec: InitVar[float | None] = None
    health_check_interval_sec: InitVar[float | None] = None
    stale_leader_lock_age_sec: InitVar[float | None] = None
    stale_rebalance_lock_age_sec: InitVar[float | None] = None
    hash_function: str = "double_sha256"
    host: str = "localhost"
    port: int = 5432
    dbname: str = "jobsync"
    user: str = "postgres"
    password: str = field(default="postgres", repr=False)
    appname: str = DEFAULT_APPNAME
    _: KW_ONLY
    url: str | URL | None = field(default=None, repr=False)
    engine: Engine | AsyncEngine | None = None
    schema: str | None = None
    connection_grace_sec: float = 0.5
    drain_timeout_sec: float = 10
    rejoin_grace_sec: float = 0
    certainty_wait_sec: float = 5
    lock_watch_interval_sec: float = 1
    trust_freed_locks: bool = True
    callback_timeout_sec: float = 5
    weight: int = 1
    can_lead: bool = True
    labels: Mapping[str, str] | None = None
    create_tables: bool = False

    def __post_init__(self, *retired: float | None) -> None:
        for (name, why), value in zip(_RETIRED.items(), retired, strict=True):
            if value is not None:
                warnings.warn(f"{name} has no effect any more: {why}", DeprecationWarning, stacklevel=3)
        self.names = Names(self.appname, self.schema)
        self._check_numbers()
        self._check_source()

    def _check_numbers(self) -> None:
        for name, low, high in (
            ("total_tokens", 1, MAX_TOKENS),
            ("minimum_nodes", 1, 100_000),
            ("weight", 1, 1_000_000),
            ("port", 1, 65_535),
        ):
            value = getattr(self, name)
            if isinstance(value, str):  # not shown: it may well be a URL with a password
                raise ConfigurationError(f"{name} must be a whole number, not text: settings are named, as in url=...")
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ConfigurationError(f"{name}={value!r} must be a whole number from {low} to {high}")
        for name, low_f in (
            ("heartbeat_interval_sec", 0.05),
            ("heartbeat_timeout_sec", 1),
            ("connection_grace_sec", 0.05),
            ("drain_timeout_sec", 0),
            ("rejoin_grace_sec", 0),
            ("certainty_wait_sec", 0),
            ("lock_watch_interval_sec", 0.05),
            ("callback_timeout_sec", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not low_f <= value < math.inf:
                raise ConfigurationError(f"{name}={value!r} must be a number of seconds, at least {low_f}")
        if self.heartbeat_timeout_sec < 2 * self.heartbeat_interval_sec:
            raise ConfigurationError(
                f"heartbeat_timeout_sec={self.heartbeat_timeout_sec!r} must be at least twice "
                f"heartbeat_interval_sec={self.heartbeat_interval_sec!r}: one late heartbeat is no death"
            )
        if 2 * self.connection_grace_sec >= self.heartbeat_timeout_sec:
            raise ConfigurationError(
                f"connection_grace_sec={self.connection_grace_sec!r} must be less than half of "
                f"heartbeat_timeout_sec={self.heartbeat_timeout_sec!r}"
            )
        if self.hash_function not in HASH_FUNCTIONS:
            raise ConfigurationError(
                f"hash_function={self.hash_function!r} is none of {', '.join(sorted(HASH_FUNCTIONS))}"
            )

    def _check_source(self) -> None:
        if self.url is not None and self.engine is not None:
            raise ConfigurationError("give url or engine, not both")
        # An AsyncEngine by what it has: importing it takes time that synchronous programs need not spend.
        if self.engine is not None and not isinstance(getattr(self.engine, "sync_engine", self.engine), Engine):
            # Not shown: it may well be a URL with a password.
            raise ConfigurationError(
                f"engine is no Engine, but a {type(self.engine).__name__}: give what create_engine(...) or "
                "create_async_engine(...) returns, or name the database by url=..."
            )
        if self.url is not None or self.engine is not None:
            given = "url" if self.url is not None else "engine"
            for name in ("host", "port", "dbname", "user", "password"):
                if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    raise ConfigurationError(f"{name} contradicts {given}: name the database in one way")
        backend = self.sqlalchemy_url().get_backend_name()
        if backend != "postgresql":
            raise ConfigurationError(
                f"{backend!r} is not PostgreSQL: coordination needs one; for unit tests without a database use a "
                "standalone Job (coordination_config=None)"
            )

    def sqlalchemy_url(self) -> URL:
        """Where the database is, for a synchronous psycopg engine, with the password in it."""
        if self.engine is not None:
            return self.engine.url.set(drivername=DRIVER) if self._foreign_driver else self.engine.url
        if self.url is not None:
            try:
                url = make_url(self.url)
            except ArgumentError as error:
                raise ConfigurationError(
                    "url is not a database URL (not shown, it may hold a password): expected "
                    "postgresql+psycopg://user:password@host:port/dbname"
                ) from error
            if url.drivername == "postgres":  # as some hosting services write it
                url = url.set(drivername=DRIVER)
            return url.set(drivername=DRIVER) if url.get_backend_name() == "postgresql" else url
        return URL.create(DRIVER, self.user, self.password, self.host, self.port, self.dbname)

    @property
    def _foreign_driver(self) -> bool:
        """Whether ``engine`` makes connections that are not synchronous psycopg ones."""
        dialect = self.engine.dialect  # type: ignore[union-attr]
        return dialect.name == "postgresql" and (dialect.driver != "psycopg" or dialect.is_async)

    def connection_pool(self) -> Pool:
        """A pool of its own that connects just as the application's engine does.

        The coordinator draws its one connection from it, so that an exhausted application pool never delays a
        heartbeat. Events registered on the engine (``do_connect``, ``connect``) apply.
        """
        if isinstance(self.engine, Engine) and not self._foreign_driver:
            return self.engine.pool.recreate()
        # A server that accepts and says nothing must not hold up a reconnect for libpq's two minutes. An engine of the
        # application's has limits of its own.
        url = self.sqlalchemy_url()
        limit = max(2, int(self.heartbeat_timeout_sec - self.heartbeat_interval_sec))
        arguments = {} if "connect_timeout" in url.query else {"connect_timeout": limit}
        return create_engine(url, pool_size=1, connect_args=arguments).pool

    def application_engine(self, pool_size: int = 1, max_overflow: int = 9) -> Engine:
        """The engine for calls made by the application's threads: its own if it gave a fitting one, else a new one."""
        if isinstance(self.engine, Engine) and not self._foreign_driver:
            return self.engine
        return create_engine(self.sqlalchemy_url(), pool_size=pool_size, max_overflow=max_overflow)

    def async_engine(self) -> AsyncEngine:
        """A new engine for the event loop that is going to use it, which shares no connection with the application's.

        A connection belongs to the loop in which it was made. If the application gave an AsyncEngine, connections are
        made as that one makes them.
        """
        from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

        if isinstance(self.engine, AsyncEngine):
            return create_async_engine(self.engine.url, pool=self.engine.sync_engine.pool.recreate())
        return create_async_engine(self.sqlalchemy_url(), pool_size=POOL_SIZE, max_overflow=-1)

    @classmethod
    def embedded(cls, path: str | PathLike[str], **settings: Any) -> CoordinationConfig:
        """A configuration for a real PostgreSQL that runs in ``path``, started here or joined if it runs already.

        Every process that names the same folder shares the server; the last one to leave stops it, and the data
        stay. The library's tables are created unless ``create_tables=False`` is given.

        Parameters
        ----------
        path : path-like
            Folder of the server's data; made if it is missing.
        **settings
            Any other setting of this class.

        Raises
        ------
        EmbeddedUnavailable
            The extra ``embedded`` is not installed, or the server does not start; the message says more.
        """
        from jobsync_orm.embedded import server_url

        settings.setdefault("create_tables", True)
        return cls(url=server_url(path), **settings)
