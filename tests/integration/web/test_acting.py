"""What may be written, by whom, and what else is refused."""

from __future__ import annotations

import asyncio
import json
import logging

import httpx2 as httpx
import pytest
from sqlalchemy import URL, Connection, Engine, create_engine, event, text
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

from jobsync_orm import Job, JobQueue
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.models import JobState
from jobsync_orm.naming import Names
from jobsync_orm.operate import Operations
from jobsync_orm.web import dashboard
from jobsync_orm.web.headers import HEADERS
from tests.integration.cluster import wait_for
from tests.integration.web.conftest import Client

ACTIONS = ("retry", "cancel", "pause", "resume", "drain", "undrain")


@pytest.mark.parametrize("action", ACTIONS)
def test_read_only_refuses_every_action(client: Client, queue: JobQueue, action: str) -> None:
    id = queue.submit("mail", {}).id
    assert client.get("api/session") == {"writes": False, "who": None, "token": None}
    answer = client.act(action, {"id": id, "node": "w1"})
    assert (answer.status_code, answer.json()) == (403, {"error": "this dashboard is read-only"})
    assert queue.status(id).state is JobState.PENDING
    assert queue.paused() == []


def test_writes_need_somebody_who_says_who_it_is(engine: Engine) -> None:
    with pytest.raises(ConfigurationError, match="needs auth"):
        dashboard(engine, allow_writes=True)
    with pytest.raises(ConfigurationError, match="read_auth"):
        dashboard(engine, auth=lambda request: "ada")
    with pytest.raises(ConfigurationError, match="function of the request"):
        dashboard(engine, read_auth="ada")  # type: ignore[arg-type]


def test_jobs_are_cancelled_and_retried(writer: Client, queue: JobQueue, caplog: pytest.LogCaptureFixture) -> None:
    id = queue.submit("mail", {}).id
    with caplog.at_level(logging.INFO, "jobsync_orm.web"):
        assert writer.act("cancel", {"id": id}).json() == {"said": f"job {id} is cancelled"}
    assert queue.status(id).state is JobState.CANCELLED
    assert writer.act("retry", {"id": id}).json() == {"said": f"job {id} is pending"}
    assert queue.status(id).state is JobState.PENDING
    record = next(record for record in caplog.records if record.name == "jobsync_orm.web")
    assert record.event == "dashboard_action"  # type: ignore[attr-defined]
    assert record.getMessage() == f"'ada' did cancel {{'id': {id}}}: job {id} is cancelled"

    refused = writer.act("retry", {"id": id})
    assert refused.status_code == 409
    assert "is to run anyway" in refused.json()["error"]
    assert writer.act("retry", {"id": 999}).status_code == 404
    for wrong in ({"id": "1"}, {"id": True}, {}):
        assert writer.act("cancel", wrong).status_code == 400
    assert writer.act("delete", {"id": id}).status_code == 404
    assert queue.status(id).state is JobState.PENDING


def test_the_queue_is_paused_and_resumed(writer: Client, queue: JobQueue) -> None:
    assert writer.act("pause", {"type": "mail", "reason": "provider down"}).status_code == 200
    assert writer.act("pause", {}).status_code == 200
    assert [(pause.type, pause.reason) for pause in queue.paused()] == [(None, "ada"), ("mail", "ada: provider down")]
    assert writer.get("api/queue")["value"]["paused"][1]["type"] == "mail"
    assert writer.act("resume", {}).json() == {"said": "the queue goes on"}
    # What has been written shows at once, not after a second.
    assert [pause["type"] for pause in writer.get("api/queue")["value"]["paused"]] == ["mail"]
    assert writer.act("resume", {"type": "other"}).json() == {"said": "type 'other' was not paused"}


def test_nodes_are_drained_and_undrained(writer: Client, engine: Engine, job: Job) -> None:
    refused = writer.act("drain", {"node": "w1"})
    assert refused.status_code == 409
    assert "last node" in refused.json()["error"]
    with engine.begin() as connection:
        connection.execute(
            text("INSERT INTO sync_node (name, incarnation, state) VALUES ('w2', gen_random_uuid(), 'active')")
        )
    assert writer.act("drain", {"node": "w2", "reason": "disk"}).json() == {"said": "'w2' gives up its tokens"}
    orders = Operations(engine, Names()).status().drained
    assert [(order.node, order.by, order.reason) for order in orders] == [("w2", "ada", "disk")]
    assert writer.act("undrain", {"node": "w2"}).json() == {"said": "'w2' gets tokens again"}


