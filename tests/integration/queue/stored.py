"""For tests of the queue: what is stored."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, text


def jobs(engine: Engine, columns: str = "id") -> list[Any]:
    """These columns of all jobs, by id: values if it is one column, else tuples."""
    with engine.connect() as connection:
        rows = [tuple(row) for row in connection.execute(text(f"SELECT {columns} FROM sync_job ORDER BY id"))]
    return [row[0] for row in rows] if rows and len(rows[0]) == 1 else rows


def finish(engine: Engine, id: int, state: str = "completed") -> None:
    """What a worker does in the end."""
    run(engine, f"UPDATE sync_job SET state = '{state}', finished_at = now(), deadline = NULL WHERE id = :id", id=id)


def run(engine: Engine, sql: str, **values: object) -> None:
    with engine.begin() as connection:
        connection.execute(text(sql), values)
