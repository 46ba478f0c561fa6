"""Look at a cluster from outside.

A look is one statement (after one that turns off compiling it), so that nodes, tokens and marks are those of one
moment. It reads every token row, which takes a few milliseconds for the usual 10,000 tokens, and two hundred for a
million. Who looks again and again leaves out what cannot have changed (:meth:`Operations.again`, ``counting.py``).

| statement | locks | if the process stops right there |
|---|---|---|
| look, rebalances | nothing | nothing |
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Engine, TextClause, text
from sqlalchemy.exc import DBAPIError

from jobsync_orm.autocommit import Autocommit, Row, limit_of, listed
from jobsync_orm.coordinator.pinning import allowed_nodes
from jobsync_orm.coordinator.statements import lock_key
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.naming import Names
from jobsync_orm.operate.counting import STRETCH, Group, TokenTally
from jobsync_orm.operate.missing import check_given, no_cluster, ready
from jobsync_orm.operate.picture import (
    ClusterStatus,
    Condition,
    DrainOrder,
    NodeStatus,
    NodeTokens,
    Rebalance,
    TokenHolder,
    TokenStatus,
)
from jobsync_orm.operate.waiting_tokens import due, holders_sql, locks_sql, token_wait
from jobsync_orm.status import WITHIN
from jobsync_orm.wording import counted

__all__ = ["Operations"]

REBALANCE = (
    "triggered_at, trigger_reason, leader_node, nodes_before, nodes_after, tokens_moved,"
    " CAST(duration_ms AS float8) / 1000, epoch"
)

# Where the look counts tokens.
TALLY = "/* tally */"


class Operations:
    """One cluster, for those who watch it.

    Parameters
    ----------
    engine : Engine
        A synchronous engine on its database.
    names : Names
        The cluster.
    """

    def __init__(self, engine: Engine, names: Names) -> None:
        check_given(engine, names)
        self.engine = engine
        self.names = names
        self._database = Autocommit(engine)
        cluster, node, token = names.text("cluster"), names.text("node"), names.text("token")
        lock, rebalance = names.text("lock"), names.text("rebalance")
        # Looked at once: each look takes all of the server's lock partitions.
        lock_of = lock_key(names, "n.name")
        look = f"""
            WITH tally AS MATERIALIZED ({TALLY}),
            locks AS MATERIALIZED ({locks_sql(names)}),
            held AS (SELECT pid, key FROM locks WHERE locktype = 'advisory'),
            pinned AS (
                SELECT l.token_id, l.node_patterns FROM {lock} l JOIN {token} t ON t.token_id = l.token_id
                WHERE CAST(:pins AS boolean) AND (l.expires_at IS NULL OR l.expires_at > clock_timestamp())
                    AND NOT EXISTS (SELECT 1 FROM {node} n WHERE n.name = t.node))
            SELECT clock_timestamp(), c.total_tokens, c.hash_function, c.epoch, CAST(c.incarnation AS text),
                CAST(extract(epoch FROM c.rest_until - clock_timestamp()) AS float8),
                (SELECT json_agg(json_build_array(t.number, t.node, t.next_node, t.tokens, t.overdue)) FROM tally t),
                (SELECT json_agg(json_build_array(p.token_id, p.node_patterns)) FROM pinned p),
                (SELECT json_agg(json_build_object(
                    'name', n.name, 'state', n.state, 'can_lead', n.can_lead, 'weight', n.weight, 'labels', n.labels,
                    'host', n.host, 'pid', n.pid, 'version', n.version, 'applied_epoch', n.applied_epoch,
                    'registered_at', n.registered_at, 'last_heartbeat', n.last_heartbeat,
                    'age', extract(epoch FROM clock_timestamp() - n.last_heartbeat),
                    'heartbeat_timeout_sec', n.heartbeat_timeout_sec,
                    'connection_grace_sec', n.connection_grace_sec, 'rejoin_grace_sec', n.rejoin_grace_sec,
                    'drained', (c.drained -> n.name) IS NOT NULL, 'session_open',
                    EXISTS (SELECT 1 FROM held h WHERE h.pid = n.backend_pid AND h.key = {lock_of}))
                    ORDER BY n.ordinal) FROM {node} n),
                (SELECT json_build_array({REBALANCE}) FROM {rebalance} ORDER BY id DESC LIMIT 1), c.drained,
                ({holders_sql(names)}), (SELECT count(*) FROM {lock})
            FROM {cluster} c"""
        counts = "node, next_node, count(*) AS tokens, count(*) FILTER (WHERE drain_deadline < now()) AS overdue"
        self._look_at_all = text(
            look.replace(TALLY, f"SELECT token_id / {STRETCH} AS number, {counts} FROM {token} GROUP BY 1, 2, 3")
        )
        # Each stretch by the primary key: how much of the table they are is not to be guessed.
        self._look_at_some = text(
            look.replace(
                TALLY,
                f"SELECT s.number, t.* FROM unnest({listed('stretches', 'int')}) AS s (number) CROSS JOIN LATERAL ("
                f"SELECT {counts} FROM {token} WHERE token_id >= s.number * {STRETCH}"
                f" AND token_id < (s.number + 1) * {STRETCH} GROUP BY node, next_node) t",
            )
        )
        self._rebalances = text(f"""
            SELECT {REBALANCE} FROM {rebalance}
            WHERE CAST(:since AS timestamptz) IS NULL OR triggered_at >= CAST(:since AS timestamptz)
            ORDER BY id DESC LIMIT :most""")

    def status(self) -> ClusterStatus:
        """The whole cluster.

        Raises
        ------
        SchemaNotReady
            The tables are missing, empty, or of an older revision.
        """
        return self.again(TokenTally())

    def again(self, tally: TokenTally) -> ClusterStatus:
        """:meth:`status` for who looks again and again, and counts few tokens anew.

        Each look counts those that may have moved since the last one, up to 100,000 of them. If they are more, the
        others are told as they were when they were counted last, about three seconds ago at most while somebody looks
        ten times a second: ``status.tokens.at`` says when. What somebody has written to the token table by hand is
        seen later, in 100,000 tokens every ten seconds.

        Parameters
        ----------
        tally : TokenTally
            What is known from the looks before. A new one counts all.
        """
        row, expected = self._counted(tally)
        if not expected:
            row, _ = self._counted(tally)
        return self._picture(row, tally)

    def _counted(self, tally: TokenTally) -> tuple[Row, bool]:
        """A look that counts what is due, and whether that was all that had to be counted."""
        stretches = tally.due()
        # A pin parks only what nobody has.
        values: dict[str, object] = {"pins": stretches != () or tally.unowned > 0}
        if stretches is not None:
            values["stretches"] = "{" + ",".join(map(str, stretches)) + "}"
        with ready(self.names):
            rows = self._read_look(self._look_at_all if stretches is None else self._look_at_some, values)
        if not rows:
            raise no_cluster(self.names)
        _, total, _, epoch, incarnation, _, groups, *_ = rows[0]
        return rows[0], tally.learn((incarnation, epoch), total, stretches, groups or ())

    def _picture(self, row: Row, tally: TokenTally) -> ClusterStatus:
        at, total, hash_function, epoch, _, rest, _, pinned, found, last, orders, holders, pins = row
        resting = rest if rest is not None and rest > 0 else None
        leader = next((n["name"] for n in found or () if n["can_lead"] and n["state"] != "away"), None)
        members = {n["name"]: _condition(n) for n in found or ()}
        groups = tally.groups()
        counts = _counts(groups, members)
        nodes = tuple(_node(n, members[n["name"]], leader, epoch, counts[n["name"]]) for n in found or ())
        counted_at = at - datetime.timedelta(seconds=tally.age_sec)
        tokens = _tokens(counted_at, total, nodes, groups, pinned or ())
        tally.unowned = tokens.unowned
        if holders and (waiting := _waiting(nodes, tokens, pins)):
            nodes = tuple(
                replace(node, tokens=replace(node.tokens, waiting=waiting.get(node.name, 0))) for node in nodes
            )
            using = tuple(TokenHolder(*holder) for holder in holders)
            tokens = replace(tokens, nodes=tuple(node.tokens for node in nodes), holders=using)
        problems = _problems(nodes, tokens, leader, resting)
        return ClusterStatus(
            self.names.appname,
            self.names.schema,
            at,
            total,
            hash_function,
            epoch,
            resting,
            leader,
            nodes,
            tuple(
                DrainOrder(name, datetime.datetime.fromisoformat(o["since"]), o["by"], o["reason"], name in members)
                for name, o in sorted(orders.items())
            ),
            tokens,
            None if last is None else Rebalance(datetime.datetime.fromisoformat(last[0]), *last[1:]),
            problems,
            not problems,
        )

    def _read_look(self, look: TextClause, values: Mapping[str, object]) -> list[Row]:
        """The rows of the look, once more if the pool's connection turns out to be broken."""
        try:
            return self._look_once(look, values)
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
        return self._look_once(look, values)

    def _look_once(self, look: TextClause, values: Mapping[str, object]) -> list[Row]:
        with self.engine.execution_options(isolation_level="READ COMMITTED").begin() as connection:
            # Compiling the statement takes a hundred times longer than running it.
            connection.execute(text("SET LOCAL jit = off"))
            if (limit := limit_of(self.engine)) is not None:
                connection.execute(WITHIN, {"limit": f"{limit * 1000:.0f}"})
            return list(connection.execute(look, values))

    def nodes(self) -> tuple[NodeStatus, ...]:
        """The registered nodes, oldest first. Raises as :meth:`status`."""
        return self.status().nodes

    def tokens(self) -> TokenStatus:
        """Where the tokens are. Raises as :meth:`status`."""
        return self.status().tokens

    def rebalances(self, limit: int = 20, since: datetime.datetime | None = None) -> list[Rebalance]:
        """The latest plans that moved tokens, newest first.

        Parameters
        ----------
        limit : int
            At most so many, at least 1.
        since : datetime, optional
            Only those triggered then or later. It must have a time zone.

        Raises
        ------
        ConfigurationError
            ``limit`` or ``since`` cannot be.
        """
        if limit < 1:
            raise ConfigurationError(f"limit={limit!r} must be at least 1")
        if since is not None and since.tzinfo is None:
            raise ConfigurationError(f"since={since!r} must have a time zone")
        with ready(self.names):
            rows, _ = self._database.repeat(self._rebalances, {"most": limit, "since": since})
        return [Rebalance(*row) for row in rows]


