"""The programs of the guide in processes of their own, which are killed and paused."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, Engine, create_engine, text
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from jobsync_orm import Job, migrate
from tests.docs.test_code_blocks import ROOT, blocks
from tests.integration.cluster import QUICK, wait_for

# The page's program as it stands, with timeouts for a test, and work that takes some time, so that it is met in it.
START = """
import sys, time
from dataclasses import replace
import program
program.config = replace(program.config, **{quick!r})
{slower}
program.main()
"""
SLOWER = """
work = program.{name}
def slower(*arguments):
    time.sleep(0.005)
    return work(*arguments)
program.{name} = slower
"""


class Program:
    """Workers that run the first block of a page."""

    def __init__(self, page: str, url: URL, folder: Path, slower: str | None) -> None:
        code = next(block.text for block in blocks(ROOT / "docs" / "guide" / page) if block.language == "python")
        folder.joinpath("program.py").write_text(code.replace("session_timeout=15000", "session_timeout=3000"))
        self.start = START.format(quick=QUICK, slower=SLOWER.format(name=slower) if slower else "")
        self.folder = folder
        self.environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
            "JOBSYNC_DATABASE_URL": url.render_as_string(hide_password=False),
        }
        self.workers: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, name: str, **environment: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.workers[name] = subprocess.Popen(
                [sys.executable, "-c", self.start, name],
                cwd=self.folder,
                env={**self.environment, **environment},
                stdout=log,
                stderr=log,
            )

    def signal(self, name: str, number: int) -> None:
        self.workers[name].send_signal(number)

    def make_tables(self, engine: Engine) -> None:
        migrate.upgrade(engine)
        subprocess.run(
            [
                sys.executable,
                "-c",
                "import program, sqlalchemy; "
                "program.Base.metadata.create_all(sqlalchemy.create_engine(program.config.sqlalchemy_url()))",
            ],
            cwd=self.folder,
            env=self.environment,
            check=True,
        )

    def said(self) -> str:
        return "\n".join(f"{log.name}:\n{log.read_text()}" for log in sorted(self.folder.glob("*.log")))

    def end(self) -> None:
        for worker in self.workers.values():
            worker.kill()
            worker.wait()


@contextmanager
def running(page: str, url: URL, folder: Path, slower: str | None = None) -> Iterator[Any]:
    program, engine = Program(page, url, folder, slower), create_engine(url)
    try:
        program.make_tables(engine)
        yield program, engine
    except AssertionError as error:
        error.add_note(program.said())
        raise
    finally:
        program.end()
        engine.dispose()


def rows(engine: Engine, sql: str) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(text(sql)))


def scalar(engine: Engine, sql: str) -> Any:
    return rows(engine, sql)[0][0]


@pytest.mark.slow
def test_a_batch_worker_is_killed_and_another_is_paused(empty_database: URL, tmp_path: Path) -> None:
    with running("batch.md", empty_database, tmp_path, "post") as (program, engine):

        def add(many: int) -> None:
            with engine.begin() as connection:
                connection.execute(
                    text(
                        "INSERT INTO invoice (customer, net, state, failures) "
                        "SELECT n % 400, 1, 'open', 0 FROM generate_series(1, :many) n"
                    ),
                    {"many": many},
                )

        def posted_by(worker: str) -> int:
            return int(scalar(engine, f"SELECT count(*) FROM posting WHERE worker = '{worker}'"))

        def work_for(worker: str) -> Callable[[], bool]:
            """Whether this worker has posted more than now; there is work until it has, however late it begins."""
            before = posted_by(worker)

            def goes_on() -> bool:
                if scalar(engine, "SELECT count(*) FROM invoice WHERE state = 'open'") == 0:
                    add(200)
                return posted_by(worker) > before

            return goes_on

        for name in ("w-1", "w-2", "w-3"):
            program.run(name)
        for name in ("w-1", "w-2", "w-3"):
            wait_for(work_for(name), f"{name} has posted something")
        add(1000)
        program.signal("w-2", signal.SIGKILL)
        program.signal("w-3", signal.SIGSTOP)
        wait_for(lambda: scalar(engine, "SELECT count(*) FROM invoice WHERE state = 'open'") == 0, "w-1 does the rest")
        program.signal("w-3", signal.SIGCONT)
        wait_for(work_for("w-3"), "w-3 goes on with what is its own then")
        wait_for(lambda: scalar(engine, "SELECT count(*) FROM invoice WHERE state = 'open'") == 0, "all are done")
        assert rows(engine, "SELECT invoice_id FROM posting GROUP BY 1 HAVING count(*) > 1") == []
        assert scalar(engine, "SELECT count(*) FROM posting") == scalar(engine, "SELECT count(*) FROM invoice")
        program.signal("w-1", signal.SIGTERM)
        assert program.workers["w-1"].wait(30) == 0


@pytest.mark.slow
def test_consumers_that_are_killed_and_paused(empty_database: URL, tmp_path: Path) -> None:
    topics = tmp_path / "topics"
    topics.mkdir()
    expected: Counter[str] = Counter()

    def produce(many: int) -> bool:
        for partition in range(12):
            lines = ""
            for number in range(many):
                key = f"account-{partition}-{number % 3}"
                expected[key] += number
                lines += json.dumps({"key": key, "value": {"cents": number}}) + "\n"
            with (topics / f"orders-{partition}.jsonl").open("a") as file:
                file.write(lines)
        return False

    produce(50)
    with running("kafka.md", empty_database, tmp_path, "apply") as (program, engine):

        def balances() -> dict[str, int]:
            return dict(rows(engine, "SELECT account, cents FROM balance"))

        def partitions_of() -> dict[str, int]:
            owners = "SELECT t.node, count(*) FROM sync_token t WHERE t.token_id = ANY (ARRAY(SELECT "
            owners += "sync_token_of('orders/' || n) FROM generate_series(0, 11) n)) AND next_node IS NULL GROUP BY 1"
            return dict(rows(engine, owners))

        for name in ("c-1", "c-2", "c-3"):
            program.run(name)
        wait_for(lambda: {"c-1", "c-2", "c-3"} == partitions_of().keys() and balances(), "each has partitions")
        produce(100)
        program.signal("c-2", signal.SIGKILL)
        program.signal("c-3", signal.SIGSTOP)
        wait_for(lambda: partitions_of() == {"c-1": 12}, "c-1 has all")
        produce(20)
        wait_for(lambda: balances() == expected, "c-1 does the rest")
        program.signal("c-3", signal.SIGCONT)
        wait_for(lambda: "c-3" in partitions_of(), "c-3 is back")
        produce(20)
        wait_for(lambda: balances() == expected, "both do what has come since")


class Exchange:
    """Numbered messages of each feed, in a thread with a loop of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.open: list[tuple[str, str]] = []
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self.loop.run_until_complete, args=(self.run(),), daemon=True)
        self.thread.start()
        assert self.ready.wait(30)

    async def run(self) -> None:
        self.over = asyncio.Event()
        async with serve(self.serve, "127.0.0.1", 0, ping_interval=None, close_timeout=0.1) as server:
            self.url = f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            self.ready.set()
            await self.over.wait()

    async def serve(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        url = urllib.parse.urlsplit(connection.request.path)
        worker, feed = url.path[1:].split("/")
        number = int(urllib.parse.parse_qs(url.query)["after"][0])
        self.open.append((feed, worker))
        try:
            with suppress(ConnectionClosed):
                while True:
                    number += 1
                    await connection.send(json.dumps({"number": number, "price": "1"}))
                    await asyncio.sleep(0.05)
        finally:
            self.open.remove((feed, worker))

    def connected(self) -> dict[str, list[str]]:
        """The workers that are connected to each feed, by name; one that is connected twice is named twice."""
        workers: dict[str, list[str]] = {}
        for feed, worker in sorted(self.open):
            workers.setdefault(feed, []).append(worker)
        return workers

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.over.set)
        self.thread.join(30)
        self.loop.close()


