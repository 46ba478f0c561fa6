"""Whether a job's max_retries and timeout were said when it was enqueued. Else the handler of its worker decides.

Both are true of every row that is there, and of every one that a version before this writes: its values hold as they
did. A new column with a constant default is an entry in the catalogue; no row is read or written.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from jobsync_orm.naming import Names

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

COLUMNS = ("max_retries_given", "timeout_given")


def upgrade(names: Names, total_tokens: int, hash_function: str) -> None:
    for name in COLUMNS:
        column = sa.Column(name, sa.Boolean(), nullable=False, server_default=sa.text("true"))
        op.add_column(names.bare("job"), column, schema=names.schema)


def downgrade(names: Names, total_tokens: int, hash_function: str) -> None:
    # What the handler said is in max_retries and timeout: for the version before, it is the job's own.
    for name in reversed(COLUMNS):
        op.drop_column(names.bare("job"), name, schema=names.schema)