def _condition(node: dict[str, Any]) -> Condition:
    if node["state"] == "away":
        return "away"
    if node["age"] > node["heartbeat_timeout_sec"]:
        return "silent"
    if not node["session_open"]:
        return "cut off"
    return "joining" if node["state"] == "joining" else "live"


def _counts(groups: Iterable[Group], members: dict[str, Condition]) -> dict[str, NodeTokens]:
    owned, leaving, coming = (dict.fromkeys(members, 0) for _ in range(3))
    for owner, aim, count, _ in groups:
        if owner is not None and owner in owned:
            owned[owner] += count
            leaving[owner] += count if aim is not None else 0
        if aim is not None and aim in coming and aim != owner:
            coming[aim] += count
    return {name: NodeTokens(name, owned[name], leaving[name], coming[name]) for name in members}


def _tokens(
    at: datetime.datetime, total: int, nodes: tuple[NodeStatus, ...], groups: tuple[Group, ...], pinned: Any
) -> TokenStatus:
    takers = [node.name for node in nodes if node.condition != "away" and not node.drained]
    allowed = allowed_nodes([(token, patterns) for token, patterns in pinned], takers)
    owned = sum(node.tokens.owned for node in nodes)
    unowned = sum(group.tokens for group in groups) - owned
    nobody = not takers and any(node.drained for node in nodes)
    return TokenStatus(
        total,
        owned,
        unowned,
        # Pins are of this moment, what nobody has may be of one before.
        unowned if nobody else min(unowned, sum(1 for names in allowed.values() if not names)),
        sum(group.tokens for group in groups if group.next_node is not None),
        sum(group.overdue for group in groups),
        tuple(node.tokens for node in nodes),
        at,
    )


