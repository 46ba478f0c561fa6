"""The original library, ``jobsync``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from jobsync import CoordinationConfig, Job
from jobsync.client import compute_minimal_move_distribution, matches_pattern, task_to_token

PACKAGE = "jobsync"
PERIOD = 30.0

# It always waits for all of it.
ENTER_SEC = 3

# Above this many tokens the distribution takes longer than the library's own limit allows by default.
MANY_TOKENS = 100_000


def make_job(dsn: str, node: str, settings: dict[str, Any]) -> Job:
    u = urlsplit(dsn)
    where = {
        "host": u.hostname,
        "port": u.port or 5432,
        "dbname": u.path.lstrip("/"),
        "user": unquote(u.username or "postgres"),
        "password": unquote(u.password or ""),
    }
    return Job(node, CoordinationConfig(**where, **settings), wait_on_enter=ENTER_SEC)


def settings(
    mode: str = "fresh", tokens: int = 10_000, *, quick_rebalance: bool = False, create_tables: bool = False
) -> dict[str, Any]:
    """``steady`` starts with the polling interval that a worker has only after five minutes."""
    chosen: dict[str, Any] = {"total_tokens": tokens}
    if mode == "steady":
        chosen["token_refresh_initial_interval_sec"] = 30
    if quick_rebalance:
        chosen["rebalance_check_interval_sec"] = 2
    if tokens > MANY_TOKENS:
        chosen["token_distribution_timeout_sec"] = 300
    return chosen  # it always creates its tables


def prepare(dsn: str, tokens: int) -> None:
    make_job(dsn, "setup", {"total_tokens": tokens})


def leads(job: Job) -> bool:
    return job.state_machine.is_leader()


def condition(job: Job) -> str:
    return job.state_machine.state.value


def owners(cursor: Any) -> dict[str, int]:
    cursor.execute("select to_regclass('sync_token') is not null")
    if not cursor.fetchone()[0]:
        return {}
    cursor.execute("select node, count(*) from sync_token group by 1")
    return dict(cursor.fetchall())


def redistribution_ms(cursor: Any) -> float:
    """As the library itself notes it."""
    cursor.execute("select duration_ms from sync_rebalance order by id desc limit 1")
    return float(cursor.fetchone()[0])


def hash_calls(tokens: int) -> dict[str, Callable[[Any], int]]:
    def call(name: str) -> Callable[[Any], int]:
        return lambda task: task_to_token(task, tokens, name)

    return {name: call(name) for name in ("double_sha256", "md5", "sha256")}


def planning(tokens: int, before: int, after: int) -> Callable[[], int]:
    """Plan for ``after`` nodes what ``before`` own; returns the number of moves."""
    nodes = [f"n{i:02d}" for i in range(max(before, after))]
    current, _ = compute_minimal_move_distribution(tokens, nodes[:before], {}, {}, matches_pattern)

    def run() -> int:
        return compute_minimal_move_distribution(tokens, nodes[:after], current, {}, matches_pattern)[1]

    return run


def pinned_planning(tokens: int, pins: int, nodes: int) -> Callable[[], int]:
    """Plan when the owner of everything is gone and ``pins`` tokens are pinned; returns the number of moves."""
    current = dict.fromkeys(range(tokens), "gone")
    locked = {token: ["n0%"] for token in range(pins)}
    names = [f"n{i:02d}" for i in range(nodes)]

    def run() -> int:
        return compute_minimal_move_distribution(tokens, names, current, locked, matches_pattern)[1]

    return run


def conversion(tokens: int, before: int, after: int) -> dict[str, Callable[[], Any]]:
    return {}
