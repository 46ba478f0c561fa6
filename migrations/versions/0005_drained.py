"""Which nodes are drained, and which life of a node an operator has ended.

Both are read by workers of this release only: those of the one before give a drained node tokens if they lead, and go
on with a heartbeat that is no longer wanted. A new column with a constant default is an entry in the catalogue; no row
is read or written.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from jobsync_orm.naming import Names

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade(names: Names, total_tokens: int, hash_function: str) -> None:
    drained = sa.Column("drained", JSONB(), nullable=False, server_default=sa.text("'{}'"))
    op.add_column(names.bare("cluster"), drained, schema=names.schema)
    expelled = sa.Column("expelled", sa.Boolean(), nullable=False, server_default=sa.text("false"))
    op.add_column(names.bare("node"), expelled, schema=names.schema)


def downgrade(names: Names, total_tokens: int, hash_function: str) -> None:
    op.drop_column(names.bare("node"), "expelled", schema=names.schema)
    op.drop_column(names.bare("cluster"), "drained", schema=names.schema)
