"""What the dashboard answers to those who look."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from sqlalchemy import URL, Engine, create_engine, event, text
from starlette.applications import Starlette
from starlette.routing import Mount

from jobsync_orm import CoordinationConfig, Job, JobQueue
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.operate import WALKED
from jobsync_orm.web import dashboard
from jobsync_orm.web.masking import MASK
from jobsync_orm.web.pictures import SLOW_SEC, QueueReader
from tests.integration.web.conftest import Client


def test_the_page_and_its_files_are_the_packages_own(client: Client) -> None:
    page = client.request("GET", "/")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert 'src="static/main.js"' in page.text
    assert "http" not in page.text  # nothing from elsewhere, and no address that only holds at the root
    script = client.request("GET", "/static/main.js")
    assert (script.status_code, script.headers["x-content-type-options"]) == (200, "nosniff")
    assert client.request("GET", "/static/../app.py").status_code == 404


def test_it_works_wherever_it_is_mounted(engine: Engine) -> None:
    outside = Starlette(routes=[Mount("/ops/jobsync", dashboard(engine))])
    client = Client(outside)
    assert client.request("GET", "/ops/jobsync").headers["location"].endswith("/ops/jobsync/")
    assert client.request("GET", "/ops/jobsync/").status_code == 200
    assert client.get("/ops/jobsync/api/cluster")["value"]["status"]["total_tokens"] == 10_000


def test_a_cluster_with_a_node_and_a_parked_pin(client: Client, job: Job) -> None:
    job.register_lock("customer-7", "gpu-%", reason="needs a GPU")
    job.register_lock("customer-8", "%")
    deadline = time.monotonic() + 30
    while True:
        found = client.get("api/cluster")
        status = found["value"]["status"]
        if status["tokens"]["parked"] or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert [(node["name"], node["condition"], node["tokens"]["owned"]) for node in status["nodes"]] == [
        ("w1", "live", 9_999)
    ]
    assert found["value"]["owned"][-1]["values"] == {"w1": 9_999, "": 1}
    assert found["value"]["rebalances"][0]["tokens_moved"] == 1
    assert found["problem"] is None
    later = client.get("api/cluster", params={"after": found["value"]["owned"][-1]["at"]})
    assert later["value"]["owned"] == []
    pins = client.get("api/pins")["value"]
    assert {pin["task_id"] for pin in pins["pins"]} == {"customer-7", "customer-8"}
    assert [(pin["task_id"], pin["reason"]) for pin in pins["parked"]] == [("customer-7", "needs a GPU")]


def test_many_who_look_at_once_cost_one_reading(engine: Engine, job: Job) -> None:
    statements: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def count(connection: object, cursor: object, statement: str, *more: object) -> None:
        if "tally" in statement:
            statements.append(statement)

    client = Client(dashboard(engine))

    async def look() -> list[object]:
        import httpx2 as httpx

        transport = httpx.ASGITransport(app=client.app)
        async with httpx.AsyncClient(transport=transport, base_url=client.base) as many:
            return [answer.json() for answer in await asyncio.gather(*(many.get("api/cluster") for _ in range(20)))]

    answers = asyncio.run(look())
    assert len(answers) == 20
    assert len({str(answer["value"]["status"]["at"]) for answer in answers}) == 1  # type: ignore[index]
    assert len(statements) == 1


def test_a_database_that_is_away_is_told_and_the_last_picture_stays(database: URL, job: Job) -> None:
    engine = create_engine(database, connect_args={"connect_timeout": 2})
    client = Client(dashboard(engine))
    assert client.get("api/cluster")["problem"] is None

    @event.listens_for(engine, "do_connect")
    def refuse(dialect: object, record: object, arguments: object, parameters: dict[str, object]) -> None:
        parameters["port"] = 1

    engine.dispose()
    deadline = time.monotonic() + 20
    while (answer := client.request("GET", "api/cluster")).status_code == 200 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert answer.status_code == 503
    found = answer.json()
    assert found["problem"] == "the database does not answer"
    assert found["age_sec"] > 0
    assert found["value"]["status"]["nodes"][0]["name"] == "w1"
    assert client.request("GET", "api/jobs").json() == {"error": "the database does not answer"}
    engine.dispose()


def test_missing_tables_are_named(empty_database: URL) -> None:
    engine = create_engine(empty_database)
    client = Client(dashboard(engine))
    answer = client.request("GET", "api/cluster")
    assert answer.status_code == 503
    assert "jobsync-orm db upgrade" in answer.json()["problem"]
    engine.dispose()


def test_a_statement_that_takes_too_long_is_given_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobsync_orm.web.app.WITHIN_SEC", 0.2)
    client = Client(dashboard(engine))
    with engine.begin() as connection:
        connection.execute(text("LOCK TABLE sync_job IN ACCESS EXCLUSIVE MODE"))
        answer = client.request("GET", "api/jobs")
    assert (answer.status_code, answer.json()) == (503, {"error": "the database took too long to answer"})


def test_the_queue_in_figures(client: Client, queue: JobQueue, engine: Engine) -> None:
    for number in range(3):
        queue.submit("mail", {"number": number})
    queue.pause("mail", "provider is down")
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO sync_job_attempt (job_id, attempt, started_at, ended_at, outcome)"
                " SELECT n, 1, now(), now(), CASE WHEN n % 5 = 0 THEN 'timeout' WHEN n % 5 = 1 THEN 'snoozed'"
                " ELSE 'completed' END FROM generate_series(1, 10) n"
            )
        )
    found = client.get("api/queue")["value"]
    assert [(one["type"], one["counts"]["pending"], one["workers"]) for one in found["types"]] == [("mail", 3, 0)]
    assert [(one["type"], one["reason"]) for one in found["paused"]] == [("mail", "provider is down")]
    ended = found["ended"]["ended"]
    assert (sum(one["completed"] for one in ended), sum(one["failed"] for one in ended)) == (6, 2)
    assert found["waiting"][-1]["values"] == {"ready": 3, "processing": 0, "later": 0}


def test_attempts_that_are_committed_late_are_counted(
    engine: Engine, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("jobsync_orm.web.pictures.time", SimpleNamespace(monotonic=lambda: now[0]))
    reader = QueueReader(engine, queue)
    first = reader.read().ended
    assert first.ended == ()
    with engine.begin() as connection:  # in the stretch before the one that was the last
        connection.execute(
            text(
                "INSERT INTO sync_job_attempt (job_id, attempt, started_at, ended_at, outcome)"
                " VALUES (1, 1, now(), to_timestamp(:at) - interval '6 s', 'completed')"
            ),
            {"at": first.at},
        )
    now[0] += SLOW_SEC
    assert [one.completed for one in reader.read().ended.ended] == [1]


def test_jobs_are_searched_page_by_page(client: Client, queue: JobQueue, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO sync_job (type, state, error, key, token_id) SELECT CASE WHEN n % 2 = 0 THEN 'a' ELSE 'b'"
                " END, CASE WHEN n <= 3 THEN 'failed' ELSE 'completed' END, CASE WHEN n <= 3 THEN 'Boom 100%' END,"
                " CASE WHEN n = 7 THEN 'order:7' END, CASE WHEN n = 7 THEN 1 END FROM generate_series(1, 120) n"
            )
        )
    first = client.get("api/jobs")
    assert [job["id"] for job in first["jobs"]] == list(range(120, 70, -1))
    second = client.get("api/jobs", params={"before": first["before"]})
    third = client.get("api/jobs", params={"before": second["before"]})
    assert [job["id"] for job in (*second["jobs"], *third["jobs"])] == list(range(70, 0, -1))
    assert third["before"] is None

    def ids(**wanted: object) -> list[int]:
        return [job["id"] for job in client.get("api/jobs", params=wanted)["jobs"]]

    assert ids(state="failed") == [3, 2, 1]
    assert ids(state="failed", type="a") == [2]
    assert ids(error="boom 100%") == [3, 2, 1]
    assert ids(error="boom _") == []
    assert ids(key="order:7") == [7]
    assert ids(id=55) == [55]
    assert ids(id=5555) == []
    for wrong in ({"state": "lost"}, {"id": "x"}, {"before": -1}, {"error": "\0"}):
        assert client.request("GET", "api/jobs", params=wrong).status_code == 400, wrong


def test_a_search_goes_no_further_than_a_stretch(client: Client, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(
            text("INSERT INTO sync_job (type, state) SELECT 'a', 'completed' FROM generate_series(1, :n)"),
            {"n": WALKED + 10},
        )
        connection.execute(text("UPDATE sync_job SET state = 'failed' WHERE id = 1"))
    found = client.get("api/jobs", params={"state": "failed"})
    assert (found["jobs"], found["looked_at"], found["before"]) == ([], WALKED, 11)
    found = client.get("api/jobs", params={"state": "failed", "before": 11})
    assert ([job["id"] for job in found["jobs"]], found["before"]) == ([1], None)


def test_one_job_with_what_may_be_shown_of_it(client: Client, queue: JobQueue, engine: Engine) -> None:
    payload = {"to": "<script>alert(1)</script>", "smtp": {"password": "hunter2", "api_key": "k"}, "text": "x" * 9000}
    id = queue.submit("mail", payload).id
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO sync_job_attempt (job_id, attempt, started_at, outcome, error, traceback)"
                " SELECT :id, n, now(), 'failed', 'no', 'Traceback' FROM generate_series(1, 60) n"
            ),
            {"id": id},
        )
    found = client.get(f"api/jobs/{id}")
    assert found["payload"]["to"] == "<script>alert(1)</script>"
    assert found["payload"]["smtp"] == {"password": MASK, "api_key": MASK}
    assert len(found["payload"]["text"]) < 5000
    assert ([one["attempt"] for one in found["attempts"]], found["attempts_left_out"]) == (list(range(11, 61)), 10)
    assert client.request("GET", "api/jobs/999").status_code == 404


def test_a_configuration_names_its_cluster(database: URL) -> None:
    config = CoordinationConfig(url=database.render_as_string(hide_password=False))
    app = dashboard(config)

    async def use() -> object:
        import httpx2 as httpx

        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return (await client.get("/api/cluster")).json()

    assert asyncio.run(use())["value"]["status"]["total_tokens"] == 10_000  # type: ignore[index]
    with pytest.raises(ConfigurationError, match="names its cluster itself"):
        dashboard(config, appname="other_")
