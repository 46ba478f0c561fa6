"""Fencing numbers of claims, the database's history, and the function that holds tokens until a commit.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from jobsync_orm.naming import EPOCH_SETTING, NODE_SETTING, NOT_HELD, Names

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# The commit fence. A function, because its plans are kept, while the message it comes in cannot be prepared. A few
# tokens are locked one by one, in the order they come in, which is cheaper than a set; the caller sorts them.
HOLD = """
CREATE FUNCTION {hold}(tokens int[], me text, known bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    number int;
BEGIN
    PERFORM pg_catalog.set_config('{node_setting}', me, true),
        pg_catalog.set_config('{epoch_setting}', known::text, true);
    IF pg_catalog.cardinality(tokens) <= 8 THEN
        FOREACH number IN ARRAY tokens LOOP
            PERFORM 1 FROM {token} t WHERE t.token_id = number AND t.node = me AND t.epoch <= known FOR SHARE;
            IF NOT FOUND THEN
                RAISE EXCEPTION 'a token is not held' USING ERRCODE = '{not_held}';
            END IF;
        END LOOP;
    ELSE
        PERFORM 1 FROM {token} t WHERE t.token_id = ANY (tokens) AND t.node = me AND t.epoch <= known
            ORDER BY t.token_id FOR SHARE;
        GET DIAGNOSTICS number = ROW_COUNT;
        IF number < pg_catalog.cardinality(tokens) THEN
            RAISE EXCEPTION 'a token is not held' USING ERRCODE = '{not_held}';
        END IF;
    END IF;
END
$$"""


def upgrade(names: Names, total_tokens: int, hash_function: str) -> None:
    def add(kind: str, name: str, type_: sa.types.TypeEngine, *parts: sa.schema.SchemaItem, nullable: bool) -> None:
        op.add_column(names.bare(kind), sa.Column(name, type_, *parts, nullable=nullable), schema=names.schema)

    add("claim", "fence", sa.BigInteger(), sa.Identity(), nullable=False)
    add("cluster", "history", sa.Text(), nullable=True)
    add("cluster", "rest_until", sa.DateTime(timezone=True), nullable=True)
    hold = HOLD.format(
        hold=names.sql("hold"),
        token=names.sql("token"),
        node_setting=NODE_SETTING,
        epoch_setting=EPOCH_SETTING,
        not_held=NOT_HELD,
    )
    execute(hold)


def downgrade(names: Names, total_tokens: int, hash_function: str) -> None:
    execute(f"DROP FUNCTION {names.sql('hold')}(int[], text, bigint)")
    op.drop_column(names.bare("cluster"), "rest_until", schema=names.schema)
    op.drop_column(names.bare("cluster"), "history", schema=names.schema)
    op.drop_column(names.bare("claim"), "fence", schema=names.schema)


def execute(sql: str) -> None:
    """Run SQL that holds quoted names; a colon in one is no bind parameter."""
    op.execute(sa.text(sql.replace(":", r"\:")))
