"""Fencing numbers of claims, and which history of the database the cluster was formed in.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from jobsync_orm.naming import Names

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade(names: Names, total_tokens: int, hash_function: str) -> None:
    def add(kind: str, name: str, type_: sa.types.TypeEngine, *parts: sa.schema.SchemaItem, nullable: bool) -> None:
        op.add_column(names.bare(kind), sa.Column(name, type_, *parts, nullable=nullable), schema=names.schema)

    add("claim", "fence", sa.BigInteger(), sa.Identity(), nullable=False)
    add("cluster", "history", sa.Text(), nullable=True)
    add("cluster", "rest_until", sa.DateTime(timezone=True), nullable=True)


def downgrade(names: Names, total_tokens: int, hash_function: str) -> None:
    op.drop_column(names.bare("cluster"), "rest_until", schema=names.schema)
    op.drop_column(names.bare("cluster"), "history", schema=names.schema)
    op.drop_column(names.bare("claim"), "fence", schema=names.schema)
