"""The demo's tables: one row for each source file, and one for each commit that came too late."""

from __future__ import annotations

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from jobsync_orm.orm import TokenOwned

__all__ = ["SCHEMA", "Base", "RefusedCommit", "SourceFile"]

# Everything the demo makes, the library's tables included, is in this schema.
SCHEMA = "jobsync_demo"


class Base(DeclarativeBase):
    """Base of the demo's models."""


class SourceFile(TokenOwned, Base):
    """A source file, and its counts once a worker has stored them."""

    __tablename__ = "source_file"
    __table_args__ = {"schema": SCHEMA}  # noqa: RUF012
    __token_key__ = "path"
    __token_schema__ = SCHEMA

    path: Mapped[str] = mapped_column(primary_key=True)
    lines: Mapped[int | None]
    functions: Mapped[int | None]
    classes: Mapped[int | None]
    error: Mapped[str | None]
    done_by: Mapped[str | None]
    # Raised by each store, whoever makes it: a file that was done twice shows.
    times_done: Mapped[int] = mapped_column(default=0)


class RefusedCommit(Base):
    """A commit that came too late: the file had another owner by then."""

    __tablename__ = "refused_commit"
    __table_args__ = {"schema": SCHEMA}  # noqa: RUF012

    id: Mapped[int] = mapped_column(primary_key=True)
    path: Mapped[str]
    worker: Mapped[str]
    owner: Mapped[str | None]
