"""What the fence adds to a commit: single-row inserts through the ORM, one for each transaction, by eight clients.

Each client is a process with one connection. All of them insert for a while in each of these ways in turn, in an order
that is turned round from one round to the next:

    plain      a Session
    fenced     an OwnedSession: the tokens are checked and held at COMMIT
    trigger    an OwnedSession on a table that has the ownership fence in the database as well

The rates are those of all clients together. One worker, which owns every token, runs beside them.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import time
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Any

from sqlalchemy import create_engine, make_url
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from benchmarks.coordination.cluster import Cluster
from benchmarks.coordination.scenario import Scenario
from jobsync_orm.coordinator.view import View
from jobsync_orm.migrate.fence import create_ownership_fence
from jobsync_orm.naming import Names
from jobsync_orm.observe import Audience
from jobsync_orm.orm import OwnedSession, TokenOwned

WAYS = ("plain", "fenced", "trigger")
WARM_UP = 20


class Base(DeclarativeBase):
    pass


class Row:
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str]
    note: Mapped[str]


class Item(TokenOwned, Row, Base):
    __tablename__ = "item"
    __token_key__ = "key"


class Guarded(TokenOwned, Row, Base):
    __tablename__ = "guarded"
    __token_key__ = "key"


@dataclass(frozen=True)
class Holder:
    """What a fenced session asks of a job: the job itself runs in the process that started the clients."""

    node_name: str
    total_tokens: int
    owned: bytes
    epoch: int
    names: Names = Names()  # noqa: RUF009
    hash_function: str = "double_sha256"
    audience: Audience = Audience()  # noqa: RUF009

    def held_view(self) -> View:
        return View(self.owned, self.epoch, float("inf"))


def client(number: int, dsn: str, holder: Holder, rounds: int, seconds: float, together: Barrier, rates: Any) -> None:
    engine = create_engine(make_url(dsn).set(drivername="postgresql+psycopg"), pool_size=1, max_overflow=0)
    plain = sessionmaker(engine)
    owned = sessionmaker(engine, class_=OwnedSession, job=holder)
    factories: dict[str, tuple[sessionmaker[Session], type[Item] | type[Guarded]]] = {
        "plain": (plain, Item),
        "fenced": (owned, Item),  # type: ignore[dict-item]
        "trigger": (owned, Guarded),  # type: ignore[dict-item]
    }
    key = itertools.count(number * 10**9)

    def commit(way: str) -> None:
        factory, model = factories[way]
        with factory() as session:
            session.add(model(key=f"key-{next(key)}", note="note"))
            session.commit()

    for way in WAYS:
        for _ in range(WARM_UP):
            commit(way)
    for turn in range(rounds):
        for way in WAYS if turn % 2 == 0 else reversed(WAYS):
            together.wait()
            start, done = time.perf_counter(), 0
            while (taken := time.perf_counter() - start) < seconds:
                commit(way)
                done += 1
            rates.put((turn, way, done / taken))
    engine.dispose()


def run(scenario: Scenario, cluster: Cluster, arguments: argparse.Namespace) -> None:
    engine = create_engine(make_url(cluster.dsn).set(drivername="postgresql+psycopg"))
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        create_ownership_fence(connection, "guarded")
    engine.dispose()
    spawn = multiprocessing.get_context("spawn")
    together, rates = spawn.Barrier(arguments.clients), spawn.Queue()
    with scenario.adapter.make_job(cluster.dsn, "a", cluster.options["settings"]) as job:
        cluster.require(lambda: len(job.my_tokens) == cluster.tokens, 60, "the worker does not own everything")
        view = job.held_view()
        holder = Holder("a", cluster.tokens, view.owned, view.epoch)
        options = (cluster.dsn, holder, arguments.rounds, arguments.seconds, together, rates)
        clients = [spawn.Process(target=client, args=(number, *options)) for number in range(arguments.clients)]
        for process in clients:
            process.start()
        found = [rates.get(timeout=300) for _ in range(arguments.clients * arguments.rounds * len(WAYS))]
        for process in clients:
            process.join()
    total = {
        way: [sum(rate for at, how, rate in found if (at, how) == (turn, way)) for turn in range(arguments.rounds)]
        for way in WAYS
    }
    # Of two ways in one round, which the machine's moods hit alike, rather than of the medians.
    cost = {
        way: statistics.median((1 - rate / plain) * 100 for rate, plain in zip(total[way], total["plain"], strict=True))
        for way in WAYS[1:]
    }
    scenario.record(
        clients=arguments.clients,
        rounds=arguments.rounds,
        seconds=arguments.seconds,
        commits_per_s={way: round(statistics.median(values)) for way, values in total.items()},
        fenced_cost_percent=round(cost["fenced"], 1),
        trigger_cost_percent=round(cost["trigger"], 1),
    )


def main() -> None:
    scenario = Scenario("fence", __doc__)
    scenario.parser.add_argument("--clients", type=int, default=8)
    scenario.parser.add_argument("--rounds", type=int, default=6)
    scenario.parser.add_argument("--seconds", type=float, default=2)
    arguments = scenario.parse()
    if arguments.library != "ours":
        raise SystemExit("the original has no fence")
    with Cluster(scenario.adapter) as cluster:
        run(scenario, cluster, arguments)


if __name__ == "__main__":
    main()
