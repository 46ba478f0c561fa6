"""The tables, the token function, the cluster's row and its tokens.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from jobsync_orm.hashing import token_function_ddl
from jobsync_orm.naming import Names

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

PROTOCOL_VERSION = 1


def column(name: str, type_: sa.types.TypeEngine, default: str | None = None) -> sa.Column:
    # An integer primary key would be a SERIAL otherwise.
    return sa.Column(name, type_, nullable=False, server_default=default and sa.text(default), autoincrement=False)


def numbered(name: str) -> sa.Column:
    return sa.Column(name, sa.BigInteger(), sa.Identity(), nullable=False)


def optional(name: str, type_: sa.types.TypeEngine) -> sa.Column:
    return sa.Column(name, type_, nullable=True)


def upgrade(names: Names, total_tokens: int, hash_function: str) -> None:
    timestamp = sa.DateTime(timezone=True)
    bigint, integer, text, uuid = sa.BigInteger(), sa.Integer(), sa.Text(), sa.Uuid()

    def table(kind: str, *parts: sa.schema.SchemaItem, key: str) -> sa.Table:
        name = names.bare(kind)
        primary_key = sa.PrimaryKeyConstraint(key, name=f"{name}_pkey")
        return op.create_table(name, *parts, primary_key, schema=names.schema)

    def index(kind: str, *columns: str) -> None:
        name = names.bare(kind)
        op.create_index(f"{name}_{'_'.join(columns)}_idx", name, list(columns), schema=names.schema)

    execute(token_function_ddl(names.sql("token_of"), total_tokens, hash_function))

    cluster = table(
        "cluster",
        column("id", integer),
        column("total_tokens", integer),
        column("hash_function", text),
        column("epoch", bigint, default="0"),
        column("revision", bigint, default="0"),
        column("pins_revision", bigint, default="0"),
        column("incarnation", uuid),
        column("protocol_version", integer),
        sa.CheckConstraint("id = 1", name=f"{names.bare('cluster')}_id_check"),
        key="id",
    )
    table(
        "node",
        column("name", text),
        numbered("ordinal"),
        column("incarnation", uuid),
        column("registered_at", timestamp, default="now()"),
        column("join_epoch", bigint, default="0"),
        column("last_heartbeat", timestamp, default="now()"),
        column("applied_epoch", bigint, default="0"),
        column("state", text, default="'joining'"),
        column("weight", integer, default="1"),
        column("can_lead", sa.Boolean(), default="true"),
        column("heartbeat_timeout_sec", sa.Double(53), default="15"),
        column("connection_grace_sec", sa.Double(53), default="0.5"),
        column("rejoin_grace_sec", sa.Double(53), default="0"),
        column("labels", JSONB(), default="'{}'"),
        column("host", text, default="''"),
        column("pid", integer, default="0"),
        optional("backend_pid", integer),
        column("version", text, default="''"),
        sa.CheckConstraint("state IN ('joining', 'active', 'away')", name=f"{names.bare('node')}_state_check"),
        sa.UniqueConstraint("ordinal", name=f"{names.bare('node')}_ordinal_key"),
        key="name",
    )
    table(
        "token",
        column("token_id", integer),
        optional("node", text),
        column("epoch", bigint, default="0"),
        column("assigned_at", timestamp, default="now()"),
        optional("next_node", text),
        optional("next_epoch", bigint),
        optional("drain_deadline", timestamp),
        key="token_id",
    )
    # Room on each page for the new version of a row, so that a moving token touches no index.
    execute(f"ALTER TABLE {names.sql('token')} SET (fillfactor = 70)")
    table(
        "lock",
        column("task_id", text),
        column("token_id", integer),
        column("node_patterns", JSONB()),
        optional("reason", text),
        column("created_at", timestamp, default="now()"),
        column("created_by", text),
        optional("expires_at", timestamp),
        column("ephemeral", sa.Boolean(), default="false"),
        key="task_id",
    )
    index("lock", "token_id")
    table(
        "claim",
        column("task_id", text),
        column("token_id", integer),
        column("node", text),
        column("incarnation", uuid),
        column("epoch", bigint),
        column("claimed_at", timestamp, default="now()"),
        key="task_id",
    )
    index("claim", "token_id")
    index("claim", "node")
    table(
        "checkpoint",
        column("task_id", text),
        column("epoch", bigint),
        column("position", JSONB()),
        column("updated_at", timestamp, default="now()"),
        key="task_id",
    )
    table(
        "audit",
        numbered("id"),
        column("date", sa.Date(), default="CURRENT_DATE"),
        column("node", text),
        optional("task_id", text),
        optional("token_id", integer),
        optional("epoch", bigint),
        column("created_on", timestamp, default="now()"),
        key="id",
    )
    index("audit", "date", "node")
    table(
        "rebalance",
        numbered("id"),
        column("triggered_at", timestamp, default="now()"),
        column("trigger_reason", text),
        column("leader_node", text),
        column("nodes_before", integer),
        column("nodes_after", integer),
        column("tokens_moved", integer),
        column("duration_ms", integer),
        column("epoch", bigint),
        key="id",
    )

    # gen_random_uuid() came with PostgreSQL 13, and md5() is forbidden on some servers.
    random = "CAST(random() || ' ' || clock_timestamp() || ' ' || pg_backend_pid() AS bytea)"
    incarnation = f"CAST(substr(encode(sha256({random}), 'hex'), 1, 32) AS uuid)"
    op.execute(
        sa.insert(cluster).values(
            id=1,
            total_tokens=total_tokens,
            hash_function=hash_function,
            incarnation=sa.text(incarnation),
            protocol_version=PROTOCOL_VERSION,
        )
    )
    execute(f"INSERT INTO {names.sql('token')} (token_id) SELECT generate_series(0, {total_tokens - 1})")


def downgrade(names: Names, total_tokens: int, hash_function: str) -> None:
    for kind in ("rebalance", "audit", "checkpoint", "claim", "lock", "token", "node", "cluster"):
        op.drop_table(names.bare(kind), schema=names.schema)
    execute(f"DROP FUNCTION {names.sql('token_of')}(text)")


def execute(sql: str) -> None:
    """Run SQL that holds quoted names; a colon in one is no bind parameter."""
    op.execute(sa.text(sql.replace(":", r"\:")))
