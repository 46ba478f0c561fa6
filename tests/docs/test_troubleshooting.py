"""What the page for whoever is on call quotes is what the library says, and what it names is there."""

from __future__ import annotations

import ast
import builtins
import functools
import re
import shlex
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from sqlalchemy import URL, create_engine, text
from typer.testing import CliRunner

import jobsync_orm
from jobsync_orm import CoordinationConfig, Discard, Job, JobContext, JobQueue, JobState, JobWorker, exceptions
from jobsync_orm.cli import application
from jobsync_orm.integrations.catalogue import METRICS
from tests.docs.test_code_blocks import ROOT, blocks, does_not_parse

PATH = ROOT / "docs" / "troubleshooting.md"
PAGE = PATH.read_text(encoding="utf-8")
PACKAGE = Path(jobsync_orm.__file__).parent

# What PostgreSQL says, not we.
OF_THE_SERVER = (
    "sorry, too many clients already",
    "remaining connection slots are reserved",
    'prepared statement "_pg3_0" does not exist',
    "function sync_token_of(text) does not exist",
)

GAP = "\0"

# Letters that a text in the source must have, so that not every line is an example of it.
ENOUGH = 10

Template = tuple[str, ...]


def rendered(node: ast.expr, many: bool = True) -> str:
    """The text that an expression makes, with a gap for each part that is computed; of ``many`` things, or of one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[-+ #0]*\d*(?:\.\d+)?[sdrgf]", GAP, node.value).replace("%%", "%")
    if isinstance(node, ast.JoinedStr):
        return "".join(rendered(part, many) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return rendered(node.value, many) if isinstance(node.value, ast.Call) else GAP
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return rendered(node.left, many) + rendered(node.right, many)
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "counted" and len(node.args) == 3:
        return f"{GAP} {rendered(node.args[1 + many], many)}"
    return GAP


def raised(sql: str) -> list[str]:
    """The messages of a function in SQL."""
    return [re.sub(r"'\s+'", "", one) for one in re.findall(r"pg_catalog\.format\('((?:[^']|'\s+')*)'", sql)]


@functools.cache
def templates() -> dict[Template, re.Pattern[str]]:
    """All texts in the source: what stands between their gaps, and a pattern that fits their examples."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp | ast.Call):
                found |= {rendered(node), rendered(node, many=False), *raised(rendered(node))}
    return {
        tuple(one.split(GAP)): re.compile(".*".join(map(re.escape, one.split(GAP))), re.DOTALL)
        for one in found
        if len(re.sub(r"\W", "", one)) >= ENOUGH
    }


def begun(template: Template, line: str) -> int:
    """How many characters of ``line``, which the text of ``template`` may begin with, are not in its gaps; or -1."""
    piece, *others = template
    if piece.startswith(line):
        return len(line)
    if not line.startswith(piece) or not others:
        return -1
    rest = line[len(piece) :]
    following = others[0]
    starts = [at for at in range(len(rest)) if rest[at:].startswith(following[: len(rest) - at])] if following else [0]
    return len(piece) + max((begun(tuple(others), rest[at:]) for at in starts), default=0)


def said(line: str) -> set[Template]:
    """The texts of which ``line`` is an example; or the beginning of one, if it ends with an ellipsis."""
    found = {one for one, pattern in templates().items() if pattern.fullmatch(line)}
    if found or not line.endswith("..."):
        return found
    beginning = line.removesuffix("...").rstrip()
    return {one for one in templates() if begun(one, beginning) >= len(beginning) / 2}


@functools.cache
def on_the_page() -> set[Template]:
    return {one for line in QUOTED for one in said(line)}


