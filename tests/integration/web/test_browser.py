"""The dashboard in a real Chromium: what is seen, how soon, by keyboard, on narrow screens, in the dark."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from jobsync_orm import Job, JobQueue
from jobsync_orm.models import JobState
from jobsync_orm.web import dashboard
from tests.integration.cluster import Cluster, wait_for
from tests.integration.web.browser import NARROW, WIDE, chromium, prefer, resize
from tests.integration.web.serving import served

CONTRAST = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")
HEADING = "return document.activeElement.tagName === 'H1'"
OUTLINE = """const style = getComputedStyle(document.activeElement);
    return document.activeElement === document.body ? null : `${style.outlineStyle} ${style.outlineWidth}`"""
PAGES = (("#/", "customer-7"), ("#/queue", "Workers"), ("#/jobs", "Newest first"), ("#/jobs/60", "Traceback"))
XSS = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """The browser, on an empty page; afterwards nothing may stand in its console."""
    resize(browser, WIDE)
    prefer(browser, color_scheme="light")
    browser.get("about:blank")
    browser.get_log("browser")
    yield browser
    # Refusals that a test provokes are told there too; and the page outlives its server.
    messages = [entry["message"] for entry in browser.get_log("browser")]
    expected = (" the server responded ", "net::ERR_CONNECTION_REFUSED")
    told = [message for message in messages if not any(words in message for words in expected)]
    browser.get("about:blank")
    assert told == []


def body(page: Any) -> str:
    return str(page.execute_script("return document.body.innerText"))


def shows(page: Any, *words: str, timeout: float = 15) -> str:
    """The page's text, once it has all of these."""
    wait_for(lambda: all(word in body(page) for word in words), str(words), timeout)
    return body(page)


def click(page: Any, selector: str) -> None:
    from selenium.webdriver.common.by import By

    wait_for(lambda: page.find_elements(By.CSS_SELECTOR, selector), selector, 15)
    page.find_element(By.CSS_SELECTOR, selector).click()


