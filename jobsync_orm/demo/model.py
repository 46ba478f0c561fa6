"""The demo's table, one row for each source file, and what is counted of a file."""

from __future__ import annotations

import ast
import sysconfig
import warnings
from pathlib import Path
from typing import NamedTuple

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from jobsync_orm.orm import TokenOwned

__all__ = ["SCHEMA", "Base", "Counts", "SourceFile", "count", "source_files", "standard_library"]

# Everything the demo makes, the library's tables included, is in this schema.
SCHEMA = "jobsync_demo"

_NOT_ITS_OWN = {"site-packages", "dist-packages"}


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


class Counts(NamedTuple):
    """What is known of a file. ``error`` names why it could not be parsed; functions and classes are then 0."""

    lines: int
    functions: int
    classes: int
    error: str | None


def count(source: bytes) -> Counts:
    """Parse a source file and count its lines, functions (methods too) and classes."""
    lines = len(source.splitlines())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        return Counts(lines, 0, 0, type(error).__name__)
    nodes = [type(node) for node in ast.walk(tree)]
    functions = nodes.count(ast.FunctionDef) + nodes.count(ast.AsyncFunctionDef)
    return Counts(lines, functions, nodes.count(ast.ClassDef), None)


def standard_library() -> Path:
    """Folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def source_files(root: Path, limit: int | None = None) -> list[str]:
    """Paths of the source files below ``root``, relative to it, ascending; ``limit`` of them, evenly spread."""
    files = (path.relative_to(root) for path in root.rglob("*.py") if path.is_file())
    paths = sorted(path.as_posix() for path in files if not _NOT_ITS_OWN.intersection(path.parts))
    if limit is None or limit >= len(paths):
        return paths
    return [paths[i * len(paths) // limit] for i in range(limit)]