def quoted() -> Iterator[str]:
    """Lines of the text blocks, and the messages that tables begin their rows with."""
    for block in blocks(PATH):
        if block.language == "text":
            yield from block.text.splitlines()
    for table in re.findall(r"^\| message \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE):
        for row in table.splitlines():
            cell = row.split(" | ")[0]
            yield from re.findall(r"`([^`]+)`", cell)


QUOTED = [line for line in quoted() if not line.startswith(OF_THE_SERVER)]


@pytest.mark.parametrize("line", QUOTED)
def test_the_library_says_so(line: str) -> None:
    assert said(line), "nothing in the source says this"


def test_enough_is_quoted() -> None:
    assert len(QUOTED) > 80


@pytest.mark.parametrize(
    ("line", "is_said"),
    [
        ("1 token is parked: their pins match no live node", True),
        ("1 token is lost: their pins match no live node", False),
        ("node name 'w' is in use by a live process ...: every worker needs a name of its own", True),
        ("node name 'w' is used by a live process ...: every worker needs a name of its own", False),
        ("the tables of appname 'sync_' are not there, or older than this version: run ...", True),
        ("the tables of appname 'sync_' are not there, or newer than this version: run ...", False),
    ],
)
def test_of_the_test(line: str, is_said: bool) -> None:
    assert bool(said(line)) is is_said


def test_commands_in_the_text_parse() -> None:
    found = re.findall(r"`jobsync-orm ([^`]+)`", PAGE)
    assert len(found) > 20
    wrong = {command: problem for command in found if (problem := does_not_parse(shlex.split(command)))}
    assert not wrong


def test_metrics_and_alerts_are_there() -> None:
    metrics = {metric.prometheus_name + ("_total" if metric.kind == "counter" else "") for metric in METRICS}
    assert set(re.findall(r"`(jobsync_\w+)`", PAGE)) <= metrics
    rules = yaml.safe_load((ROOT / "docs" / "grafana" / "alerts.yml").read_text(encoding="utf-8"))
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    index = PAGE.split("\n## ", 1)[0]
    assert set(re.findall(r"`(Jobsync[A-Z]\w+)`", index)) == alerts, "each alert leads somewhere"
    assert set(re.findall(r"`(Jobsync[A-Z]\w+)`", PAGE)) == alerts


def test_events_are_there() -> None:
    monitoring = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    events = set(re.findall(r"^\| `(\w+)` \| (?:DEBUG|INFO|WARNING|ERROR)", monitoring, re.MULTILINE))
    named = set(re.findall(r"events? `(\w+)`", PAGE)) | set(re.findall(r"\(`(\w+)`\)", PAGE))
    assert len(named) > 10
    assert {name for name in named if name.islower()} <= events


def test_errors_are_there() -> None:
    known = {*exceptions.__all__, *jobsync_orm.__all__, *dir(builtins), "FastAPI", "OwnedSession"}
    named = set(re.findall(r"`([A-Z][a-z]+[A-Z]\w+)`", PAGE))
    assert {"OwnershipLost", "LeaseLost", "NotRunning"} < named
    assert {name for name in named if not name.startswith("Jobsync")} <= known


def test_queries_of_the_cheat_sheet_are_there() -> None:
    sheet = (ROOT / "docs" / "cheatsheet.sql").read_text(encoding="utf-8")
    titles = set(re.findall(r"^-- # (\w+): ", sheet, re.MULTILINE))
    named = set(
        re.findall(r"[Tt]he query `(\w+)` of the \[cheat sheet\]|\[cheat sheet\]\(cheatsheet.md\), `(\w+)`", PAGE)
    )
    assert {name for pair in named for name in pair if name} == {"lines", "schedules", "sizes"} <= titles


def test_reasons_of_rebalances_are_all() -> None:
    source = (PACKAGE / "coordinator" / "leadership.py").read_text(encoding="utf-8")
    body = source.split("def _reason(", 1)[1].split("\n    def ", 1)[0]
    reasons = set(re.findall(r'"([a-z][a-z ]+)"', body.split('"""')[-1]))
    line = re.search(r"Each line says why: (.*)\.", PAGE)
    assert line is not None
    assert set(re.findall(r"`([^`]+)`", line[1])) == reasons


# -- troubles that are made, and what the commands say of them -------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """Where troubles are made."""

    url: URL

    def ask(self, *command: str) -> tuple[int, list[str]]:
        done = CliRunner().invoke(
            application(),
            [*command, "--url", self.url.render_as_string(hide_password=False)],
            env={"COLUMNS": "250"},
        )
        lines = [line.strip().removeprefix("! ") for line in (done.stdout + done.stderr).splitlines()]
        return done.exit_code, [re.sub(r"^(?:error|warning|note) +[\w ]+: |^error: ", "", line) for line in lines]

    def says(self, *command: str, fits: str) -> None:
        """The command prints a line which the page quotes and which has ``fits`` in it."""
        deadline = time.monotonic() + 60
        while True:
            _, lines = self.ask(*command)
            found = [line for line in lines if fits in line]
            if found:
                break
            assert time.monotonic() < deadline, lines
            time.sleep(0.1)
        assert any(said(line) & on_the_page() for line in found), f"the page does not have: {found}"


@pytest.fixture(scope="module")
def troubled(server: object, template: str) -> Iterator[tuple[Cluster, dict[str, int]]]:
    """Two nodes, a pin to nobody, and a queue with a job for each reason to wait."""
    url = server.create_database(template)  # type: ignore[attr-defined]
    engine = create_engine(url)
    config = CoordinationConfig(url=url)
    queue = JobQueue(engine=engine)
    let_go: list[int] = []

    @queue.handler("resize", max_retries=1, backoff=lambda failures, error: 3600)
    def resize(ctx: JobContext, how: str = "") -> None:
        if how == "discard":
            raise Discard("no such image")
        if how == "fail":
            raise ValueError("boom")
        while how == "wait" and not let_go and not ctx.cancelled.wait(0.05):
            pass

    def until(job: int, state: JobState) -> None:
        deadline = time.monotonic() + 60
        while queue.status(job).state is not state:
            assert time.monotonic() < deadline, queue.status(job)
            time.sleep(0.05)

    with Job("worker-01", coordination_config=config) as job, Job("worker-02", coordination_config=config):
        job.register_lock("customer-7", ["gpu-%"])
        with JobWorker(queue, job=job, types=["resize"]):
            jobs = {how: queue.submit("resize", {"how": how}, key="order:7" if how == "wait" else None).id
                    for how in ("discard", "fail", "wait")}  # fmt: skip
            until(jobs["discard"], JobState.FAILED)
            until(jobs["fail"], JobState.RETRYING)
            until(jobs["wait"], JobState.PROCESSING)
            jobs["in line"] = queue.submit("resize", {}, key="order:7").id
            jobs["parked"] = queue.submit("resize", {}, key="customer-7").id
            jobs["behind"] = queue.submit("resize", {}, after=jobs["discard"]).id
            jobs["later"] = queue.submit("resize", {}, delay=3600).id
            jobs["mail"] = queue.submit("send_mail", {}).id
            queue.pause("send_mail", reason="the provider is down")
            yield Cluster(url), jobs
            let_go.append(1)
    queue.dispose()
    engine.dispose()
    server.drop_database(url)  # type: ignore[attr-defined]


Troubled = tuple[Cluster, dict[str, int]]


@pytest.mark.parametrize(
    ("job", "fits"),
    [
        ("fail", "an attempt has failed"),
        ("wait", "has it since"),
        ("in line", "run one at a time"),
        ("parked", "belongs to nobody"),
        ("behind", "it is to run after"),
        ("later", "it is for later"),
        ("mail", "is paused since"),
        ("mail", "no live worker runs"),
    ],
)
def test_why_a_job_waits(troubled: Troubled, job: str, fits: str) -> None:
    cluster, jobs = troubled
    cluster.says("queue", "show", str(jobs[job]), fits=fits)


@pytest.mark.parametrize(
    ("command", "fits"),
    [
        ("status", "is parked"),
        ("locks explain customer-7", "matches no live node"),
        ("locks explain customer-7", "the token is parked"),
        ("reshard --total-tokens 20000 --yes", "nodes are registered"),
        ("evict worker-02", "may say yes to its tasks"),
    ],
)
def test_what_commands_say(troubled: Troubled, command: str, fits: str) -> None:
    troubled[0].says(*command.split(), fits=fits)


def test_a_parked_task_ends_where_with_1(troubled: Troubled) -> None:
    deadline = time.monotonic() + 60
    while troubled[0].ask("where", "customer-7")[0] != 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_transaction_that_is_open_for_long(troubled: Troubled) -> None:
    engine = create_engine(troubled[0].url)
    with engine.connect() as connection, connection.begin():
        connection.execute(text("SELECT 1"))
        troubled[0].says("doctor", "--transactions-older-than", "0s", fits="has a transaction open for")
    engine.dispose()


def test_nobody_is_there(database: URL) -> None:
    cluster = Cluster(database)
    cluster.says("status", fits="no node is live")
    cluster.says("status", fits="tokens have no owner yet")


def test_all_are_drained_and_are_given_tokens_again(database: URL) -> None:
    cluster = Cluster(database)
    with Job("worker-01", coordination_config=CoordinationConfig(url=database)):
        assert cluster.ask("drain", "worker-01", "--last", "--wait", "--yes")[0] == 0
        cluster.says("status", fits="every live node is drained")
        assert any("live, drained" in line for line in cluster.ask("nodes")[1])
        assert cluster.ask("undrain", "worker-01")[0] == 0
        deadline = time.monotonic() + 60
        while cluster.ask("status")[0] != 0:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize("when", ["before they are asked for", "while they are asked for"])
def test_a_transaction_keeps_tokens_until_it_is_ended(database: URL, when: str) -> None:
    """It has locked them before they were to move, so that they are not even marked; or after that."""
    cluster, engine = Cluster(database), create_engine(database)
    config = CoordinationConfig(url=database, drain_timeout_sec=0.2)
    ended: list[int] = []
    with engine.connect() as connection:

        def lock(*_: object) -> None:
            if not ended:
                connection.execute(text("SELECT 1 FROM sync_token FOR SHARE"))

        early = when.startswith("before")
        with Job("worker-01", coordination_config=config, on_revoke=None if early else lock):
            pid = connection.scalar(text("SELECT pg_backend_pid()"))
            if early:
                lock()
            joins = threading.Thread(target=_joins, args=(config,), daemon=True)
            joins.start()
            if early:
                deadline = time.monotonic() + 60
                while "5000 tokens would move" not in cluster.ask("rebalance", "--dry-run")[1]:
                    assert time.monotonic() < deadline, cluster.ask("rebalance", "--dry-run")
                    time.sleep(0.05)
                assert cluster.ask("status")[0] == 0, "it knows nothing of tokens that are not marked"
            else:
                cluster.says("status", fits="should have been handed over by now")
            ended.append(pid)
            with engine.connect() as other:
                other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
            joins.join(60)
            assert not joins.is_alive()
        connection.invalidate()
    engine.dispose()


def _joins(config: CoordinationConfig) -> None:
    """Until it has its half."""
    with Job("worker-02", coordination_config=config) as job:
        deadline = time.monotonic() + 60
        while len(job.my_tokens) < 5000:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"total_tokens": 5000}, exceptions.ClusterMismatch),
        ({"can_lead": False}, TimeoutError),
        ({"minimum_nodes": 3}, TimeoutError),
    ],
)
def test_a_job_that_does_not_start(database: URL, settings: dict[str, int], error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        Job("worker-01", coordination_config=CoordinationConfig(url=database, **settings), wait_on_enter=1).start()
    assert said(str(raised.value)) & on_the_page()


def test_a_name_that_is_in_use(database: URL) -> None:
    config = CoordinationConfig(url=database)
    with Job("worker-01", coordination_config=config):
        with pytest.raises(exceptions.NodeNameInUse) as raised:
            Job("worker-01", coordination_config=config).start()
        assert said(str(raised.value)) & on_the_page()