def press(page: Any, *keys: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(page).send_keys(*keys).perform()


def focused(page: Any) -> str:
    return str(page.execute_script("const e = document.activeElement; return e.id || e.ariaLabel || e.innerText"))


def stored_jobs(engine: Engine) -> None:
    """Jobs 1 to 60, of which the last has failed, with what an attacker might have put into it."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO sync_job (type, state, payload, error, attempt, failures, max_retries, started_at,"
                " finished_at) SELECT 'mail', CASE WHEN n = 60 THEN 'failed' ELSE 'completed' END,"
                " jsonb_build_object('text', CAST(:xss AS text)), CASE WHEN n = 60 THEN :xss END, 1, 1, 0, now(), now()"
                " FROM generate_series(1, 60) n"
            ),
            {"xss": XSS},
        )
        connection.execute(
            text(
                "INSERT INTO sync_job_attempt (job_id, attempt, started_at, outcome, error, traceback)"
                " VALUES (60, 1, now(), 'failed', :xss, :traceback)"
            ),
            {"xss": XSS, "traceback": f"Traceback (most recent call last):\n  {XSS}"},
        )


def test_a_killed_worker_and_its_recovery_are_seen(
    page: Any, engine: Engine, make_cluster: Callable[..., Cluster], job: Job
) -> None:
    # Long enough to be seen once a second.
    cluster = make_cluster(connection_grace_sec=0.8)
    worker = cluster.add("w2")
    wait_for(lambda: worker.seen("ready"), "w2 is ready")
    with served(dashboard(engine)) as address:
        page.get(address)
        shows(page, "Healthy: 2 nodes share 10,000 tokens")
        rows = "return [...document.querySelectorAll('tr[data-key]')].map((row) => row.dataset.key)"
        assert page.execute_script(rows)[:2] == ["w1", "w2"]
        assert "Drain" not in body(page)
        worker.signal(signal.SIGKILL)
        shows(page, "w2 is cut off")
        shows(page, "Healthy: 1 node has 10,000 tokens")
        assert page.execute_script("return document.querySelector('.strip').ariaLabel").endswith("tokens: w1 10,000")
        assert "leave" in body(page)  # among the rebalances
        # Who comes now sees what w2 had.
        page.refresh()
        shows(page, "Healthy: 1 node has 10,000 tokens")
        bands = page.execute_script("return [...document.querySelectorAll('.band')].map((one) => one.dataset.key)")
        assert bands == ["bw1", "bw2", "b"]


def test_many_problems_are_folded_and_unfold(page: Any, engine: Engine) -> None:
    silent = (
        "INSERT INTO sync_node (name, incarnation, state, last_heartbeat)"
        " SELECT 'w' || n, gen_random_uuid(), 'active', now() - interval '1 hour' FROM generate_series({}) n"
    )
    shown = "return [...document.querySelectorAll('.notice li')].filter((one) => one.checkVisibility()).length"
    with engine.begin() as connection:
        connection.execute(text(silent.format("1, 3")))
    with served(dashboard(engine)) as address:
        page.get(address)
        shows(page, "w3 is silent")  # with two that tell of tokens and of nobody who is live
        assert "more" not in body(page)
        assert page.execute_script(shown) == 5
        with engine.begin() as connection:
            connection.execute(text(silent.format("4, 50")))
        shows(page, "48 more")
        assert page.execute_script(shown) == 4
        click(page, ".notice summary")
        assert page.execute_script(shown) == 52
        # What somebody has unfolded stays so when figures change.
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM sync_node WHERE name = 'w50'"))
        shows(page, "47 more")
        assert page.execute_script(shown) == 51


def test_the_ticks_of_plots_are_true(page: Any, engine: Engine) -> None:
    ticks = "return [...document.querySelectorAll('.plot .tick')].slice(0, 3).map((one) => one.textContent)"
    with served(dashboard(engine)) as address:
        page.get(f"{address}#/queue")
        wait_for(lambda: page.execute_script(ticks), "a plot", 15)
        assert page.execute_script(ticks) == ["0", "0.5", "1"]


def test_a_failed_job_is_found_and_retried(page: Any, engine: Engine, queue: JobQueue) -> None:
    from selenium.webdriver.common.keys import Keys

    stored_jobs(engine)
    with served(dashboard(engine, allow_writes=True, auth=lambda request: "ada")) as address:
        page.get(f"{address}#/jobs")
        assert "Older jobs" in shows(page, "Newest first", "60", "11")
        click(page, "input[name=error]")
        press(page, "WINDOW.BROKEN", Keys.ENTER)
        found = "return document.querySelectorAll('tbody tr').length"
        wait_for(lambda: page.execute_script(found) == 1, "one is found")
        assert page.execute_script("return location.hash") == "#/jobs?error=WINDOW.BROKEN"
        click(page, "tbody a")
        assert XSS in shows(page, "Job 60", "Attempt 1", "Traceback", '"text"', XSS)
        assert page.execute_script("return window.broken") is None

        # Escape leaves everything as it is, and the focus is where it was.
        click(page, "button[data-act=retry]")
        shows(page, "Retry job 60?")
        assert focused(page) == "dialog-no"
        press(page, Keys.ESCAPE)
        wait_for(lambda: not page.execute_script("return document.getElementById('dialog').open"), "it is closed")
        assert focused(page) == "Retry job 60"
        assert queue.status(60).state is JobState.FAILED

        # What is behind the dialog cannot be reached by Tab.
        press(page, Keys.ENTER)
        shows(page, "Retry job 60?")
        seen = set()
        for _ in range(6):
            press(page, Keys.TAB)
            seen.add(page.execute_script("return document.activeElement.closest('dialog, main, header')?.tagName"))
        assert seen <= {"DIALOG", None}
        page.execute_script("document.getElementById('dialog-yes').focus()")
        press(page, Keys.ENTER)
        shows(page, "job 60 is pending")
        assert queue.status(60).state is JobState.PENDING

        # A refusal is told in the dialog.
        queue.cancel(60)
        shows(page, "cancelled")
        click(page, "button[data-act=retry]")
        shows(page, "Retry job 60?")
        queue.retry(60)
        page.execute_script("document.getElementById('dialog-yes').click()")
        shows(page, "is to run anyway")
        press(page, Keys.ESCAPE)


def test_looking_only_has_no_buttons(page: Any, engine: Engine) -> None:
    stored_jobs(engine)
    with served(dashboard(engine)) as address:
        for hash, words in (("#/", "Cluster"), ("#/queue", "Types"), ("#/jobs/60", "Traceback")):
            page.get(f"{address}{hash}")
            shows(page, words, "read-only")
            assert page.execute_script("return document.querySelectorAll('[data-act]').length") == 0
        status = """return await fetch('api/act/retry', {method: 'POST', headers: {'content-type': 'application/json'},
            body: '{"id": 60}'}).then((answer) => answer.status)"""
        assert page.execute_script(status) == 403


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_readable_and_fits(page: Any, engine: Engine, job: Job, scheme: str) -> None:
    stored_jobs(engine)
    job.register_lock("customer-7", "gpu-%", reason="a reason " * 20)
    long = f"node-{'x' * 90}"
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO sync_node (name, incarnation, state, last_heartbeat) VALUES"
                " (:long, gen_random_uuid(), 'active', now() - interval '1 hour'),"
                " ('w3', gen_random_uuid(), 'joining', now()), ('w4', gen_random_uuid(), 'away', now())"
            ),
            {"long": long},
        )
        connection.execute(text("INSERT INTO sync_job (type) VALUES (:long)"), {"long": long})
    prefer(page, color_scheme=scheme, reduced_motion="reduce")
    app = dashboard(engine, allow_writes=True, auth=lambda request: "ada")
    with served(app) as address:
        for size in (WIDE, NARROW):
            resize(page, size)
            for hash, words in PAGES:
                page.get("about:blank")
                page.get(f"{address}{hash}")
                shows(page, words)
                found = page.execute_script(CONTRAST)
                assert found["looked"] > 10
                assert found["found"] == [], (size, hash)
                wider = page.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
                assert wider <= 0, (size, hash)
                moving = "return document.getAnimations().filter((one) => one.playState === 'running').length"
                assert page.execute_script(moving) == 0


def test_everything_has_a_name_and_is_reached_by_keyboard(page: Any, engine: Engine, job: Job) -> None:
    from selenium.webdriver.common.keys import Keys

    stored_jobs(engine)
    with served(dashboard(engine, allow_writes=True, auth=lambda request: "ada")) as address:
        page.get(address)
        shows(page, "Healthy")
        press(page, Keys.TAB)
        assert focused(page) == "Skip to content"
        press(page, Keys.ENTER)
        assert focused(page) == "main"
        nameless = """return [...document.querySelectorAll('main *, header *')].filter((one) =>
            one.matches('a, button, input, select, [role=img], [role=region], section, nav')
            && !(one.ariaLabel || one.getAttribute('aria-labelledby') || one.innerText || one.labels?.length)
        ).map((one) => one.outerHTML)"""
        for hash, words in (("#/queue", "Throughput"), ("#/jobs", "Newest first"), ("#/", "Rebalances")):
            page.execute_script("location.hash = arguments[0]", hash)
            shows(page, words)
            assert page.execute_script(nameless) == []
            assert page.execute_script("return document.querySelectorAll('h1').length") == 1
            current = page.execute_script("return document.querySelector('[aria-current=page]').getAttribute('href')")
            assert current == hash
            wait_for(lambda: page.execute_script(HEADING), "the heading is told", 5)
        reached = {}
        for _ in range(12):
            press(page, Keys.TAB)
            reached[focused(page)] = page.execute_script(OUTLINE)
        assert {outline for outline in reached.values() if outline} == {"solid 2px"}
        assert "Drain w1" in reached
