"""A job in a Flask application, in this process."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import URL, Engine, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from jobsync_orm import (
    ConfigurationError,
    CoordinationConfig,
    ForkedJob,
    Job,
    JobQueue,
    JobWorker,
    NotRunning,
    OwnershipLost,
    ShardedQuery,
    TokenOwned,
)
from jobsync_orm.integrations.flask import JobSync, health_blueprint
from tests.integration.claiming import give_away
from tests.integration.cluster import QUICK, wait_for
from tests.integration.test_fork import in_child


class Base(DeclarativeBase):
    pass


db = SQLAlchemy(model_class=Base, query_class=ShardedQuery, session_options={"query_cls": ShardedQuery})


class Parcel(TokenOwned, db.Model):  # type: ignore[name-defined,misc]
    __token_key__ = "code"

    id: Mapped[int] = mapped_column(primary_key=True)
    code: Mapped[str]
    packed: Mapped[bool] = mapped_column(default=False)


Make = Callable[..., Flask]


@pytest.fixture
def make(database: URL) -> Iterator[Make]:
    """Makes applications, whose jobs are stopped in the end."""
    made: list[Flask] = []

    def make(jobsync: JobSync, **settings: Any) -> Flask:
        app = Flask("shop")
        made.append(app)
        quick = {f"JOBSYNC_{key.upper()}": value for key, value in QUICK.items()}
        url = database.render_as_string(hide_password=False)
        app.config.update({"JOBSYNC_URL": url, "JOBSYNC_NODE_NAME": "web", **quick, **settings})
        jobsync.init_app(app)
        app.register_blueprint(health_blueprint())

        @app.get("/mine")
        def mine() -> dict[str, Any]:
            return {"node": jobsync.job.node_name, "tokens": len(jobsync.job.my_tokens)}

        @app.get("/pid")
        def pid() -> str:
            return str(os.getpid())

        return app

    yield make
    for app in made:
        app.extensions["jobsync"].stop()


def nodes(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(text("SELECT name FROM sync_node ORDER BY name")))


def test_the_first_request_starts_the_job(make: Make, engine: Engine) -> None:
    app = make(JobSync())
    client = app.test_client()
    assert client.get("/health/live").json == {"status": "live", "node": None, "problems": []}
    assert "jobsync-start" not in {thread.name for thread in threading.enumerate()}, "of this probe nothing begins"
    assert nodes(engine) == []
    assert client.get("/mine").json == {"node": "web", "tokens": 10_000}
    ready = client.get("/health/ready")
    assert (ready.status_code, ready.json) == (200, {"status": "ready", "node": "web", "problems": []})
    app.extensions["jobsync"].stop()
    assert nodes(engine) == []
    assert client.get("/health/ready").json["problems"] == ["the job is leaving its cluster"]
    assert client.get("/pid").status_code == 200, "what needs no job is answered to the end"
    with pytest.raises(NotRunning, match="has been stopped"):
        app.extensions["jobsync"].start()


def test_a_request_that_needs_no_job_does_not_wait_for_it(make: Make, engine: Engine) -> None:
    app = make(JobSync(), JOBSYNC_MINIMUM_NODES=2)
    client = app.test_client()
    assert client.get("/pid").text == str(os.getpid())
    wait_for(lambda: nodes(engine) == ["web"], "it has begun to start")
    ready = client.get("/health/ready")
    assert (ready.status_code, ready.headers["cache-control"], ready.json["status"]) == (503, "no-store", "not ready")
    began = time.monotonic()
    app.extensions["jobsync"].stop()
    assert time.monotonic() - began < 60, "who leaves does not wait for the start, which may take two minutes"
    assert nodes(engine) == []


def test_live_says_no_if_the_loop_has_ended_by_itself(make: Make) -> None:
    app = make(JobSync())
    client = app.test_client()
    app.extensions["jobsync"].start().stop()  # not the extension's doing
    for probe, status in (("live", "dead"), ("ready", "not ready")):
        answer = client.get(f"/health/{probe}")
        assert (answer.status_code, answer.headers["cache-control"]) == (503, "no-store")
        assert answer.json["status"] == status
        assert answer.json["problems"] == ["the job's loop has ended by itself; the log says why"]


def test_where_the_worker_does_not_start_no_node_is_left(make: Make, engine: Engine, queue: JobQueue) -> None:
    queue.register("nothing", lambda ctx: None)
    tries: list[Job] = []

    def worker(job: Job) -> JobWorker:
        tries.append(job)
        if len(tries) == 1:
            raise ZeroDivisionError
        return JobWorker(queue, job=job)

    process = make(JobSync(worker=worker)).extensions["jobsync"]
    with pytest.raises(ZeroDivisionError):
        process.start()
    assert nodes(engine) == []
    assert process.start() is tries[1]
    assert process.ready().ok


def test_a_probe_starts_it(make: Make) -> None:
    client = make(JobSync()).test_client()
    wait_for(lambda: client.get("/health/ready").status_code == 200, "ready without any other request")


def test_a_start_that_fails_is_tried_again(make: Make, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE sync_node RENAME TO elsewhere"))
    app = make(JobSync(), JOBSYNC_WAIT_ON_ENTER=1)
    with app.app_context(), pytest.raises(Exception, match=r"jobsync-orm db upgrade|not within|could not"):
        app.extensions["jobsync"].start()
    problems = wait_for(lambda: app.test_client().get("/health/ready").json["problems"], "not ready")
    assert problems == ["the job could not be started; the log says why, and it is tried again"]
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE elsewhere RENAME TO sync_node"))
    wait_for(lambda: app.test_client().get("/health/ready").status_code == 200, "ready")
    assert "could not be started" in caplog.text


def test_several_threads_start_it_once(make: Make) -> None:
    app = make(JobSync())
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(app.extensions["jobsync"].start())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def test_models_of_flask_sqlalchemy(make: Make, database: URL, engine: Engine) -> None:
    """Its engine, its session with owned_by, and the fence on commits."""
    jobsync = JobSync()
    app = Flask("shop")
    app.config.update(SQLALCHEMY_DATABASE_URI=database, JOBSYNC_NODE_NAME="web")
    db.init_app(app)
    jobsync.init_app(app)
    try:
        with app.app_context():
            db.create_all()
            db.session.add_all([Parcel(code=f"P{n}") for n in range(10)])
            db.session.commit()
            job = jobsync.job
            assert job.coordination_config is not None
            assert job.coordination_config.engine is db.engine
            assert db.session.query(Parcel).owned_by(job).count() == 10
            assert Parcel.query.owned_by(job).filter_by(code="P3").one().id
            assert db.paginate(select(Parcel).where(Parcel.owned_by(job)), per_page=3).total == 10
            (parcel,) = job.claim(db.session, select(Parcel), limit=1)
            parcel.packed = True
            give_away(engine, parcel.token_id, "other")
            with pytest.raises(OwnershipLost):
                db.session.commit()
            db.session.rollback()
            assert db.session.query(Parcel).filter_by(packed=True).count() == 0
            db.session.remove()
            db.engine.dispose()
    finally:
        app.extensions["jobsync"].stop()


def test_a_worker_in_the_process(make: Make, queue: JobQueue) -> None:
    queue.register("nothing", lambda ctx: None)
    jobsync = JobSync(worker=lambda job: JobWorker(queue, job=job))
    app = make(jobsync)
    app.extensions["jobsync"].start()
    assert queue.wait(queue.submit("nothing", {}), timeout=20).state == "completed"
    with app.app_context():
        worker = jobsync.worker
    assert worker is not None
    app.extensions["jobsync"].stop()
    assert worker.health().state == "stopped"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_started_before_a_fork(make: Make) -> None:
    app = make(JobSync())
    process = app.extensions["jobsync"]
    process.start()
    assert in_child(process.start).startswith(f"ForkedJob: this application's job was started by process {os.getpid()}")
    answered = in_child(lambda: app.test_client().get("/mine").status_code)
    assert answered == "returned 500"
    assert in_child(lambda: (process.live().ok, process.ready().ok, process.stop())) == "returned (False, False, None)"
    assert process.job.can_claim_task("t")
    assert issubclass(ForkedJob, NotRunning)


class TestSettings:
    def test_standalone(self) -> None:
        app = Flask("shop")
        app.config["JOBSYNC_STANDALONE"] = True
        JobSync(app)
        job = app.extensions["jobsync"].start()
        assert (job.node_name, job.can_claim_task("t")) == ("standalone", True)
        app.extensions["jobsync"].stop()

    def test_given(self, config: CoordinationConfig) -> None:
        app = Flask("shop")
        JobSync(app, config)
        try:
            assert app.extensions["jobsync"].start().coordination_config is config
        finally:
            app.extensions["jobsync"].stop()

    def test_a_key_that_is_none(self) -> None:
        app = Flask("shop")
        app.config["JOBSYNC_HEARTBEAT"] = 3
        with pytest.raises(ConfigurationError, match="JOBSYNC_HEARTBEAT is no setting"):
            JobSync(app)

    def test_no_database(self) -> None:
        app = Flask("shop")
        JobSync(app)
        with pytest.raises(ConfigurationError, match="JOBSYNC_URL"):
            app.extensions["jobsync"].start()

    def test_twice(self) -> None:
        app = Flask("shop")
        JobSync(app)
        with pytest.raises(ConfigurationError, match="already"):
            JobSync(app)

    def test_not_at_all(self) -> None:
        with Flask("shop").app_context(), pytest.raises(NotRunning, match="init_app"):
            _ = JobSync().job


class TestCommands:
    def run(self, app: Flask, *arguments: str) -> Any:
        return app.test_cli_runner().invoke(args=["jobsync", *arguments])

    def test_of_the_applications_cluster(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("JOBSYNC_DATABASE_URL", raising=False)
        app = make(JobSync())
        none = self.run(app, "nodes", "--json")
        assert (none.exit_code, json.loads(none.stdout)) == (1, [])
        app.extensions["jobsync"].start()
        nodes = self.run(app, "nodes", "--json")
        assert (nodes.exit_code, [node["name"] for node in json.loads(nodes.stdout)]) == (0, ["web"])
        assert json.loads(self.run(app, "status", "--json").stdout)["healthy"] is True

    def test_of_another_appname(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("JOBSYNC_DATABASE_URL", raising=False)
        app = make(JobSync(), JOBSYNC_APPNAME="other_")
        done = self.run(app, "nodes")
        assert done.exit_code == 2
        assert "other_" in done.stderr

    def test_what_is_said_holds_in_place_of_the_applications(
        self, make: Make, database: URL, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("JOBSYNC_DATABASE_URL", raising=False)
        app = make(JobSync(), JOBSYNC_APPNAME="other_", JOBSYNC_SCHEMA="elsewhere")
        done = self.run(app, "nodes")
        assert (done.exit_code, "appname 'other_' in schema 'elsewhere'" in done.stderr) == (2, True)
        done = self.run(app, "nodes", "--appname", "third_", "--schema", "there")
        assert (done.exit_code, "appname 'third_' in schema 'there'" in done.stderr) == (2, True)
        url = database.render_as_string(hide_password=False)
        done = self.run(app, "nodes", "--json", "--url", url)
        assert (done.exit_code, json.loads(done.stdout)) == (1, []), "another database has its own appname"

    def test_a_worker_has_the_cluster_of_its_queue(self) -> None:
        app = Flask("shop")
        app.config["JOBSYNC_STANDALONE"] = True
        JobSync(app)
        done = self.run(app, "worker", "no_such_module:queue")
        assert (done.exit_code, "no_such_module" in done.stderr) == (2, True)

    def test_help_and_a_standalone_job(self) -> None:
        app = Flask("shop")
        app.config["JOBSYNC_STANDALONE"] = True
        JobSync(app)
        assert "rebalances" in self.run(app, "--help").stdout
        done = self.run(app, "status")
        assert (done.exit_code, "standalone" in done.stderr) == (1, True)
