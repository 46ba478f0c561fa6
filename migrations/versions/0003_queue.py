"""The job queue.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from jobsync_orm.naming import Names

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

STATES = ("pending", "scheduled", "blocked", "processing", "retrying", "completed", "failed", "cancelled")
LIVE = STATES[:5]
OUTCOMES = ("completed", "failed", "timeout", "cancelled", "snoozed", "discarded", "released", "died")
IN_LINE = "key IS NOT NULL AND (state IN ('pending', 'processing') OR state = 'retrying' AND retry_blocks_key)"


def column(name: str, type_: sa.types.TypeEngine, default: str | None = None) -> sa.Column:
    # An integer primary key would be a SERIAL otherwise.
    return sa.Column(name, type_, nullable=False, server_default=default and sa.text(default), autoincrement=False)


def optional(name: str, type_: sa.types.TypeEngine) -> sa.Column:
    return sa.Column(name, type_, nullable=True)


def in_(name: str, values: tuple[str, ...]) -> str:
    return f"{name} IN ({', '.join(map(repr, values))})"


def upgrade(names: Names, total_tokens: int, hash_function: str) -> None:
    timestamp, name = sa.DateTime(timezone=True), sa.Text(collation="C")
    bigint, integer, text, uuid = sa.BigInteger(), sa.Integer(), sa.Text(), sa.Uuid()

    def table(kind: str, *parts: sa.schema.SchemaItem, key: tuple[str, ...]) -> None:
        primary_key = sa.PrimaryKeyConstraint(*key, name=f"{names.bare(kind)}_pkey")
        op.create_table(names.bare(kind), *parts, primary_key, schema=names.schema)

    def check(kind: str, about: str, condition: str) -> sa.CheckConstraint:
        return sa.CheckConstraint(condition, name=f"{names.bare(kind)}_{about}_check")

    def index(
        kind: str,
        about: str,
        *columns: str,
        where: str | None = None,
        unique: bool = False,
        using: str = "btree",
        options: dict[str, str] | None = None,
    ) -> None:
        op.create_index(
            f"{names.bare(kind)}_{about}_idx",
            names.bare(kind),
            list(columns),
            schema=names.schema,
            unique=unique,
            postgresql_where=None if where is None else sa.text(where),
            postgresql_using=using,
            postgresql_with=options or {},
        )

    table(
        "job",
        sa.Column("id", bigint, sa.Identity(), nullable=False),
        column("type", name),
        column("state", text, default="'pending'"),
        column("priority", integer, default="0"),
        optional("key", name),
        optional("token_id", integer),
        optional("idempotency_key", name),
        column("payload", JSONB(), default="'{}'"),
        optional("result", JSONB()),
        column("created_at", timestamp, default="clock_timestamp()"),
        column("ready_at", timestamp, default="clock_timestamp()"),
        optional("run_at", timestamp),
        optional("started_at", timestamp),
        optional("finished_at", timestamp),
        column("attempt", integer, default="0"),
        column("failures", integer, default="0"),
        column("max_retries", integer, default="3"),
        column("timeout", sa.Double(53), default="3600"),
        optional("deadline", timestamp),
        optional("worker", text),
        optional("incarnation", uuid),
        column("retry_blocks_key", sa.Boolean(), default="true"),
        column("cancel_requested", sa.Boolean(), default="false"),
        optional("error", text),
        check("job", "state", in_("state", STATES)),
        check("job", "token_id", "(key IS NULL) = (token_id IS NULL)"),
        check("job", "deadline", "(state = 'processing') = (deadline IS NOT NULL)"),
        key=("id",),
    )
    index("job", "ready", "type", "priority", "ready_at", "id", where="state = 'pending' AND key IS NULL")
    index("job", "keyed", "priority", "ready_at", "id", where="state = 'pending' AND key IS NOT NULL")
    index("job", "line", "key", "id", where=IN_LINE)
    index("job", "one_per_key", "key", where="state = 'processing' AND key IS NOT NULL", unique=True)
    index("job", "processing", "incarnation", where="state = 'processing'")
    index("job", "due", "run_at", where="state IN ('scheduled', 'retrying')")
    index("job", "blocked", "id", where="state = 'blocked'")
    live = f"idempotency_key IS NOT NULL AND {in_('state', LIVE)}"
    index("job", "idempotency", "type", "idempotency_key", where=live, unique=True)
    # A queue's rows change several times and die soon: keep the dead ones few whatever the table's size.
    execute(
        f"ALTER TABLE {names.sql('job')} SET (autovacuum_vacuum_scale_factor = 0.01,"
        " autovacuum_vacuum_threshold = 5000, autovacuum_analyze_scale_factor = 0.05)"
    )
    table(
        "job_attempt",
        column("job_id", bigint),
        column("attempt", integer),
        optional("worker", text),
        column("started_at", timestamp),
        column("ended_at", timestamp, default="clock_timestamp()"),
        column("outcome", text),
        optional("error", text),
        optional("traceback", text),
        check("job_attempt", "outcome", in_("outcome", OUTCOMES)),
        key=("job_id", "attempt"),
    )
    index("job_attempt", "ended_at", "ended_at", using="brin", options={"autosummarize": "on"})
    table("job_dependency", column("after_id", bigint), column("job_id", bigint), key=("after_id", "job_id"))
    index("job_dependency", "job_id", "job_id")
    table(
        "job_pause",
        column("type", name),
        column("since", timestamp, default="clock_timestamp()"),
        optional("reason", text),
        key=("type",),
    )
    table(
        "job_schedule",
        column("name", name),
        column("type", name),
        column("cron", text),
        column("timezone", text),
        column("fired_until", timestamp),
        optional("last_job_id", bigint),
        key=("name",),
    )
    table(
        "job_worker",
        column("node", text),
        column("incarnation", uuid),
        column("types", ARRAY(sa.Text())),
        column("concurrency", integer),
        column("running", integer, default="0"),
        column("completed", bigint, default="0"),
        column("failed", bigint, default="0"),
        column("started_at", timestamp, default="clock_timestamp()"),
        column("seen_at", timestamp, default="clock_timestamp()"),
        optional("claimed_at", timestamp),
        key=("node",),
    )


def downgrade(names: Names, total_tokens: int, hash_function: str) -> None:
    for kind in ("job_worker", "job_schedule", "job_pause", "job_dependency", "job_attempt", "job"):
        op.drop_table(names.bare(kind), schema=names.schema)


def execute(sql: str) -> None:
    """Run SQL that holds quoted names; a colon in one is no bind parameter."""
    op.execute(sa.text(sql.replace(":", r"\:")))
