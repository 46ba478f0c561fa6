"""The store does what PostgreSQL does: the same statements, in random order, on both, with the same outcome."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import URL, Engine, create_engine, text

from jobsync_orm import migrate
from jobsync_orm.coordinator.session import array, parse_array
from jobsync_orm.coordinator.statements import PARK, Statements
from jobsync_orm.naming import Names
from tests.integration.coordinator.backstage import open_session
from tests.simulation.store import Backend, Claim, Pin, Store

TOKENS = 6
NODES = ("a", "b", "c")
SESSIONS = 2
SEQUENCES, STEPS = 25, 85
SQL = vars(Statements(Names()))
# All times are told apart by units of this many seconds; a sequence takes much less.
UNIT = 50
STATEMENTS = {
    "lock_node": 1,
    "find": 2,
    "register": 4,
    "void_claims": 1,
    "beat": 5,
    "members": 1,
    "leave": 1,
    "evict": 4,
    "drain": 2,
    "undrain": 2,
    "expel": 3,
    "end_rest": 4,
    "refresh": 4,
    "regain": 3,
    "release": 8,
    "snapshot": 3,
    "drop_orphaned_pins": 1,
    "tokens": 3,
    "publish": 12,
    "revision": 1,
    "cluster": 1,
    "identify": 1,
    "standing": 1,
    "adopt_history": 1,
    "reform": 1,
}
OTHER = {"pass time": 3, "hold": 3, "claim": 1, "pin": 2}


def age(text: str | None) -> int | None:
    """Seconds as units."""
    return None if text is None else round(float(text) / UNIT)


class Side:
    """One of the two databases. ``beats``: the heartbeat of each node as it was read last, in this side's own text."""

    def __init__(self) -> None:
        self.beats: dict[str, str | None] = {}
        self.started: str | None = None

    def execute(self, session: int, name: str, *parameters: Any) -> list[Any]:
        raise NotImplementedError

    def session_of(self, pid: object) -> int | None:
        raise NotImplementedError

    def learn(self, name: str, parameters: tuple[Any, ...], rows: list[Any]) -> list[Any]:
        """Note what later statements need of the answer, and return it in a form that can be compared."""
        if name == "find":
            if rows:
                self.beats[parameters[0]] = rows[0][2]
            return [
                (row[0], row[1], self.session_of(row[3]), age(row[6]), float(row[7]), float(row[8])) for row in rows
            ]
        if name == "beat":
            ((state, epoch, revision, pins_revision, oldest, seen, members, drained),) = rows
            lines = json.loads(seen or "[]") or []
            self.beats.update({line[0]: line[3] for line in lines})
            # Not the last one, whether the server took the heartbeat: each has been started at another time.
            lines = [
                (*line[:3], age(line[4]), self.session_of(line[5]), *map(float, line[6:9]), line[9]) for line in lines
            ]
            return [state, epoch, revision, pins_revision, json.loads(oldest or "[]") or [], lines, members, drained]
        if name == "refresh":
            ((state, epoch, owned, draining, marks, *counts, rest),) = rows
            lists = (sorted(parse_array(part)) for part in (owned, draining, marks))
            return [state, epoch, *lists, *counts, age(rest)]
        if name == "snapshot":
            ((revision, pins_revision, self.started, members, pins, expiry, orphaned, rest),) = rows
            lists = (json.loads(members or "[]") or [], sorted(json.loads(pins or "[]") or []))
            return [revision, pins_revision, *lists, age(expiry), orphaned, age(rest)]
        if name == "cluster":
            return [rows[0][:3], rows[0][3] is None]
        if name == "identify":
            return [len(rows)]  # each server has a history of its own
        if name == "reform":
            return [(epoch, age(rest), fences is None, *told) for epoch, rest, fences, *told in rows]
        if name == "tokens":
            return sorted(
                (
                    (node or "-", aim or "-", late, sorted(parse_array(some)), age(left))
                    for node, aim, late, some, left in rows
                ),
                key=str,
            )
        return sorted(rows, key=str)