@pytest.mark.slow
def test_feeds_of_workers_that_are_killed_and_paused(empty_database: URL, tmp_path: Path) -> None:
    with closing(Exchange()) as exchange, running("websocket.md", empty_database, tmp_path) as (program, engine):
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO feed SELECT 'feed-' || n FROM generate_series(1, 20) n"))
        for name in ("f-1", "f-2", "f-3"):
            program.run(name, EXCHANGE=f"{exchange.url}/{name}")

        def highest() -> dict[str, int]:
            return dict(rows(engine, "SELECT feed, max(number) FROM trade GROUP BY 1"))

        def all_go_on() -> None:
            before = highest()
            wait_for(lambda: all(number > before[feed] for feed, number in highest().items()), "all feeds go on")

        def shared_by(*workers: str) -> dict[str, str]:
            """Who follows each feed, once no token moves any more and the only connections are those of the owners."""
            tokens = dict(rows(engine, "SELECT node, count(*) FROM sync_token WHERE next_node IS NULL GROUP BY 1"))
            settled = tokens.keys() == set(workers) and sum(tokens.values()) == 10_000
            even = settled and max(tokens.values()) - min(tokens.values()) <= 1
            owners = dict(rows(engine, "SELECT task_id, node FROM sync_claim"))
            single = exchange.connected() == {feed: [owner] for feed, owner in owners.items()}
            return owners if even and single and len(owners) == 20 and {*owners.values()} == {*workers} else {}

        owners = wait_for(lambda: shared_by("f-1", "f-2", "f-3"), "each worker is connected to feeds of its own")
        wait_for(lambda: len(highest()) == 20, "all feeds are followed")
        program.signal("f-2", signal.SIGKILL)
        program.signal("f-3", signal.SIGSTOP)
        wait_for(lambda: scalar(engine, "SELECT count(*) FROM sync_claim WHERE node = 'f-1'") == 20, "f-1 has all")
        beside = {feed: ["f-1", "f-3"] if owner == "f-3" else ["f-1"] for feed, owner in owners.items()}
        all_go_on()
        wait_for(lambda: exchange.connected() == beside, "the connections of the paused worker are still open")
        program.signal("f-3", signal.SIGCONT)
        wait_for(lambda: shared_by("f-1", "f-3"), "f-3 is back, and there is one connection for each feed")
        all_go_on()
        wrong = "SELECT feed FROM trade GROUP BY 1 HAVING count(*) <> max(number) OR count(DISTINCT number) <> count(*)"
        assert rows(engine, wrong) == []