def test_only_the_dashboards_own_page_can_write(writer: Client, queue: JobQueue) -> None:
    id = queue.submit("mail", {}).id

    def status(**headers: str) -> int:
        return writer.act("cancel", {"id": id}, **headers).status_code

    assert status(**{"sec-fetch-site": "cross-site"}) == 403
    assert status(**{"sec-fetch-site": "same-site"}) == 403
    assert status(**{"sec-fetch-site": "none"}) == 403
    assert status(**{"x-jobsync-token": ""}) == 403
    assert status(**{"x-jobsync-token": "x" * 43}) == 403
    assert status(**{"content-type": "text/plain"}) == 415
    token = writer.get("api/session")["token"]

    def old_browser(**headers: str) -> int:
        answer = writer.request(
            "POST", "api/act/cancel", json={"id": id}, headers={"x-jobsync-token": token, **headers}
        )
        return int(answer.status_code)

    assert old_browser() == 403
    assert old_browser(origin="http://evil.example") == 403
    assert old_browser(origin="null") == 403
    assert queue.status(id).state is JobState.PENDING
    writer.cookies.clear()
    assert old_browser(origin="http://ops.example") == 403
    assert old_browser(origin="http://ops.example", **{"x-jobsync-token": ""}) == 403  # as empty as the cookie
    assert queue.status(id).state is JobState.PENDING
    token = writer.get("api/session")["token"]
    assert old_browser(origin="http://ops.example") == 200
    assert queue.status(id).state is JobState.CANCELLED


def test_the_cookie_is_for_this_site_only(writer: Client) -> None:
    answer = writer.request("GET", "api/session")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert answer.headers["cache-control"] == "no-store"
    assert "secure" not in cookie
    writer.base = "https://ops.example/"
    assert "; secure" in writer.request("GET", "api/session").headers["set-cookie"].lower()


def test_a_token_that_is_too_short_to_be_one_of_ours_is_replaced(writer: Client) -> None:
    token = writer.get("api/session")["token"]
    assert writer.get("api/session")["token"] == token
    writer.cookies.clear()
    writer.cookies.set("jobsync_dashboard", "planted", domain="ops.example")
    assert len(writer.get("api/session")["token"]) >= 32


def test_hooks_say_who_may_look_and_who_may_write(engine: Engine, queue: JobQueue) -> None:
    async def reads(request: Request) -> str | None:
        return request.headers.get("x-user")

    def writes(request: Request) -> str | None:
        return "ada" if request.headers.get("x-user") == "ada" else None

    client = Client(dashboard(engine, allow_writes=True, auth=writes, read_auth=reads))
    id = queue.submit("mail", {}).id
    for path in ("/", "api/session", "api/cluster", "api/pins", "api/queue", "api/jobs", f"api/jobs/{id}"):
        assert client.request("GET", path).status_code == 403, path
        assert client.request("GET", path, headers={"x-user": "bob"}).status_code == 200, path
    session = client.get("api/session", headers={"x-user": "bob"})
    assert session == {"writes": True, "who": None, "token": None}
    token = client.get("api/session", headers={"x-user": "ada"})["token"]
    headers = {"x-jobsync-token": token, "sec-fetch-site": "same-origin"}
    refused = client.request("POST", "api/act/cancel", json={"id": id}, headers={**headers, "x-user": "bob"})
    assert refused.status_code == 403
    assert queue.status(id).state is JobState.PENDING
    done = client.request("POST", "api/act/cancel", json={"id": id}, headers={**headers, "x-user": "ada"})
    assert done.status_code == 200
    assert queue.status(id).state is JobState.CANCELLED


def test_who_may_not_look_may_not_write_either(engine: Engine, queue: JobQueue) -> None:
    may_look = ["bob"]
    app = dashboard(engine, allow_writes=True, auth=lambda request: "ada", read_auth=lambda request: may_look[0])
    client = Client(app)
    id = queue.submit("mail", {}).id
    token = client.get("api/session")["token"]
    headers = {"x-jobsync-token": token, "sec-fetch-site": "same-origin"}
    may_look[0] = None  # type: ignore[call-overload]
    answer = client.request("POST", "api/act/cancel", json={"id": id}, headers=headers)
    assert (answer.status_code, answer.json()) == (403, {"error": "you may not look at this dashboard"})
    assert queue.status(id).state is JobState.PENDING


def test_a_function_may_return_what_is_to_be_awaited(engine: Engine, queue: JobQueue) -> None:
    async def who(name: str) -> str:
        return name

    client = Client(dashboard(engine, allow_writes=True, auth=lambda request: who("ada")))
    assert client.get("api/session")["who"] == "ada"
    id = queue.submit("mail", {}).id
    assert client.act("cancel", {"id": id}).status_code == 200


@pytest.mark.parametrize("answer", [True, "", 7])
def test_what_is_no_name_lets_nobody_in(engine: Engine, answer: object) -> None:
    client = Client(dashboard(engine, read_auth=lambda request: answer))  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="must return a name or None"):
        client.request("GET", "api/jobs")


def test_values_of_another_kind_are_refused(writer: Client, queue: JobQueue) -> None:
    id = queue.submit("mail", {}).id
    assert id == 1
    for wrong in (True, "1", 1.0, None):
        answer = writer.act("cancel", {"id": wrong})
        assert (answer.status_code, answer.json()) == (400, {"error": f"id={wrong!r} must be a int"})
    assert queue.status(id).state is JobState.PENDING


def test_missing_tables_are_a_service_that_is_not_there_yet(empty_database: URL) -> None:
    engine = create_engine(empty_database)
    answer = Client(dashboard(engine, allow_writes=True, auth=lambda request: "ada")).act("drain", {"node": "w1"})
    assert answer.status_code == 503
    assert "jobsync-orm db upgrade" in answer.json()["error"]
    engine.dispose()


