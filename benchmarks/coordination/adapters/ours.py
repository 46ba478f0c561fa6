"""This library, ``jobsync_orm``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jobsync_orm import CoordinationConfig, Job
from jobsync_orm.coordinator.leadership import Group, steps_of
from jobsync_orm.coordinator.pinning import allowed_nodes
from jobsync_orm.coordinator.session import array, parse_array
from jobsync_orm.hashing import HASH_FUNCTIONS, hasher
from jobsync_orm.planner import Member, plan

PACKAGE = "jobsync-orm"
PERIOD = 5.0

# A deadline only.
ENTER_SEC = 120


def make_job(dsn: str, node: str, settings: dict[str, Any]) -> Job:
    return Job(node, CoordinationConfig(url=dsn, **settings), wait_on_enter=ENTER_SEC)


def settings(
    mode: str = "fresh", tokens: int = 10_000, *, quick_rebalance: bool = False, create_tables: bool = False
) -> dict[str, Any]:
    """There is one mode only, and no rebalance timer to shorten."""
    return {"total_tokens": tokens, "create_tables": create_tables}


def prepare(dsn: str, tokens: int) -> None:
    # Imported here: workers do not need it, and its import must not count as theirs.
    from jobsync_orm import migrate

    migrate.upgrade(CoordinationConfig(url=dsn, total_tokens=tokens))


def leads(job: Job) -> bool:
    return job.am_i_leader()


def condition(job: Job) -> str:
    return "healthy" if job.am_i_healthy() else "unhealthy"


def owners(cursor: Any) -> dict[str, int]:
    cursor.execute("select to_regclass('sync_token') is not null and to_regclass('sync_node') is not null")
    if not cursor.fetchone()[0]:
        return {}
    cursor.execute(
        "select t.node, count(*) from sync_token t join sync_node n on n.name = t.node and n.state <> 'away' group by 1"
    )
    return dict(cursor.fetchall())


def redistribution_ms(cursor: Any) -> float:
    """Both phases: until the last owner has released its tokens to their new one."""
    cursor.execute(
        "select 1000 * extract(epoch from (select max(assigned_at) from sync_token) - triggered_at)::float8"
        " from sync_rebalance order by id desc limit 1"
    )
    return float(cursor.fetchone()[0])


def hash_calls(tokens: int) -> dict[str, Callable[[Any], int]]:
    return {name: hasher(tokens, name) for name in sorted(HASH_FUNCTIONS)}


def _owned(tokens: int, before: int) -> dict[str | None, list[int]]:
    members = [Member(f"n{i:02d}") for i in range(before)]
    owned: dict[str | None, list[int]] = {}
    owned.update(plan({None: list(range(tokens))}, members).assign)
    return owned


def planning(tokens: int, before: int, after: int) -> Callable[[], int]:
    """Plan for ``after`` nodes what ``before`` own; returns the number of moves."""
    owned = _owned(tokens, before)
    members = [Member(f"n{i:02d}") for i in range(after)]
    return lambda: plan(owned, members).moved


def pinned_planning(tokens: int, pins: int, nodes: int) -> Callable[[], int]:
    """Plan when the owner of everything is gone and ``pins`` tokens are pinned; returns the number of moves.

    Includes turning the pins' patterns into names.
    """
    owned: dict[str | None, list[int]] = {"gone": list(range(tokens))}
    members = [Member(f"n{i:02d}") for i in range(nodes)]
    names = {member.name for member in members}
    pinned = [(token, ["n0%"]) for token in range(pins)]
    return lambda: plan(owned, members, allowed_nodes(pinned, names)).moved


def conversion(tokens: int, before: int, after: int) -> dict[str, Callable[[], Any]]:
    """The leader's work around the plan: read the server's answer; turn the plan into steps (plan included)."""
    owned = _owned(tokens, before)
    texts = {node: array(held) for node, held in owned.items()}
    groups = [Group(node, None, False, held) for node, held in owned.items()]
    members = [Member(f"n{i:02d}") for i in range(after)]
    return {
        "read": lambda: [sorted(parse_array(text)) for text in texts.values()],
        "plan and steps": lambda: steps_of(groups, members, (), {}),
    }