class Simulated(Side):
    """The store."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 10_000.0
        self.store = Store(Names(), TOKENS, lambda: self.at)
        self.backends = [Backend(pid) for pid in range(SESSIONS)]

    def session_of(self, pid: object) -> int | None:
        return None if pid is None else int(str(pid))

    def execute(self, session: int, name: str, *parameters: Any) -> list[Any]:
        values = [None if p is None else ("t" if p else "f") if isinstance(p, bool) else str(p) for p in parameters]
        self.at += 0.001  # no two heartbeats are the same
        return self.store.execute(SQL[name], self.backends[session], self.store.now.snapshot(), values)

    def pass_time(self, seconds: float) -> None:
        self.at += seconds

    def hold(self, token: int, held: bool) -> None:
        self.store.shared[token] = int(held)

    def claim(self, task: str, claim: Claim) -> None:
        self.store.now.claims[task] = claim

    def pin(self, task: str, pin: Pin) -> None:
        expires_at = None if pin.expires_at is None else self.at + pin.expires_at
        self.store.now.pins[task] = pin._replace(created_at=self.at, expires_at=expires_at)

    def tables(self) -> dict[str, Any]:
        now = self.store.now
        return {
            "cluster": (
                *(now.epoch, now.revision, now.pins_revision, now.incarnation, now.history, sorted(now.drained)),
                None if now.rest_until is None else age(str(now.rest_until - self.at)),
            ),
            "node": sorted(
                (
                    *(n.name, n.ordinal, n.incarnation, n.join_epoch, n.applied_epoch, n.state, n.can_lead),
                    *(
                        n.expelled,
                        n.timeout,
                        n.rejoin,
                        self.session_of(n.backend_pid),
                        age(str(self.at - n.last_heartbeat)),
                    ),
                )
                for n in now.nodes.values()
            ),
            "token": [
                (t.node, t.epoch, t.next_node, t.next_epoch, age(str(t.deadline - self.at) if t.deadline else None))
                for t in now.tokens
            ],
            "claim": sorted((task, *claim) for task, claim in now.claims.items()),
            "lock": sorted(now.pins),
            "rebalance": self.store.rebalances,
        }


class Real(Side):
    """PostgreSQL, through the coordinator's own session."""

    def __init__(self, url: URL, engine: Engine, stack: ExitStack) -> None:
        super().__init__()
        self.sessions = [stack.enter_context(open_session(url)) for _ in range(SESSIONS)]
        self.connection = stack.enter_context(engine.connect()).execution_options(isolation_level="AUTOCOMMIT")
        self.holding = stack.enter_context(engine.connect())
        self.held: set[int] = set()
        for statement in (
            "TRUNCATE sync_node RESTART IDENTITY",
            "TRUNCATE sync_claim, sync_lock, sync_rebalance",
            "UPDATE sync_cluster SET epoch = 0, revision = 0, pins_revision = 0, history = NULL, rest_until = NULL,"
            " drained = '{}',"
            " incarnation = '00000000-0000-0000-0000-000000000000'",
            "UPDATE sync_token SET node = NULL, epoch = 0, next_node = NULL, next_epoch = NULL, drain_deadline = NULL",
        ):
            self.connection.execute(text(statement))

    def session_of(self, pid: object) -> int | None:
        return None if pid is None else [session.pid for session in self.sessions].index(int(str(pid)))

    def execute(self, session: int, name: str, *parameters: Any) -> list[Any]:
        return self.sessions[session].execute(SQL[name], *parameters, timeout=10)

    def _do(self, statement: str, **values: Any) -> None:
        self.connection.execute(text(statement), values)

    def pass_time(self, seconds: float) -> None:
        past = "- CAST(:seconds AS float8) * interval '1 second'"
        self._do(f"UPDATE sync_cluster SET rest_until = rest_until {past}", seconds=seconds)
        self._do(f"UPDATE sync_node SET last_heartbeat = last_heartbeat {past}", seconds=seconds)
        # By another table's row locks than an application's: what it holds must not be waited for.
        self.hold_again(
            lambda: self._do(f"UPDATE sync_token SET drain_deadline = drain_deadline {past}", seconds=seconds)
        )
        self._do(
            f"UPDATE sync_lock SET created_at = created_at {past}, expires_at = expires_at {past}", seconds=seconds
        )

    def hold_again(self, change: Any) -> None:
        self.holding.rollback()
        change()
        for token in self.held:
            self.holding.execute(text("SELECT 1 FROM sync_token WHERE token_id = :token FOR SHARE"), {"token": token})

    def hold(self, token: int, held: bool) -> None:
        (self.held.add if held else self.held.discard)(token)
        self.hold_again(lambda: None)

    def claim(self, task: str, claim: Claim) -> None:
        self._do(
            "INSERT INTO sync_claim (task_id, token_id, node, incarnation, epoch)"
            " VALUES (:task, :token_id, :node, CAST(:incarnation AS uuid), :epoch)",
            task=task,
            **claim._asdict(),
        )

    def pin(self, task: str, pin: Pin) -> None:
        self._do(
            "INSERT INTO sync_lock (task_id, token_id, node_patterns, created_at, created_by, expires_at, ephemeral)"
            " VALUES (:task, :token, CAST(:patterns AS jsonb), clock_timestamp(), :creator,"
            " clock_timestamp() + CAST(:expires AS float8) * interval '1 second', :ephemeral)",
            task=task,
            token=pin.token_id,
            patterns=json.dumps(pin.patterns),
            creator=pin.created_by,
            expires=pin.expires_at,
            ephemeral=pin.ephemeral,
        )

    def tables(self) -> dict[str, Any]:
        def rows(statement: str) -> list[tuple[Any, ...]]:
            return [tuple(row) for row in self.connection.execute(text(statement))]

        return {
            "cluster": next(
                (*row[:-2], sorted(row[-2]), age(row[-1]))
                for row in rows(
                    "SELECT epoch, revision, pins_revision, CAST(incarnation AS text), history, drained,"
                    " extract(epoch FROM rest_until - clock_timestamp()) FROM sync_cluster"
                )
            ),
            "node": [
                (*row[:-2], self.session_of(row[-2]), age(row[-1]))
                for row in rows(
                    "SELECT name, ordinal, CAST(incarnation AS text), join_epoch, applied_epoch, state, can_lead,"
                    " expelled, heartbeat_timeout_sec, rejoin_grace_sec, backend_pid,"
                    " extract(epoch FROM clock_timestamp() - last_heartbeat) FROM sync_node ORDER BY name"
                )
            ],
            "token": [
                (*row[:-1], age(row[-1]))
                for row in rows(
                    "SELECT node, epoch, next_node, next_epoch, extract(epoch FROM drain_deadline - clock_timestamp())"
                    " FROM sync_token ORDER BY token_id"
                )
            ],
            "claim": rows(
                "SELECT task_id, token_id, node, CAST(incarnation AS text), epoch FROM sync_claim ORDER BY task_id"
            ),
            "lock": [row[0] for row in rows("SELECT task_id FROM sync_lock ORDER BY task_id")],
            "rebalance": rows("SELECT trigger_reason, tokens_moved, epoch FROM sync_rebalance ORDER BY id"),
        }


