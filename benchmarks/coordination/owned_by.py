"""What ``owned_by`` adds to a query: the first 100 pending rows of a large table that belong to this worker.

A table of many rows, a tenth of them pending, with the two partial indexes the documentation asks for; two workers, so
that this one owns half of the tokens. The same 100 rows are fetched over one connection, in turn, as

    psycopg        the SQL text as it is, through the driver's cursor
    core           the SQL text as it is, through SQLAlchemy's exec_driver_sql
    raw columns    session.execute(text(...)): rows, from the SQL text as it is
    columns        session.execute(select(Item.id, ...).where(Item.owned_by(job)))
    entities       session.scalars(select(Item).where(Item.owned_by(job)))
    query          session.query(Item).owned_by(job)
    raw entities   session.scalars(select(Item).from_statement(text(...))): objects, from the SQL text as it is
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import Index, create_engine, select, text
from sqlalchemy.engine import Connection, make_url
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from benchmarks.coordination.cluster import Cluster
from benchmarks.coordination.scenario import Scenario
from jobsync_orm import Job
from jobsync_orm.orm import OwnedQuerySession, TokenOwned

WANTED = 100


class Base(DeclarativeBase):
    pass


class Item(TokenOwned, Base):
    __tablename__ = "item"
    __token_key__ = "id"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    pending: Mapped[bool]
    created_at: Mapped[datetime.datetime]


PENDING = text("pending")
Index("item_pending_order", Item.created_at, Item.token_id, postgresql_where=PENDING)
Index("item_pending_token", Item.token_id, Item.created_at, postgresql_where=PENDING)

# What the ORM asks for, written by hand. The limit is a parameter here too, because that decides how often the server
# plans the statement anew.
RAW = (
    "SELECT id, name, pending, created_at, token_id FROM item WHERE pending AND token_id IN"
    " (SELECT token_id FROM sync_token WHERE node = %(node)s AND next_node IS NULL)"
    " ORDER BY created_at LIMIT %(wanted)s"
)


def fill(connection: Connection, rows: int) -> None:
    connection.execute(
        text(
            "INSERT INTO item (id, name, pending, created_at)"
            " SELECT i, 'item ' || i, i % 10 = 0, timestamp '2025-01-01' + i * interval '1 second'"
            " FROM generate_series(1, :rows) AS i"
        ),
        {"rows": rows},
    )


def ways(connection: Connection, session: OwnedQuerySession, job: Job) -> dict[str, Callable[[], list[Any]]]:
    values = {"node": job.node_name, "wanted": WANTED}
    cursor: Any = connection.connection.cursor()
    columns = (Item.id, Item.name, Item.pending, Item.created_at, Item.token_id)
    raw = text(RAW.replace("%(node)s", ":node").replace("%(wanted)s", ":wanted"))

    def owned(*what: Any) -> Any:
        return select(*what).where(Item.pending, Item.owned_by(job)).order_by(Item.created_at).limit(WANTED)

    def query() -> list[Any]:
        found = session.query(Item).owned_by(job).filter(Item.pending)
        return found.order_by(Item.created_at).limit(WANTED).all()

    return {
        "psycopg": lambda: cursor.execute(RAW, values).fetchall(),
        "core": lambda: list(connection.exec_driver_sql(RAW, values).all()),
        "raw columns": lambda: list(session.execute(raw, values).all()),
        "columns": lambda: list(session.execute(owned(*columns)).all()),
        "raw entities": lambda: list(session.scalars(select(Item).from_statement(raw), values).all()),
        "entities": lambda: list(session.scalars(owned(Item)).all()),
        "query": query,
    }


def measure(connection: Connection, job: Job, times: int) -> dict[str, float]:
    """Median milliseconds of each way; all in turn, so that a busy moment hits them alike."""
    taken: dict[str, list[float]] = {}
    with OwnedQuerySession(bind=connection) as session:
        choices = ways(connection, session, job)
        ids = {name: [getattr(row, "id", None) or row[0] for row in call()] for name, call in choices.items()}
        if any(found != ids["psycopg"] or len(found) != WANTED for found in ids.values()):
            raise SystemExit("the ways do not fetch the same rows")
        for _ in range(times):
            for name, call in choices.items():
                session.expunge_all()
                start = time.perf_counter()
                call()
                taken.setdefault(name, []).append((time.perf_counter() - start) * 1000)
    return {name: round(statistics.median(values), 3) for name, values in taken.items()}


def run(scenario: Scenario, cluster: Cluster, arguments: argparse.Namespace) -> None:
    engine = create_engine(make_url(cluster.dsn).set(drivername="postgresql+psycopg"))
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        fill(connection, arguments.rows)
    other = cluster.add("b")
    cluster.require(lambda: other.first("ready"), 30, "the other worker is not ready")
    with scenario.adapter.make_job(cluster.dsn, "a", cluster.options["settings"]) as job:
        cluster.require(lambda: len(job.my_tokens) == cluster.tokens // 2, 60, "the two have not shared the tokens")
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM ANALYZE item"))
            connection.execute(text("VACUUM ANALYZE sync_token"))
        with engine.connect() as connection:
            medians = measure(connection, job, arguments.times)
    engine.dispose()
    scenario.record(
        rows=arguments.rows,
        pending=arguments.rows // 10,
        owned_tokens=cluster.tokens // 2,
        times=arguments.times,
        median_ms=medians,
        columns_to_raw_columns=round(medians["columns"] / medians["raw columns"], 2),
        columns_to_core=round(medians["columns"] / medians["core"], 2),
        columns_to_psycopg=round(medians["columns"] / medians["psycopg"], 2),
        entities_to_core=round(medians["entities"] / medians["core"], 2),
        entities_to_psycopg=round(medians["entities"] / medians["psycopg"], 2),
        entities_to_raw_entities=round(medians["entities"] / medians["raw entities"], 2),
        query_to_raw_entities=round(medians["query"] / medians["raw entities"], 2),
    )


def main() -> None:
    scenario = Scenario("owned_by", __doc__)
    scenario.parser.add_argument("--rows", type=int, default=1_000_000)
    scenario.parser.add_argument("--times", type=int, default=300)
    arguments = scenario.parse()
    if arguments.library != "ours":
        raise SystemExit("the original has no owned_by")
    with Cluster(scenario.adapter) as cluster:
        run(scenario, cluster, arguments)


if __name__ == "__main__":
    main()
