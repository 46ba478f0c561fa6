"""Whether this node may take part, and how its session is set up."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.coordinator.session import Session, SessionLost, StatementFailed
from jobsync_orm.coordinator.statements import Statements
from jobsync_orm.exceptions import ClusterMismatch, ConfigurationError, PooledConnection, SchemaNotReady

__all__ = [
    "MISSING",
    "PROTOCOL_VERSION",
    "UNDEFINED_COLUMN",
    "Admission",
    "check_settings",
    "not_ready",
    "refusal",
]

PROTOCOL_VERSION = 1

UNDEFINED_COLUMN = "42703"

# undefined_table, invalid_schema_name, undefined_function
MISSING = ("42P01", "3F000", "42883", UNDEFINED_COLUMN)

# What waiting will not mend. (A server that speaks another language is found out by the deadline.)
_REFUSED = re.compile(
    r"authentication failed|does not exist|no pg_hba.conf entry|no password supplied|could not translate host name"
    r"|failed to resolve host|Name or service not known"
)


def refusal(lost: SessionLost, config: CoordinationConfig) -> ConfigurationError | None:
    """The error for a first connection that was refused for good; None if another try may have a better end."""
    if not _REFUSED.search(str(lost)):
        return None
    url = config.sqlalchemy_url().render_as_string(hide_password=True)
    if config.url is None and config.engine is None and config.sqlalchemy_url() == type(config)().sqlalchemy_url():
        url = f"{url} (the defaults, since no url was given)"
    return ConfigurationError(f"{url}: {lost}")


class Admission:
    """The conditions of one node's part in its cluster."""

    def __init__(self, config: CoordinationConfig, node_name: str, statements: Statements) -> None:
        self._config = config
        self._node = node_name
        self._sql = statements

    def setup_sql(self) -> str:
        """Statements for each new session."""
        names, config = self._config.names, self._config
        application = ("jobsync " + self._node).encode("ascii", "replace").decode()[:60].replace("'", "''")
        # The server must not drop a half-open connection, and with it the lock, before this node's lease has ended.
        idle = max(1, int(config.heartbeat_timeout_sec))
        return ";".join(
            (
                f"SET application_name = '{application}'",
                "SET standard_conforming_strings = on",
                "SET TimeZone = 'UTC'",
                "SET DateStyle = 'ISO'",
                "SET lock_timeout = '2s'",
                "SET statement_timeout = '60s'",
                # Compiling these statements takes longer than running them.
                "SET jit = off",
                f"SET tcp_keepalives_idle = {idle}",
                "SET tcp_keepalives_interval = 5",
                "SET tcp_keepalives_count = 3",
                f"SET tcp_user_timeout = {idle * 1000}",
                "SET default_transaction_isolation = 'read committed'",
                f"LISTEN {names.cluster_channel}",
                f"LISTEN {names.node_channel(self._node)}",
            )
        )

    def check(self, session: Session, timeout: float) -> None:
        """Refuse what cannot work.

        Raises
        ------
        PooledConnection
            The session goes through a pooler.
        SchemaNotReady
            The tables are missing, empty or of another protocol.
        ClusterMismatch
            This node would hash tasks to other tokens than the rest.
        """
        if session.pooled:
            raise PooledConnection(
                "the coordination connection goes through a connection pooler, which cannot keep its advisory lock "
                "and notifications: give CoordinationConfig a url (or engine) that reaches PostgreSQL directly; the "
                "application's own sessions may keep using the pooler"
            )
        try:
            rows = session.execute(self._sql.cluster, timeout=timeout)
        except StatementFailed as failed:
            if failed.sqlstate == UNDEFINED_COLUMN:
                raise SchemaNotReady(
                    f"the tables of appname {self._config.appname!r} are of an older revision: "
                    f"run `{_upgrade(self._config)}`"
                ) from None
            if failed.sqlstate not in MISSING:
                raise
            raise not_ready(self._config) from None
        check_settings(self._config, rows[0][:3] if rows else None)


def _upgrade(config: CoordinationConfig) -> str:
    command = f"jobsync-orm db upgrade --appname {config.appname}"
    if config.schema is not None:
        command = f"{command} --schema {config.schema!r}"
    return f"{command} --url postgresql+psycopg://USER@HOST/DATABASE"


def not_ready(config: CoordinationConfig) -> SchemaNotReady:
    """The error for missing tables."""
    return SchemaNotReady(
        f"the tables of appname {config.appname!r} are not there, or older than this version: run "
        f"`{_upgrade(config)}`, call "
        "jobsync_orm.migrate.upgrade(), or give CoordinationConfig(create_tables=True)"
    )


def check_settings(config: CoordinationConfig, row: Sequence[object] | None) -> None:
    """Compare ``config`` with the cluster's row.

    Parameters
    ----------
    config : CoordinationConfig
        What this node was told.
    row : sequence, optional
        ``total_tokens, hash_function, protocol_version``; None if there is no row.

    Raises
    ------
    SchemaNotReady, ClusterMismatch
        As :meth:`Admission.check`.
    """
    if row is None:
        raise SchemaNotReady(f"the cluster table of appname {config.appname!r} is empty: run `{_upgrade(config)}`")
    total_tokens, hash_function, protocol = map(str, row)
    for name, mine, theirs in (
        ("total_tokens", str(config.total_tokens), total_tokens),
        ("hash_function", config.hash_function, hash_function),
    ):
        if mine != theirs:
            raise ClusterMismatch(
                f"{name} is {mine} in this node's configuration and {theirs} in the cluster {config.appname!r}: tasks "
                f"would have two owners or none; give every node {name}={theirs}"
            )
    if protocol != str(PROTOCOL_VERSION):
        raise SchemaNotReady(
            f"the cluster speaks protocol {protocol}, this library {PROTOCOL_VERSION}: run `{_upgrade(config)}` "
            "and the same release of jobsync_orm on every node"
        )
