"""Tokens that should go to another node, and cannot be asked for because an application's transaction uses them.

A plan passes over tokens whose rows are locked, and such a lock does not show in the row that has it. What shows is how
many tokens each node would have if the leader could do as it likes, and which transactions hold the table of tokens in
the mode of who locks some of its rows. Both together are told; one without the other is nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from jobsync_orm.balance import Group, loads, settle
from jobsync_orm.naming import Names, literal
from jobsync_orm.operate.picture import TokenHolder
from jobsync_orm.wording import counted

__all__ = ["HELD_SEC", "due", "holders_sql", "locks_sql", "token_wait"]

# Age from which a transaction that uses tokens is told: plans are made anew until then.
HELD_SEC = 5.0

# So many are named.
NAMED = 3


def locks_sql(names: Names) -> str:
    """The locks that a look is interested in: those of nodes' sessions, and of who locks rows of the tokens' table."""
    token = literal(names.sql("token")).replace(":", r"\:")
    return f"""
        SELECT l.pid, l.locktype, (CAST(l.classid AS bigint) << 32) | CAST(l.objid AS bigint) AS key
        FROM pg_catalog.pg_locks l
        WHERE l.granted AND l.database =
                (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
            AND (l.locktype = 'advisory' AND l.objsubid = 1 OR l.locktype = 'relation'
                AND l.mode IN ('RowShareLock', 'RowExclusiveLock') AND l.relation = CAST({token} AS regclass))"""


def holders_sql(names: Names) -> str:
    """The transactions of ``locks`` that use tokens, as JSON, the oldest first. The coordinators' own are none."""
    return f"""
        SELECT json_agg(json_build_array(h.pid, h.application, h.age) ORDER BY h.age DESC NULLS LAST) FROM (
            SELECT DISTINCT l.pid, a.application_name AS application,
                extract(epoch FROM clock_timestamp() - a.xact_start) AS age
            FROM locks l LEFT JOIN LATERAL pg_catalog.pg_stat_get_activity(coalesce(l.pid, -1)) a ON true
            WHERE l.locktype = 'relation' AND NOT EXISTS (SELECT 1 FROM {names.text("node")} n
                WHERE n.backend_pid = l.pid)) h
        WHERE coalesce(h.age, {HELD_SEC}) >= {HELD_SEC}"""


def due(takers: Sequence[tuple[str, int, int]], loose: int, pinned: int) -> dict[str, int]:
    """How many tokens each node should get that nobody has asked for yet.

    Parameters
    ----------
    takers : sequence of (str, int, int)
        Nodes that take tokens: name, weight, and how many it will have when all has come that is on its way.
    loose : int
        Tokens of others that are to be shared out too.
    pinned : int
        How many tokens are pinned: so many too many a node may have for that reason.
    """
    if not takers:
        return {}
    order = sorted(takers)
    group = Group(range(len(order)), loose + sum(load for *_, load in order), {i: t[2] for i, t in enumerate(order)})
    most, empty = loads([weight for _, weight, _ in order], [group])
    settle([group, *empty], most)
    gains = {name: group.placed.get(i, 0) - load for i, (name, _, load) in enumerate(order)}
    found = {name: gain for name, gain in gains.items() if gain > 0}
    return found if sum(found.values()) > pinned else {}


def token_wait(due: dict[str, int], holders: Sequence[TokenHolder]) -> str:
    """The sentence about it."""
    who = ", ".join(sorted(due)[:NAMED]) + (", ..." if len(due) > NAMED else "")
    told = [_holder(holder) for holder in holders[:NAMED]]
    if len(holders) > NAMED:
        told.append(f"and {len(holders) - NAMED} more")
    what = counted(sum(due.values()), "token waits", "tokens wait")
    whom = "a transaction that uses tokens" if len(holders) == 1 else "transactions that use tokens"
    return f"{what} to go to {who} until the end of {whom}: {'; '.join(told)}"


def _holder(holder: TokenHolder) -> str:
    if holder.pid is None:
        return "one that is prepared"
    name = f" ({holder.application})" if holder.application else ""
    return f"process {holder.pid}{name}" + (
        f", open for {holder.open_sec:.0f} s" if holder.open_sec is not None else ""
    )
