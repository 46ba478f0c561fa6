"""The trace of a job: what was being done when it was enqueued, for the spans of those who run it.

NULL for every row that is there, and for every one that a version before this writes; workers of that version do not
read it. A new column without a default is an entry in the catalogue; no row is read or written.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from jobsync_orm.naming import Names

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade(names: Names, total_tokens: int, hash_function: str) -> None:
    op.add_column(names.bare("job"), sa.Column("trace", sa.Text()), schema=names.schema)


def downgrade(names: Names, total_tokens: int, hash_function: str) -> None:
    op.drop_column(names.bare("job"), "trace", schema=names.schema)