def test_a_feed_that_comes_back_while_it_is_being_closed(
    database: URL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is opened again as soon as it is closed, not when the worker looks for new feeds."""
    code = next(block.text for block in blocks(ROOT / "docs" / "guide" / "websocket.md") if block.language == "python")
    monkeypatch.setenv("JOBSYNC_DATABASE_URL", database.render_as_string(hide_password=False))
    tmp_path.joinpath("page_on_feeds.py").write_text(code.replace("timeout(5)", "timeout(600)"))
    monkeypatch.syspath_prepend(tmp_path)
    page = importlib.import_module("page_on_feeds")
    page.config = replace(page.config, **{**QUICK, "drain_timeout_sec": 0.3})
    engine = create_engine(database)
    page.Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO feed VALUES ('feed-1')"))
    engine.dispose()
    opened: list[str] = []
    looked: list[bool] = []  # whether the feed was the worker's, each time it looked

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.02)

    async def comes_back() -> None:
        closed = asyncio.Event()

        class SlowInClosing(page.Subscriptions):  # type: ignore[misc,name-defined]
            async def open_mine(self) -> None:
                mine = self.job.can_claim_task("feed-1")
                await super().open_mine()
                looked.append(mine)

            async def follow(self, feed: str) -> None:
                opened.append(feed)
                try:
                    await asyncio.Event().wait()
                finally:
                    await closed.wait()

        worker = SlowInClosing("f-1")
        run = asyncio.create_task(worker.run())
        await until(lambda: opened == ["feed-1"])
        async with Job("f-2", coordination_config=page.config) as other:
            other.register_lock("feed-1", "f-2")
            await until(lambda: other.can_claim_task("feed-1"))
            other.register_lock("feed-1", "f-1")
            await until(lambda: worker.job.can_claim_task("feed-1"))
            looked.clear()
            worker.wake.set()
            await until(lambda: True in looked)
            assert opened == ["feed-1"]
            closed.set()
            await until(lambda: opened == ["feed-1", "feed-1"])
        worker.stop()
        await run

    asyncio.run(comes_back())


@pytest.mark.slow
def test_the_real_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``KafkaLog`` of the page, on brokers that librdkafka simulates on real sockets."""
    kafka = pytest.importorskip("confluent_kafka")
    code = next(block.text for block in blocks(ROOT / "docs" / "guide" / "kafka.md") if block.language == "python")
    monkeypatch.setenv("JOBSYNC_DATABASE_URL", "postgresql://nowhere/nothing")
    tmp_path.joinpath("page_on_kafka.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    page = importlib.import_module("page_on_kafka")
    producer = kafka.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "simulated"})
    brokers = producer.list_topics("orders", timeout=30).brokers.values()
    for number in range(400):
        producer.produce("orders", json.dumps({"cents": number}), key=f"account-{number}", partition=number % 4)
    assert producer.flush(30) == 0

    log = page.KafkaLog("orders", {"bootstrap.servers": ",".join(f"{each.host}:{each.port}" for each in brokers)})
    assert log.partitions() == [0, 1, 2, 3]
    log.assign({0: None, 1: 50})
    records: list[Any] = []
    wait_for(lambda: records.extend(log.poll(0.5)) or len(records) == 150, "what is there is read")
    assert [record.offset for record in records if record.partition == 0] == list(range(100))
    assert [record.offset for record in records if record.partition == 1] == list(range(50, 100))
    log.assign({2: 99})
    assert wait_for(lambda: log.poll(0.5), "the last record")[0].value == {"cents": 398}
    log.assign({0: 1000})
    with pytest.raises(ConnectionError):
        wait_for(lambda: log.poll(0.5), "an offset that is not there is an error")
    log.consumer.close()