def test_a_request_that_is_no_object_or_too_long(writer: Client) -> None:
    token = writer.get("api/session")["token"]
    headers = {"x-jobsync-token": token, "sec-fetch-site": "same-origin", "content-type": "application/json"}
    for body, status in (
        (b"[]", 400),
        (b"{", 400),
        (b"\xff", 400),
        (b"[" * 9_000, 400),
        (b'{"a": "' + b"x" * 20_000 + b'"}', 413),
    ):
        assert writer.request("POST", "api/act/retry", content=body, headers=headers).status_code == status


def test_a_refusal_of_what_cannot_be_is_logged_with_who_asked(
    writer: Client, queue: JobQueue, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "jobsync_orm.web"):
        assert writer.act("retry", {"id": "seven"}).status_code == 400
    assert "'ada' was refused to retry {'id': 'seven'}: id='seven' must be a int" in caplog.messages


def test_names_that_cannot_be_stored_are_refused(writer: Client, job: Job) -> None:
    for body in ({"node": "a\0b"}, {"node": "\ud800"}, {"node": job.node_name, "reason": "\0"}):
        answer = writer.request(
            "POST",
            "api/act/drain",
            content=json.dumps(body),
            headers={
                "content-type": "application/json",
                "sec-fetch-site": "same-origin",
                "x-jobsync-token": writer.get("api/session")["token"],
            },
        )
        assert answer.status_code == 409, body
        assert "cannot store" in answer.json()["error"]


def test_what_the_database_left_open_is_logged_with_who_asked(
    engine: Engine, queue: JobQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer to a COMMIT that was lost, for example: it may have been done."""
    id = queue.submit("mail", {}).id
    broken = create_engine(engine.url)

    @event.listens_for(broken, "commit")
    def cut(connection: Connection) -> None:
        with engine.connect() as other:
            pid = connection.connection.dbapi_connection.info.backend_pid  # type: ignore[union-attr]
            other.execute(text(f"SELECT pg_terminate_backend({pid}, 10000)"))

    client = Client(dashboard(broken, allow_writes=True, auth=lambda request: "ada"))
    with caplog.at_level(logging.INFO, "jobsync_orm.web"):
        assert client.act("cancel", {"id": id}).status_code == 503
    broken.dispose()
    assert any(
        line.startswith(f"'ada' wanted to cancel {{'id': {id}}}, and whether it was done is not known")
        for line in caplog.messages
    )


def test_what_is_done_for_somebody_who_has_gone_is_logged(
    engine: Engine, queue: JobQueue, caplog: pytest.LogCaptureFixture
) -> None:
    id = queue.submit("mail", {}).id
    app = dashboard(engine, allow_writes=True, auth=lambda request: "ada")
    client = Client(app)
    token = client.get("api/session")["token"]

    async def leave_early() -> None:
        headers = {"x-jobsync-token": token, "sec-fetch-site": "same-origin"}
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url=client.base, cookies=client.cookies) as asking:
            request = asyncio.ensure_future(asking.post("api/act/cancel", json={"id": id}, headers=headers))
            await asyncio.to_thread(wait_for, lambda: waits(engine), "the job's row is waited for")
            request.cancel()
            await asyncio.wait([request])

    with caplog.at_level(logging.INFO, "jobsync_orm.web"):
        with engine.begin() as holder:
            holder.execute(text(f"SELECT 1 FROM sync_job WHERE id = {id} FOR UPDATE"))
            asyncio.run(leave_early())
            assert queue.status(id).state is JobState.PENDING
        wait_for(lambda: any(line.startswith("'ada' did cancel") for line in caplog.messages), "it is logged")
    assert queue.status(id).state is JobState.CANCELLED


def waits(engine: Engine) -> bool:
    """Whether somebody waits for a row of this database."""
    with engine.connect() as connection:
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        return bool(connection.scalar(text(waiting)))


def test_an_application_that_has_all_connections(engine: Engine) -> None:
    busy = create_engine(engine.url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    client = Client(dashboard(busy))
    with busy.connect():
        for path in ("api/jobs", "api/pins"):
            answer = client.request("GET", path)
            assert answer.status_code == 503, path
            assert "no connection to the database is free" in answer.text
    assert client.get("api/jobs")
    busy.dispose()


@pytest.mark.parametrize("mounted", [False, True])
def test_an_answer_for_an_error_inside_forbids_what_all_others_do(engine: Engine, mounted: bool) -> None:
    def broken(request: Request) -> str:
        raise RuntimeError("secret of the application")

    app = dashboard(engine, read_auth=broken)
    client = Client(Starlette(routes=[Mount("/ops", app)]) if mounted else app, raises=False)
    answer = client.request("GET", "/ops/api/session" if mounted else "/api/session")
    assert answer.status_code == 500
    assert answer.json() == {"error": "the dashboard failed to answer this: its log says why"}
    assert answer.headers["cache-control"] == "no-store"
    assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS
