"""What the database does with each of the coordinator's statements, in memory.

A statement of :class:`~jobsync_orm.coordinator.statements.Statements` is recognised by its text and carried out by the
method of the same name, with parameters and rows as text, as the real session has them. ``test_conformance.py`` runs
both sides by side, so that the two do not drift apart.

Under READ COMMITTED a statement reads one snapshot, taken when it starts, and changes rows as they are when it gets to
them. So each method is given two states: ``seen``, the snapshot, and ``self.now``, which it may change. A token that is
locked by an application, or has changed since the snapshot, is skipped, as SKIP LOCKED and the update by ctid do.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jobsync_orm.coordinator.statements import LEAP, PARK, Statements
from jobsync_orm.naming import Names

Row = tuple[str | None, ...]


class Node(NamedTuple):
    name: str
    ordinal: int
    incarnation: str
    join_epoch: int
    last_heartbeat: float
    applied_epoch: int
    state: str
    weight: int
    can_lead: bool
    timeout: float
    grace: float
    rejoin: float
    host: str
    pid: int
    backend_pid: int | None
    expelled: bool = False


class Token(NamedTuple):
    node: str | None = None
    epoch: int = 0
    next_node: str | None = None
    next_epoch: int | None = None
    deadline: float | None = None


class Pin(NamedTuple):
    token_id: int
    patterns: tuple[str, ...]
    created_by: str = ""
    created_at: float = 0.0
    expires_at: float | None = None
    ephemeral: bool = False


class Claim(NamedTuple):
    token_id: int
    node: str
    incarnation: str
    epoch: int


class Tables:
    """All rows at one moment. Rows are never changed, only replaced: a row is the same if it is the same object."""

    __slots__ = (
        *("claims", "drained", "epoch", "history", "incarnation", "nodes", "pins", "pins_revision", "rest_until"),
        *("revision", "tokens"),
    )

    def __init__(self, total_tokens: int) -> None:
        self.epoch = self.revision = self.pins_revision = 0
        self.incarnation = "00000000-0000-0000-0000-000000000000"
        self.history: str | None = None
        self.rest_until: float | None = None
        self.drained: frozenset[str] = frozenset()
        self.nodes: dict[str, Node] = {}
        self.tokens = [Token() for _ in range(total_tokens)]
        self.pins: dict[str, Pin] = {}
        self.claims: dict[str, Claim] = {}

    def snapshot(self) -> Tables:
        copy = Tables.__new__(Tables)
        copy.epoch, copy.revision, copy.pins_revision = self.epoch, self.revision, self.pins_revision
        copy.incarnation, copy.history, copy.rest_until = self.incarnation, self.history, self.rest_until
        copy.nodes, copy.pins, copy.claims = dict(self.nodes), dict(self.pins), dict(self.claims)
        copy.tokens, copy.drained = list(self.tokens), self.drained
        return copy


class Backend:
    """The server's end of a connection, as far as statements care."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.channels: set[str] = set()


class Store:
    """The tables, the advisory locks, and the statements.

    Parameters
    ----------
    names : Names
        The cluster.
    total_tokens : int
        How many token rows there are.
    clock : callable
        The database's clock, in seconds.
    weakened : iterable of str
        Conditions left out of the statements, to show that the checks notice: ``release_any_mark``,
        ``force_without_applied``, ``publish_any_revision``, ``refresh_any_epoch``,
        ``evict_any_heartbeat``, ``reform_without_rest``, ``drained_is_gone``, ``expel_evicts``.
    """

    def __init__(
        self, names: Names, total_tokens: int, clock: Callable[[], float], weakened: Iterable[str] = ()
    ) -> None:
        self.names = names
        self.clock = clock
        self.weakened = frozenset(weakened)
        self.now = Tables(total_tokens)
        self.shared: Counter[int] = Counter()  # tokens whose rows applications hold FOR SHARE
        self.held: dict[str, Backend] = {}  # node name -> backend that has its advisory lock
        self.rebalances: list[tuple[str, int, int]] = []  # reason, tokens moved, epoch
        self.notified: list[str] = []  # channels of the statement at hand
        self.ended: list[int] = []  # backends the statement at hand wants ended
        self.history = "1/1"  # what the server says of itself
        self.started_at = 0.0  # the server
        self.on_token: Callable[[int, Token, Token], None] = lambda token, old, new: None
        self.on_refresh: Callable[[str, dict[int, bool]], None] = lambda incarnation, owned: None  # and still current
        self._ordinal = 0
        self._methods: dict[str, tuple[str, Callable[..., list[Row]]]] = {
            sql: (name, getattr(self, name)) for name, sql in vars(Statements(names)).items()
        }

    def name_of(self, sql: str) -> str:
        """The name of a statement of ``Statements``."""
        return self._methods[sql][0]

    def promote(self, standby: Tables) -> None:
        """The server is gone, with whatever its standby, which goes on in a history of its own, has not received."""
        self.now = standby.snapshot()
        self.started_at = 0.0  # it has been running all the time
        self.history = f"1/{int(self.history[2:]) + 1}"
        self.shared.clear()
        self.held.clear()

    def execute(self, sql: str, backend: Backend, seen: Tables, parameters: Iterable[str | None]) -> list[Row]:
        """Carry out one statement that saw ``seen`` when it started."""
        self.notified, self.ended = [], []
        return self._methods[sql][1](seen, backend, *parameters)

    # -- helpers -----------------------------------------------------------------------------------------------

    def _write(self, token: int, new: Token) -> None:
        old, self.now.tokens[token] = self.now.tokens[token], new
        self.on_token(token, old, new)

    def _lockable(self, seen: Tables, token: int) -> bool:
        return not self.shared[token] and self.now.tokens[token] is seen.tokens[token]

    def _next_epoch(self, *, members: bool) -> int:
        self.now.epoch += 1
        self.now.revision += members
        return self.now.epoch

    def _life(self, tables: Tables, name: str | None, incarnation: str | None) -> Node | None:
        """The row of this life of the node, if it is live."""
        row = tables.nodes.get(name or "")
        return row if row is not None and row.incarnation == incarnation and row.state != "away" else None

    def _wanted(self, row: Node | None) -> Node | None:
        """``row`` unless an operator has ended this life."""
        return None if row is None or row.expelled else row

    def _drop_pins_of(self, dead: list[str]) -> None:
        self.now.pins = {t: p for t, p in self.now.pins.items() if not (p.ephemeral and p.created_by in dead)}

    def _drop_claims_of(self, *life: str) -> None:
        claims = self.now.claims.items()
        self.now.claims = {task: claim for task, claim in claims if (claim.node, claim.incarnation) != life}

    def _notify(self, channel: str) -> str:
        self.notified.append(channel)
        return ""

    # -- session -----------------------------------------------------------------------------------------------

    def cluster(self, seen: Tables, backend: Backend) -> list[Row]:
        return [
            (
                *(str(len(seen.tokens)), "double_sha256", "1"),
                *(None if seen.rest_until is None else _time(seen.rest_until), None),
            )
        ]

    # -- the database's history --------------------------------------------------------------------------------

    def identify(self, seen: Tables, backend: Backend) -> list[Row]:
        return [(self.history,)]

    def standing(self, seen: Tables, backend: Backend) -> list[Row]:
        return [(seen.incarnation, seen.history, str(seen.epoch))]

    def adopt_history(self, seen: Tables, backend: Backend, incarnation: str, history: str) -> list[Row]:
        if self.now.incarnation == incarnation and self.now.history is None:
            self.now.history = history
        return []

    def reform(
        self,
        seen: Tables,
        backend: Backend,
        incarnation: str,
        new: str,
        history: str | None,
        known: str,
        rest: str,
        forced: str,
    ) -> list[Row]:
        cluster = self.now
        reason = forced == "t" or cluster.epoch < int(known) or cluster.history != (history or cluster.history)
        if cluster.incarnation != incarnation or not reason:
            return []
        cluster.incarnation, cluster.history = new, history or cluster.history
        epoch = cluster.epoch = max(cluster.epoch, int(known)) + LEAP
        cluster.revision += 1
        longest = max([float(rest), *(row.timeout for row in seen.nodes.values())])
        longest *= "reform_without_rest" not in self.weakened
        cluster.rest_until = self._timestamp() + longest
        gone = [row for row in cluster.nodes.values() if row.state != "away" and row.name in seen.nodes]
        for row in gone:
            if row.rejoin > 0:
                cluster.nodes[row.name] = row._replace(state="away", last_heartbeat=self._timestamp(), backend_pid=None)
            else:
                del cluster.nodes[row.name]
        for token, row in enumerate(seen.tokens):
            if self._lockable(seen, token):
                self._write(token, Token(row.node, epoch, row.node, None if row.node is None else epoch))
        cluster.claims = {}
        told = [self._notify(channel) for channel in (self.names.node_channel(row.name) for row in gone)]
        return [(str(epoch), str(longest), "1", self._notify(self.names.cluster_channel), str(len(told)))]

    def _rests(self, tables: Tables) -> bool:
        return tables.rest_until is not None and tables.rest_until > self.clock()

    def _rest(self, tables: Tables) -> str | None:
        return None if tables.rest_until is None else str(tables.rest_until - self.clock())

    def lock_node(self, seen: Tables, backend: Backend, name: str) -> list[Row]:
        return [("t" if self.held.setdefault(name, backend) is backend else "f",)]

    def drop_old_session(self, seen: Tables, backend: Backend, name: str, pid: str) -> list[Row]:
        if not self._holds(name, int(pid)):
            return []
        self.ended.append(int(pid))
        return [("t",)]

    def _holds(self, name: str, pid: int | None) -> bool:
        holder = self.held.get(name)
        return holder is not None and holder.pid == pid

    # -- membership --------------------------------------------------------------------------------------------

    def find(self, seen: Tables, backend: Backend, name: str) -> list[Row]:
        row = seen.nodes.get(name)
        if row is None:
            return []
        age = self.clock() - row.last_heartbeat
        return [
            (
                *(row.incarnation, row.state, _time(row.last_heartbeat), _text(row.backend_pid), row.host),
                *(str(row.pid), str(age), str(row.timeout), str(row.grace)),
                "t" if self.started_at <= row.last_heartbeat <= self.clock() else "f",
            )
        ]

    def register(
        self,
        seen: Tables,
        backend: Backend,
        name: str,
        incarnation: str,
        old_incarnation: str | None,
        old_beat: str | None,
        weight: str,
        can_lead: str,
        timeout: str,
        grace: str,
        rejoin: str,
        labels: str,
        host: str,
        pid: str,
        version: str,
        total_tokens: str,
    ) -> list[Row]:
        if int(total_tokens) != len(self.now.tokens):
            return []
        epoch = self._next_epoch(members=True)
        self._ordinal += 1
        old = self.now.nodes.get(name)
        same = old is not None and (old.incarnation, _time(old.last_heartbeat)) == (old_incarnation, old_beat)
        if old is not None and old.state != "away" and not same:
            return []
        self.now.nodes[name] = Node(
            *(name, self._ordinal, incarnation, epoch, self._timestamp(), 0, "joining", int(weight), can_lead == "t"),
            *(float(timeout), float(grace), float(rejoin), host, int(pid), backend.pid),
        )
        for token, row in enumerate(seen.tokens):
            if row.node == name and self._lockable(seen, token):
                self._write(token, Token(name, epoch, name, epoch) if self._rests(self.now) else Token(name, epoch))
        return [(str(epoch), self._notify(self.names.cluster_channel))]

    def void_claims(self, seen: Tables, backend: Backend, name: str, incarnation: str) -> list[Row]:
        self.now.claims = {
            task: claim
            for task, claim in self.now.claims.items()
            if claim.node != name or claim.incarnation == incarnation
        }
        return []

    def beat(
        self, seen: Tables, backend: Backend, name: str, incarnation: str, applied: str, everyone: str, locks: str
    ) -> list[Row]:
        now = self._timestamp()
        mine = self._wanted(self._life(self.now, name, incarnation))
        if mine is not None:
            self.now.nodes[name] = mine._replace(
                last_heartbeat=now, applied_epoch=max(mine.applied_epoch, int(applied)), backend_pid=backend.pid
            )
        rows = sorted(seen.nodes.values(), key=_ordinal)
        oldest = [row.name for row in rows if row.can_lead and row.state != "away"][:3]
        lines = [
            [
                *(row.name, row.incarnation, row.state, _time(row.last_heartbeat), now - row.last_heartbeat),
                *(row.backend_pid, row.timeout, row.grace, row.rejoin),
                self._holds(row.name, row.backend_pid) if locks == "t" else None,
                self.started_at <= row.last_heartbeat <= now if locks == "t" else None,
            ]
            for row in rows
            if everyone == "t" or row.name in oldest
        ]
        state = mine.state if mine is not None else None
        live = sum(row.state != "away" for row in rows)
        revisions = (str(seen.epoch), str(seen.revision), str(seen.pins_revision))
        return [(state, *revisions, _json(oldest), _json(lines), str(live), "t" if name in seen.drained else "f")]

    def members(self, seen: Tables, backend: Backend) -> list[Row]:
        rows = sorted(seen.nodes.values(), key=_ordinal)
        return [(_json([row.name for row in rows if row.state != "away"]),)]

    def leave(self, seen: Tables, backend: Backend, name: str, incarnation: str) -> list[Row]:
        self._next_epoch(members=True)
        row = self.now.nodes.get(name)
        gone = row is not None and row.incarnation == incarnation
        self._drop_claims_of(name, incarnation)
        if row is None or not gone:
            return []
        self._retire(row, row.rejoin > 0)
        return [(self._notify(self.names.cluster_channel),)]

    def _retire(self, row: Node, rests: bool) -> None:
        """A life is over: the row rests, or goes with what hangs on it."""
        if rests:
            self.now.nodes[row.name] = row._replace(state="away", last_heartbeat=self._timestamp(), backend_pid=None)
        else:
            del self.now.nodes[row.name]
            self._drop_pins_of([row.name])

    def evict(self, seen: Tables, backend: Backend, names: str, incarnations: str, beats: str, freed: str) -> list[Row]:
        self._next_epoch(members=True)
        gone = []
        for name, incarnation, beat, free in zip(*map(_list, (names, incarnations, beats, freed)), strict=True):
            row = self.now.nodes.get(name or "")
            if row is None or name not in seen.nodes or row.incarnation != incarnation:
                continue
            if _time(row.last_heartbeat) == beat and self._is_dead(row, free == "t"):
                gone.append(row)
        for row in gone:
            self._retire(row, row.rejoin > 0 and row.state != "away")
            self._drop_claims_of(row.name, row.incarnation)
        return [(row.name, self._notify(self.names.cluster_channel)) for row in gone]

    def _is_dead(self, row: Node, freed: bool) -> bool:
        if row.state == "away":
            return row.last_heartbeat + row.rejoin < self.clock()
        if freed:
            return not self._holds(row.name, row.backend_pid)
        return row.last_heartbeat + row.timeout < self.clock() or "evict_any_heartbeat" in self.weakened

    # -- what an operator says ---------------------------------------------------------------------------------

    def drain(self, seen: Tables, backend: Backend, name: str, by: str, reason: str, revision: str) -> list[Row]:
        if str(self.now.revision) != revision or name in self.now.drained:
            return []
        self.now.drained |= {name}
        self.now.revision += 1
        told = self._notify(self.names.cluster_channel), self._notify(self.names.queue_channel)
        return [(str(self.now.revision), *told)]

    def undrain(self, seen: Tables, backend: Backend, name: str) -> list[Row]:
        if name not in self.now.drained:
            return []
        self.now.drained -= {name}
        self.now.revision += 1
        told = self._notify(self.names.cluster_channel), self._notify(self.names.queue_channel)
        return [(str(self.now.revision), *told)]

    def expel(self, seen: Tables, backend: Backend, name: str, incarnation: str) -> list[Row]:
        row = self._life(self.now, name, incarnation)
        if row is None:
            return []
        self.now.nodes[name] = row._replace(expelled=True)
        if "expel_evicts" in self.weakened:
            self._next_epoch(members=True)
            self._retire(row, False)
        channels = (self.names.node_channel(name), self.names.cluster_channel)
        return [(name, *map(self._notify, channels))]

    def end_rest(self, seen: Tables, backend: Backend, name: str, incarnation: str) -> list[Row]:
        row = self.now.nodes.get(name)
        if row is None or row.incarnation != incarnation or row.state != "away":
            return []
        self.now.nodes[name] = row._replace(rejoin=0.0)
        return [(name, self._notify(self.names.cluster_channel))]

    # -- tokens of one node ------------------------------------------------------------------------------------

    def refresh(self, seen: Tables, backend: Backend, name: str, incarnation: str) -> list[Row]:
        life = self._wanted(self._life(seen, name, incarnation))
        owned, draining, marks, coming, earlier = [], [], set(), 0, 0
        for token, row in enumerate(seen.tokens):
            coming += row.next_node == name
            if row.node != name:
                continue
            if row.next_node is not None:
                draining.append(token)
                marks.add(row.next_epoch or 0)
            elif life is not None and (row.epoch >= life.join_epoch or "refresh_any_epoch" in self.weakened):
                owned.append(token)
            elif life is not None:
                earlier += 1
        if life is not None:
            now = self.now.tokens  # a mark made meanwhile takes nothing away yet
            mine = [*owned, *(token for token in draining if seen.tokens[token].epoch >= life.join_epoch)]
            self.on_refresh(incarnation, {token: seen.tokens[token][:2] == now[token][:2] for token in mine})
        state = life.state if life is not None else None
        lists = (_array(owned), _array(draining), _array(sorted(marks)))
        return [(state, str(seen.epoch), *lists, str(coming), str(earlier), self._rest(seen))]

    def regain(self, seen: Tables, backend: Backend, name: str, incarnation: str) -> list[Row]:
        life = self._life(seen, name, incarnation) if not self._rests(seen) else None
        mine = [
            token
            for token, row in enumerate(seen.tokens)
            if life is not None and row.node == name and row.epoch < life.join_epoch and row.next_node is None
            if self._lockable(seen, token)
        ]
        if mine:
            epoch = self._next_epoch(members=False)
            for token in mine:
                self._write(token, Token(name, epoch))
        return [(str(len(mine)),)]

    def release(self, seen: Tables, backend: Backend, name: str, incarnation: str, marks: str, busy: str) -> list[Row]:
        row = seen.nodes.get(name)
        if row is None or row.incarnation != incarnation or self._rests(seen):
            return []
        answered, kept = _ints(marks), _ints(busy)
        claimed = {claim.token_id for claim in seen.claims.values() if claim.node == name}
        given: Counter[str | None] = Counter()
        for token, mark in enumerate(seen.tokens):
            if mark.node != name or mark.next_node is None or token in kept:
                continue
            if token in claimed and mark.next_node != name:
                continue
            if mark.next_epoch not in answered and "release_any_mark" not in self.weakened:
                continue
            target = seen.nodes.get(mark.next_node)
            if mark.next_node != PARK and (target is None or target.state == "away"):
                continue
            if self._lockable(seen, token):
                self._write(token, Token(mark.next_node or None, mark.next_epoch or 0))
                given[mark.next_node or None] += 1
        return [
            (to, str(count), None if to is None else self._notify(self.names.node_channel(to)))
            for to, count in given.items()
        ]

    # -- the plan ----------------------------------------------------------------------------------------------

    def _orphaned(self, tables: Tables, pin: Pin) -> bool:
        return pin.ephemeral and pin.created_at < self.clock() - 60 and pin.created_by not in tables.nodes

    def snapshot(self, seen: Tables, backend: Backend) -> list[Row]:
        now = self.clock()
        rows = sorted(seen.nodes.values(), key=_ordinal)
        if "drained_is_gone" in self.weakened:
            rows = [row for row in rows if row.name not in seen.drained]
        members = [[row.name, row.weight, row.state, row.name in seen.drained] for row in rows]
        pins = [[p.token_id, p.patterns] for p in seen.pins.values() if p.expires_at is None or p.expires_at > now]
        expiry = min((p.expires_at for p in seen.pins.values() if p.expires_at and p.expires_at > now), default=None)
        orphaned = any(self._orphaned(seen, pin) for pin in seen.pins.values())
        left = None if expiry is None else str(expiry - now)
        revisions = (str(seen.revision), str(seen.pins_revision))
        lists = (_json(members), _json(pins))
        return [(*revisions, _time(now), *lists, left, "t" if orphaned else "f", self._rest(seen))]

    def drop_orphaned_pins(self, seen: Tables, backend: Backend) -> list[Row]:
        self.now.pins = {task: pin for task, pin in self.now.pins.items() if not self._orphaned(seen, pin)}
        return []

    def tokens(self, seen: Tables, backend: Backend) -> list[Row]:
        groups: dict[tuple[str | None, str | None, bool], tuple[list[int], list[float]]] = {}
        for token, row in enumerate(seen.tokens):
            overdue = self._overdue(seen, row)
            tokens, deadlines = groups.setdefault((row.node, row.next_node, overdue), ([], []))
            tokens.append(token)
            if row.deadline is not None:
                deadlines.append(row.deadline)
        return [
            (
                *(node, next_node, "t" if overdue else "f", _array(tokens)),
                str(min(deadlines) - self.clock()) if deadlines else None,
            )
            for (node, next_node, overdue), (tokens, deadlines) in groups.items()
        ]

    def _overdue(self, tables: Tables, row: Token) -> bool:
        owner = tables.nodes.get(row.node or "")
        if row.deadline is None or row.next_epoch is None or owner is None or owner.state == "away":
            return False
        applied = owner.applied_epoch >= row.next_epoch or "force_without_applied" in self.weakened
        return row.deadline < self.clock() and applied

    def publish(
        self,
        seen: Tables,
        backend: Backend,
        me: str,
        incarnation: str,
        revision: str,
        joining: str,
        lows: str,
        highs: str,
        sources: str,
        marks: str,
        table: str,
        kinds: str,
        targets: str,
        drain: str,
        started: str,
        reason: str,
        before: str,
        after: str,
        channels: str,
        known: str,
    ) -> list[Row]:
        row = seen.nodes.get(me)
        if row is None or row.incarnation != incarnation or not row.can_lead:
            return []
        rivals = (o for o in seen.nodes.values() if o.can_lead and o.state != "away")
        if any(rival.ordinal < row.ordinal for rival in rivals):
            return []
        names = _list(table)

        def named(index: str | None) -> str | None:
            return None if index is None else names[int(index) - 1]

        free: list[tuple[int, str, str | None]] = []
        columns = map(_list, (lows, highs, sources, marks, kinds, targets))
        for low, high, source, marked, kind, target in zip(*columns, strict=True):
            for token in range(int(low or 0), int(high or 0) + 1):
                old = seen.tokens[token]
                as_read = (old.node, old.next_node) == (named(source), named(marked))
                if not as_read:
                    continue
                if kind == "3" and not self._overdue(seen, old):
                    continue
                if self._lockable(seen, token):
                    free.append((token, kind or "", named(target)))
        new = _list(joining)
        current = str(self.now.revision) == revision or "publish_any_revision" in self.weakened
        resting = self.now.rest_until is not None and self.now.rest_until >= self.clock()
        if not current or not (free or new) or resting or self.now.epoch < int(known):
            return []
        epoch = self._next_epoch(members=False)
        for name in new:
            node = self.now.nodes.get(name or "")
            if node is not None and node.state == "joining":
                self.now.nodes[node.name] = node._replace(state="active")
        moved = 0
        for token, kind, target in free:
            moved += kind in "01"
            if kind in "03":
                self._write(token, Token(target, epoch))
            else:
                old = self.now.tokens[token]
                mark = (target, epoch, self.clock() + float(drain)) if kind == "1" else (None, None, None)
                self._write(token, Token(old.node, old.epoch, *mark))
        if moved:
            self.rebalances.append((reason, moved, epoch))
        for channel in _list(channels):
            self._notify(channel or "")
        return [(str(epoch), str(len(free)), str(moved), str(len(_list(channels))))]

    def revision(self, seen: Tables, backend: Backend) -> list[Row]:
        return [(str(seen.revision),)]

    def _timestamp(self) -> float:
        return round(self.clock(), 6)


def _ordinal(row: Node) -> int:
    return row.ordinal


def _time(seconds: float) -> str:
    return f"{seconds:.6f}"


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _json(value: list[Any]) -> str | None:
    return json.dumps(value) if value else None


def _array(values: list[int]) -> str | None:
    return "{" + ",".join(map(str, values)) + "}" if values else None


def _ints(text: str) -> set[int]:
    return {int(item) for item in text[1:-1].split(",") if item}


def _list(text: str | None) -> list[str | None]:
    """The elements of an array's text, as ``coordinator.session.array`` writes it."""
    items: list[str | None] = []
    rest = (text or "{}")[1:-1]
    while rest:
        if rest[0] == '"':
            item, at = [], 1
            while rest[at] != '"':
                at += rest[at] == "\\"
                item.append(rest[at])
                at += 1
            items.append("".join(item))
            rest = rest[at + 2 :]
        else:
            plain, _, rest = rest.partition(",")
            items.append(None if plain == "NULL" else plain)
    return items