def _waiting(nodes: tuple[NodeStatus, ...], tokens: TokenStatus, pins: int) -> dict[str, int]:
    """How many tokens each node should get besides those on their way; only where that can be said from numbers."""
    if tokens.unowned > tokens.parked or any(node.condition == "away" for node in nodes):
        return {}
    kept = {node.name: node.tokens.owned - node.tokens.leaving for node in nodes}
    takers = [(node.name, node.weight, kept[node.name] + node.tokens.coming) for node in nodes if not node.drained]
    return due(takers, sum(kept[node.name] for node in nodes if node.drained), pins)


def _node(node: dict[str, Any], condition: Condition, leader: str | None, epoch: int, tokens: NodeTokens) -> NodeStatus:
    age, timeout = float(node["age"]), float(node["heartbeat_timeout_sec"])
    return NodeStatus(
        node["name"],
        condition,
        node["name"] == leader,
        node["can_lead"],
        node["weight"],
        node["labels"],
        node["host"],
        node["pid"],
        node["version"],
        datetime.datetime.fromisoformat(node["registered_at"]),
        datetime.datetime.fromisoformat(node["last_heartbeat"]),
        age,
        timeout,
        0.0 if condition == "away" else max(0.0, timeout - age),
        float(node["connection_grace_sec"]),
        float(node["rejoin_grace_sec"]),
        node["drained"],
        node["session_open"],
        max(0, epoch - node["applied_epoch"]),
        tokens,
    )


