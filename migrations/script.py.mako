"""${message}

Revision ID: ${up_revision}
Revises: ${down_revision | comma,n}
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
from jobsync_orm.naming import Names

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


# Autogenerate writes the names of the cluster it ran on: replace them with names.bare(...) and schema=names.schema.
def upgrade(names: Names, total_tokens: int, hash_function: str) -> None:
    ${upgrades if upgrades else "pass"}


def downgrade(names: Names, total_tokens: int, hash_function: str) -> None:
    ${downgrades if downgrades else "pass"}
