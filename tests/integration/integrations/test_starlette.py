"""A job in the life of a Starlette and of a FastAPI application, in this process."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from fastapi import FastAPI, WebSocket
from sqlalchemy import URL, Engine, text
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from jobsync_orm import (
    ConfigurationError,
    CoordinationConfig,
    Job,
    JobQueue,
    JobWorker,
    NodeNameInUse,
    NotRunning,
    RevokeEvent,
)
from jobsync_orm.integrations.fastapi import CurrentJob, current_host, current_job, health_router, jobsync_lifespan
from jobsync_orm.integrations.hosted import Host
from jobsync_orm.integrations.starlette import health_routes
from tests.conftest import dsn
from tests.integration.cluster import QUICK, wait_for


def nodes(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(text("SELECT name FROM sync_node ORDER BY name")))


def shop(lifespan: Callable[[Any], Any]) -> FastAPI:
    app = FastAPI(lifespan=lifespan)
    app.include_router(health_router())

    @app.get("/mine")
    def mine(job: CurrentJob) -> dict[str, Any]:
        return {"node": job.node_name, "tokens": len(job.my_tokens)}

    @app.websocket("/feed")
    async def feed(socket: WebSocket, job: CurrentJob) -> None:
        await socket.accept()
        await socket.send_text(job.node_name)
        await socket.close()

    return app


def test_a_fastapi_application(config: CoordinationConfig, engine: Engine) -> None:
    with TestClient(shop(jobsync_lifespan(config, node_name="web"))) as client:
        assert client.get("/mine").json() == {"node": "web", "tokens": 10_000}
        with client.websocket_connect("/feed") as socket:
            assert socket.receive_text() == "web"
        for probe, status in (("live", "live"), ("ready", "ready")):
            answer = client.get(f"/health/{probe}")
            assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
            assert answer.json() == {"status": status, "node": "web", "problems": []}
        assert "/health/live" not in client.get("/openapi.json").json()["paths"]
        assert nodes(engine) == ["web"]
    assert nodes(engine) == []


def test_a_starlette_application_and_one_mounted_in_it(config: CoordinationConfig) -> None:
    async def mine(request: Request) -> JSONResponse:
        return JSONResponse(current_job(request).node_name)

    inner = Starlette(routes=[Route("/mine", mine)])
    app = Starlette(
        lifespan=jobsync_lifespan(config, node_name="web"),
        routes=[Mount("/health", routes=health_routes()), Mount("/inner", app=inner)],
    )
    with TestClient(app) as client:
        assert client.get("/inner/mine").json() == "web"
        assert client.get("/health/ready").json()["status"] == "ready"
        assert client.get("/health/live").json()["status"] == "live"


def test_an_application_may_start_again(config: CoordinationConfig) -> None:
    app = shop(jobsync_lifespan(config, node_name="web"))
    for _ in range(2):
        with TestClient(app) as client:
            assert client.get("/mine").json()["tokens"] == 10_000


def test_two_processes_of_a_host_get_two_names(config: CoordinationConfig) -> None:
    with TestClient(shop(jobsync_lifespan(config))) as one, TestClient(shop(jobsync_lifespan(config))) as two:
        first, second = one.get("/mine").json()["node"], two.get("/mine").json()["node"]
        assert (first[-2:], second[-2:]) == ("-1", "-2")
        wait_for(lambda: one.get("/mine").json()["tokens"] == 5000, "the first has given the second its half")
        assert two.get("/mine").json()["tokens"] == 5000


def test_the_applications_own_lifespan_runs_inside(config: CoordinationConfig, queue: JobQueue, engine: Engine) -> None:
    happened: list[str] = []
    queue.register("nothing", lambda ctx: None)

    @asynccontextmanager
    async def own(app: FastAPI) -> AsyncIterator[dict[str, str]]:
        happened.append(f"begins with {len(current_job(app).my_tokens)} tokens and {current_host(app).worker}")  # type: ignore[arg-type]
        yield {"shop": "open"}
        host = current_host(app)
        assert host.worker is not None
        happened.append(f"ends with {nodes(engine)}, worker {host.worker.health().state}")

    app = shop(jobsync_lifespan(config, node_name="web", lifespan=own, worker=lambda job: JobWorker(queue, job=job)))

    @app.get("/state")
    async def state(request: Request) -> str:
        return str(request.state.shop)

    with TestClient(app) as client:
        assert client.get("/state").json() == "open"
        job_id = queue.submit("nothing", {})
        assert queue.wait(job_id, timeout=20).state == "completed"
        assert client.get("/health/ready").json() == {"status": "ready", "node": "web", "problems": []}
    assert happened == ["begins with 10000 tokens and None", "ends with ['web'], worker stopped"]
    assert nodes(engine) == []


def test_an_own_lifespan_that_fails_leaves_no_node(config: CoordinationConfig, engine: Engine) -> None:
    @asynccontextmanager
    async def own(app: FastAPI) -> AsyncIterator[None]:
        raise ZeroDivisionError
        yield

    with pytest.raises(ZeroDivisionError), TestClient(shop(jobsync_lifespan(config, node_name="web", lifespan=own))):
        pass
    assert nodes(engine) == []


def test_an_own_lifespan_that_does_not_end_well_leaves_no_node_either(
    config: CoordinationConfig, queue: JobQueue, engine: Engine
) -> None:
    workers: list[JobWorker] = []
    queue.register("nothing", lambda ctx: None)

    @asynccontextmanager
    async def own(app: FastAPI) -> AsyncIterator[None]:
        yield
        raise ZeroDivisionError

    app = shop(jobsync_lifespan(config, node_name="web", lifespan=own, worker=lambda job: JobWorker(queue, job=job)))
    with pytest.raises(ZeroDivisionError), TestClient(app) as client:
        workers.append(client.app.state.jobsync.worker)  # type: ignore[attr-defined]
    assert [worker.health().state for worker in workers] == ["stopped"]
    assert nodes(engine) == []


def test_where_the_worker_does_not_start_what_has_begun_is_ended(config: CoordinationConfig, engine: Engine) -> None:
    happened: list[str] = []

    @asynccontextmanager
    async def own(app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            happened.append(f"ends with {nodes(engine)}")

    def fails(job: Job) -> JobWorker:
        raise ZeroDivisionError

    with (
        pytest.raises(ZeroDivisionError),
        TestClient(shop(jobsync_lifespan(config, node_name="web", lifespan=own, worker=fails))),
    ):
        pass
    assert happened == ["ends with ['web']"]
    assert nodes(engine) == []


def test_where_the_worker_does_not_stop_well_the_job_leaves(
    config: CoordinationConfig, queue: JobQueue, engine: Engine
) -> None:
    queue.register("nothing", lambda ctx: None)

    class Stubborn(JobWorker):
        def stop(self, grace_sec: float | None = None) -> None:
            super().stop(0)
            raise ZeroDivisionError

    app = shop(jobsync_lifespan(config, node_name="web", worker=lambda job: Stubborn(queue, job=job)))
    with pytest.raises(ZeroDivisionError), TestClient(app):
        pass
    assert nodes(engine) == []


def test_a_signal_while_it_starts_is_the_servers_and_ends_the_start(config: CoordinationConfig, engine: Engine) -> None:
    told: list[int] = []

    def of_the_server(number: int, frame: object) -> None:
        told.append(number)

    async def main() -> None:
        async with jobsync_lifespan(config, node_name="web")(app):
            assert signal.getsignal(signal.SIGTERM) is of_the_server, "once it has started"
        config.minimum_nodes = 2
        starting = asyncio.ensure_future(jobsync_lifespan(config, node_name="web")(app).__aenter__())
        deadline = time.monotonic() + 30
        while nodes(engine) != ["web"]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(NotRunning):
            await asyncio.wait_for(starting, 30)

    app = FastAPI()
    before = signal.signal(signal.SIGTERM, of_the_server)
    try:
        asyncio.run(main())
        assert signal.getsignal(signal.SIGTERM) is of_the_server
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == [signal.SIGTERM]
    assert nodes(engine) == []


def test_standalone() -> None:
    with TestClient(shop(jobsync_lifespan(None))) as client:
        assert client.get("/mine").json() == {"node": "standalone", "tokens": 10_000}
        assert client.get("/health/ready").status_code == 200


def test_ready_while_the_database_is_away(database: URL, engine: Engine, server: Any) -> None:
    config = CoordinationConfig(url=database, **QUICK)
    with TestClient(shop(jobsync_lifespan(config, node_name="web"))) as client:
        assert client.get("/health/ready").status_code == 200
        engine.dispose()
        with psycopg.connect(dsn(server.url), autocommit=True) as admin:
            admin.execute(f"ALTER DATABASE {database.database} ALLOW_CONNECTIONS false")
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [database.database]
            )
            answer = wait_for(lambda: not_ready(client), "not ready without a database")
            assert answer == {
                "status": "not ready",
                "node": "web",
                "problems": ["the node's lease has run out, or its connection is being made anew"],
            }
            assert client.get("/health/live").status_code == 200, "a restart would not help"
            admin.execute(f"ALTER DATABASE {database.database} ALLOW_CONNECTIONS true")
        wait_for(lambda: client.get("/health/ready").status_code == 200, "ready again")


def not_ready(client: TestClient) -> Any:
    answer = client.get("/health/ready")
    return answer.json() if answer.status_code == 503 else None


def test_not_ready_before_and_while_leaving(config: CoordinationConfig) -> None:
    leaving, go_on = threading.Event(), threading.Event()

    def on_revoke(event: RevokeEvent) -> None:
        leaving.set()
        go_on.wait(10)

    host = Host(config, {"on_revoke": on_revoke}, "web")
    assert host.ready().problems == ("the job has not been started",)
    with pytest.raises(NotRunning):
        _ = host.job
    host.start_job()
    assert host.ready().ok
    stopping = threading.Thread(target=host.stop_job)
    stopping.start()
    try:
        assert leaving.wait(10)
        assert (host.ready().ok, host.ready().problems) == (False, ("the job is leaving its cluster",))
        assert host.live().ok
        with pytest.raises(NotRunning):
            _ = host.job
    finally:
        go_on.set()
        stopping.join()


def test_live_says_no_if_the_loop_has_ended_by_itself(config: CoordinationConfig) -> None:
    app = shop(jobsync_lifespan(config, node_name="web"))
    app.mount("/inner", Starlette(routes=health_routes()))
    with TestClient(app) as client:
        current_host(app).job.stop()  # not the host's doing
        problems = ["the job's loop has ended by itself; the log says why"]
        for prefix in ("/health", "/inner"):
            for probe, status in (("live", "dead"), ("ready", "not ready")):
                answer = client.get(f"{prefix}/{probe}")
                assert (answer.status_code, answer.headers["cache-control"]) == (503, "no-store")
                assert answer.json() == {"status": status, "node": "web", "problems": problems}


def test_live_says_no_if_the_workers_loop_has(config: CoordinationConfig, queue: JobQueue) -> None:
    queue.register("nothing", lambda ctx: None)
    host = Host(config, {}, "web", worker=lambda job: JobWorker(queue, job=job))
    host.start_job()
    try:
        host.start_worker()
        assert host.live().ok
        assert host.worker is not None
        host.worker.stop()  # not the host's doing
        assert host.live().problems == ("the worker's loop has ended by itself; the log says why",)
        assert host.ready().problems == host.live().problems
    finally:
        host.stop_worker()
        host.stop_job()


def test_not_ready_while_the_worker_ends_what_it_runs(config: CoordinationConfig, queue: JobQueue) -> None:
    runs, go_on = threading.Event(), threading.Event()

    @queue.handler("slow")
    def slow(ctx: Any) -> None:
        runs.set()
        assert go_on.wait(30)

    host = Host(config, {}, "web", worker=lambda job: JobWorker(queue, job=job))
    job = host.start_job()
    host.start_worker()
    queue.submit("slow", {})
    assert runs.wait(30)
    assert host.ready().ok
    stopping = threading.Thread(target=host.stop_worker)
    stopping.start()
    try:
        wait_for(lambda: not host.ready().ok, "the server sends requests to others")
        assert host.live().ok
        assert job.am_i_healthy(), "it keeps its tokens until its jobs have ended"
    finally:
        go_on.set()
        stopping.join()
        host.stop_job()


def test_a_host_starts_once(config: CoordinationConfig, engine: Engine) -> None:
    host = Host(config, {}, "web")
    host.start_job()
    with pytest.raises(NotRunning, match="an application starts up once"):
        host.start_job()
    host.stop_job()
    with pytest.raises(NotRunning, match="an application starts up once"):
        host.start_job()
    for given in (config, None):
        never = Host(given, {}, "web")
        never.give_up()
        with pytest.raises(NotRunning):
            never.start_job()
    assert nodes(engine) == []


def test_problems_of_the_worker_without_what_the_database_said(
    config: CoordinationConfig, queue: JobQueue, engine: Engine
) -> None:
    queue.register("nothing", lambda ctx: None)
    host = Host(config, {}, "web", worker=lambda job: JobWorker(queue, job=job, poll_sec=0.1))
    host.start_job()
    try:
        host.start_worker()
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE sync_job RENAME TO secret_table"))
        problems = wait_for(lambda: host.ready().problems, "the worker cannot claim")
        assert "sync_job" in "".join(host.worker.health().problems)  # type: ignore[union-attr]
        assert "sync_job" not in "".join(problems)
        assert host.live().ok
    finally:
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE IF EXISTS secret_table RENAME TO sync_job"))
        host.stop_worker()
        host.stop_job()


def test_cancelled_while_it_waits_for_others(config: CoordinationConfig, engine: Engine) -> None:
    """The event loop goes on meanwhile, and no node stays behind."""
    config.minimum_nodes = 2
    app = FastAPI()

    async def main() -> None:
        life = jobsync_lifespan(config, node_name="web")(app)
        starting = asyncio.ensure_future(life.__aenter__())
        deadline = time.monotonic() + 30
        while nodes(engine) != ["web"]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(main())
    assert nodes(engine) == []


def test_a_name_given_to_several_processes(config: CoordinationConfig) -> None:
    with (
        TestClient(shop(jobsync_lifespan(config, node_name="web"))),
        pytest.raises(NodeNameInUse, match="Leave node_name out, and each process takes a name of its own"),
        TestClient(shop(jobsync_lifespan(config, node_name="web", wait_on_enter=1))),
    ):
        pass


class TestRefused:
    def test_no_configuration(self) -> None:
        with pytest.raises(ConfigurationError, match=r"CoordinationConfig\(url=...\)"):
            jobsync_lifespan("postgresql://localhost/shop")  # type: ignore[arg-type]

    def test_a_name_that_cannot_be(self, config: CoordinationConfig) -> None:
        with pytest.raises(ConfigurationError, match="1 to 200 characters"):
            jobsync_lifespan(config, node_name="")

    def test_a_worker_of_another_node(self, config: CoordinationConfig, queue: JobQueue, engine: Engine) -> None:
        queue.register("nothing", lambda ctx: None)
        app = shop(jobsync_lifespan(config, node_name="web", worker=lambda job: JobWorker(queue)))
        with pytest.raises(ConfigurationError, match=r"JobWorker\(queue, job=job\)"), TestClient(app):
            pass
        assert nodes(engine) == []

    def test_no_worker_at_all(self, config: CoordinationConfig) -> None:
        def nothing(job: Job) -> Any:
            return None

        with (
            pytest.raises(ConfigurationError, match="NoneType"),
            TestClient(shop(jobsync_lifespan(config, worker=nothing))),
        ):
            pass

    def test_an_application_whose_lifespan_has_not_run(self, config: CoordinationConfig) -> None:
        client = TestClient(shop(jobsync_lifespan(config)))
        with pytest.raises(NotRunning, match="only in a `with` block"):
            client.get("/mine")