def _problems(
    nodes: tuple[NodeStatus, ...], tokens: TokenStatus, leader: str | None, resting: float | None
) -> tuple[str, ...]:
    found = []
    if not any(node.condition in ("live", "joining") for node in nodes):
        found.append("no node is live: nobody works on any token")
    elif leader is None:
        found.append("no live node may lead (can_lead=False everywhere): tokens of dead nodes stay where they are")
    if resting is not None:
        found.append(f"the cluster has been formed anew and rests for {resting:.0f} s: nobody owns anything until then")
    if tokens.parked:
        why = (
            "every live node is drained"
            if nodes and all(node.drained for node in nodes)
            else "their pins match no live node"
        )
        found.append(f"{counted(tokens.parked, 'token is', 'tokens are')} parked: {why}")
    if tokens.unowned > tokens.parked:
        found.append(f"{counted(tokens.unowned - tokens.parked, 'token has', 'tokens have')} no owner yet")
    if tokens.overdue:
        found.append(
            counted(
                tokens.overdue,
                "token should have been handed over by now: its owner still uses it",
                "tokens should have been handed over by now: their owners still use them",
            )
        )
    if tokens.holders:
        found.append(token_wait({node.node: node.waiting for node in tokens.nodes if node.waiting}, tokens.holders))
    # Last, as they may be many.
    found += [
        f"{node.name} is silent for {node.heartbeat_age_sec:.0f} s (process {node.pid} on {node.host})"
        for node in nodes
        if node.condition == "silent"
    ]
    found += [
        f"{node.name} is cut off: its session has ended (process {node.pid} on {node.host})"
        for node in nodes
        if node.condition == "cut off"
    ]
    return tuple(found)