class Driver:
    """Draws what to do next, from what the answers have told."""

    def __init__(self, rng: random.Random, sides: tuple[Simulated, Real]) -> None:
        self.rng = rng
        self.sides = sides
        self.lives: dict[str, list[str]] = {name: [str(uuid.UUID(int=rng.getrandbits(128)))] for name in NODES}
        self.marks: list[int] = [1]
        self.revision = self.epoch = self.members = 0
        self.cluster = ""
        self.drained: list[str] = []
        self.refreshed: tuple[Any, ...] = ("a", self.lives["a"][0])
        self.groups: list[tuple[str | None, str | None, list[int]]] = []
        self.joining: list[str] = []
        self.count = 0
        self.answered: dict[str, int] = {}

    def life(self, name: str) -> str:
        """Mostly the present one."""
        return self.lives[name][-1] if self.rng.random() < 0.9 else self.rng.choice(self.lives[name])

    def step(self) -> str:
        kinds = {**STATEMENTS, **OTHER}
        (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
        if kind in OTHER:
            return self._other(kind)
        if kind == "publish" and self.rng.random() < 0.8:  # as a leader does
            self._both("snapshot")
            self._both("tokens")
        elif kind == "release" and self.rng.random() < 0.8:
            self._both("refresh")
        return self._both(kind)

    def _both(self, kind: str) -> str:
        session = self.rng.randrange(SESSIONS)
        cluster = self.sides[0].store.now
        # before either side goes on
        self.epoch, self.cluster, self.members = cluster.epoch, cluster.incarnation, cluster.revision
        self.drained = sorted(cluster.drained)
        outcomes = []
        state = self.rng.getstate()
        for side in self.sides:
            self.rng.setstate(state)  # the same choices, with each side's own times
            parameters = getattr(self, "_" + kind, self._nothing)(side)
            rows = side.execute(session, kind, *parameters)
            outcomes.append((parameters, rows, side.learn(kind, parameters, rows)))
        (parameters, rows, simulated), (_, _, real) = outcomes
        assert simulated == real, f"{kind}{parameters}"
        self.answered[kind] = self.answered.get(kind, 0) + bool(rows)
        self._remember(kind, parameters, rows, simulated)
        return f"{kind}{parameters}"

    def _remember(self, kind: str, parameters: tuple[Any, ...], rows: list[Any], answer: list[Any]) -> None:
        if kind == "register" and rows:
            self.lives[parameters[0]].append(parameters[1])
        elif kind == "refresh":
            self.marks = [*answer[4], self.rng.randrange(1, 40)]
        elif kind == "snapshot":
            self.revision = int(answer[0])
            self.joining = [name for name, _, state, _ in answer[2] if state == "joining"]
        elif kind == "tokens":
            self.groups = [(row[0], row[1], sorted(parse_array(row[3]))) for row in rows]

    def _other(self, kind: str) -> str:
        rng = self.rng
        self.count += 1
        token, name = rng.randrange(TOKENS), rng.choice(NODES)
        if kind == "pass time":
            seconds = rng.choice((UNIT, UNIT, 2 * UNIT, 13 * UNIT))
            for side in self.sides:
                side.pass_time(seconds)
                side.beats.clear()
            return f"{seconds} s pass"
        if kind == "hold":
            held = rng.random() < 0.5
            for side in self.sides:
                side.hold(token, held)
            return f"token {token} held: {held}"
        if kind == "claim":
            claim = Claim(token, name, self.life(name), 1)
            for side in self.sides:
                side.claim(f"t{self.count}", claim)
            return f"{claim}"
        creator, expires = rng.choice((*NODES, "z")), rng.choice((None, 1.4 * UNIT, 2.4 * UNIT))
        pin = Pin(token, (name, "%"), creator, 0, expires, rng.random() < 0.5)
        for side in self.sides:
            side.pin(f"p{self.count}", pin)
        return f"{pin}"

    def _cluster_incarnation(self) -> str:
        return self.cluster if self.rng.random() < 0.8 else str(uuid.UUID(int=7))

    def _adopt_history(self, side: Side) -> tuple[Any, ...]:
        return self._cluster_incarnation(), self.rng.choice(("1/1", "1/2"))

    def _reform(self, side: Side) -> tuple[Any, ...]:
        rng, epoch = self.rng, self.epoch
        new, history = str(uuid.UUID(int=rng.getrandbits(128))), rng.choice((None, "1/1", "1/2"))
        return self._cluster_incarnation(), new, history, epoch + rng.choice((-1, 0, 1)), 1.4 * UNIT, rng.random() < 0.2

    def _oldest(self) -> str:
        nodes = self.sides[0].store.now.nodes.values()
        may_lead = [node for node in nodes if node.can_lead and node.state != "away"]
        return min(may_lead, key=lambda node: node.ordinal).name if may_lead else "a"

    # -- parameters --------------------------------------------------------------------------------------------

    def _nothing(self, side: Side) -> tuple[Any, ...]:
        return ()

    def _node(self, side: Side) -> tuple[Any, ...]:
        name = self.rng.choice(NODES)
        return name, self.life(name)

    _void_claims = _leave = _regain = _expel = _node

    def _end_rest(self, side: Side) -> tuple[Any, ...]:
        away = [(row.name, row.incarnation) for row in self.sides[0].store.now.nodes.values() if row.state == "away"]
        return self.rng.choice(away) if away and self.rng.random() < 0.9 else self._node(side)

    def _drain(self, side: Side) -> tuple[Any, ...]:
        return self.rng.choice(NODES), "me", "why", self.members + (self.rng.random() < 0.1)

    def _undrain(self, side: Side) -> tuple[Any, ...]:
        return (self.rng.choice(self.drained if self.drained and self.rng.random() < 0.9 else NODES),)

    def _refresh(self, side: Side) -> tuple[Any, ...]:
        asked = sorted({row.node for row in self.sides[0].store.now.tokens if row.node and row.next_node is not None})
        name = self.rng.choice(asked) if asked and self.rng.random() < 0.7 else self.rng.choice(NODES)
        self.refreshed = name, self.life(name)
        return self.refreshed

    def _name(self, side: Side) -> tuple[Any, ...]:
        return (self.rng.choice(NODES),)

    _lock_node = _find = _name

    def _register(self, side: Side) -> tuple[Any, ...]:
        rng, name = self.rng, self.rng.choice(NODES)
        replaced = (self.life(name), side.beats.get(name)) if rng.random() < 0.8 else (None, None)
        new = str(uuid.UUID(int=rng.getrandbits(128)))
        settings = (rng.random() < 0.8, rng.choice((1.4 * UNIT, 2.4 * UNIT)), 0.5, rng.choice((0.0, 1.4 * UNIT)))
        return name, new, *replaced, 1, *settings, "{}", "h", 1, "0", TOKENS + (rng.random() < 0.1)

    def _beat(self, side: Side) -> tuple[Any, ...]:
        name = self.rng.choice(NODES)
        return name, self.life(name), self.rng.randrange(40), self.rng.random() < 0.7, self.rng.random() < 0.7

    def _evict(self, side: Side) -> tuple[Any, ...]:
        known = [name for name in NODES if side.beats.get(name) and self.rng.random() < 0.7]
        freed = [self.rng.random() < 0.4 for _ in known]
        return array(known), array(map(self.life, known)), array(side.beats[name] for name in known), array(freed)

    def _release(self, side: Side) -> tuple[Any, ...]:
        name, life = self.refreshed if self.rng.random() < 0.8 else self._node(side)
        busy = [token for token in range(TOKENS) if self.rng.random() < 0.1]
        return name, life, array(self.marks), array(busy)

    def _publish(self, side: Side) -> tuple[Any, ...]:
        rng = self.rng
        me = self._oldest() if rng.random() < 0.85 else rng.choice(NODES)
        table = [*NODES, PARK, "z"]
        lows, sources, marks, kinds, targets = [], [], [], [], []
        for node, aim, tokens in self.groups:
            for token in tokens:
                if rng.random() < 0.6:
                    lows.append(token)
                    sources.append(None if node is None else table.index(node) + 1)
                    marks.append(None if aim is None else table.index(aim) + 1)
                    usual = (0,) if node is None else (1,) if aim is None else (2, 3)
                    kinds.append(rng.choice(usual if rng.random() < 0.8 else (0, 1, 2, 3)))
                    targets.append(rng.choice((1, 2, 3, 3, 4) if kinds[-1] == 1 else (1, 2, 3, None)))
        revision = self.revision if rng.random() < 0.9 else self.revision + 1
        columns = (array(lows), array(lows), array(sources), array(marks), array(table), array(kinds), array(targets))
        return (
            *(me, self.life(me), revision, array(self.joining), *columns, rng.choice((0.4 * UNIT, 1.4 * UNIT))),
            *(side.started or "2026-01-01", "join", 1, 2, "{x,y}"),
            self.epoch + (rng.random() < 0.05),
        )


@pytest.fixture(scope="module")
def small(server: Any) -> Iterator[URL]:
    url = server.create_database()
    engine = create_engine(url)
    migrate.upgrade(engine, total_tokens=TOKENS)
    engine.dispose()
    yield url
    server.drop_database(url)


@pytest.mark.slow
def test_the_store_does_what_postgresql_does(small: URL) -> None:
    engine = create_engine(small)
    answered: dict[str, int] = {}
    for seed in range(SEQUENCES):
        with ExitStack() as stack:
            sides = (Simulated(), Real(small, engine, stack))
            driver = Driver(random.Random(seed), sides)
            done: list[str] = []
            for _ in range(STEPS):
                try:
                    done.append(driver.step())
                    simulated, real = (side.tables() for side in sides)
                    assert simulated == real
                except AssertionError as error:
                    error.add_note(f"sequence {seed}, after:\n" + "\n".join(done[-12:]))
                    raise
            for name, count in driver.answered.items():
                answered[name] = answered.get(name, 0) + count
    engine.dispose()
    for name in STATEMENTS:
        silent = ("void_claims", "drop_orphaned_pins", "adopt_history")  # these answer nothing
        least = 0 if name in silent else SEQUENCES // 5
        assert answered[name] >= least, f"{name} has hardly ever had anything to do: {answered}"


def test_every_statement_is_compared() -> None:
    assert set(SQL) - {"drop_old_session"} == set(STATEMENTS)
