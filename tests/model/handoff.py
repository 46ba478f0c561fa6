"""The hand-off protocol as a small machine, searched through every interleaving.

One token, a few peers, epochs up to a bound. A *peer* is a worker process together with its row in the database; the
database is the token row, the cluster's epoch and the peers' rows. Every statement is one atomic step; before it there
is the step that sends it, after it the one that takes the answer, and anything may happen in between. Time has no
numbers: a lease may run out whenever it is not renewed, and whoever must wait for that waits for that step.

    python -m tests.model.handoff [--peers 2] [--epochs 3] [--states 5000000] [--off SAFEGUARD]

Breadth first, so that the first violation found is a shortest one. What is looked for:

* two live peers say yes to the token;
* a commit by a peer that does not own the token;
* a commit of work begun under an earlier grant: the token went away and came back meanwhile;
* a commit of work begun in an earlier life of the name, while the present life owns the token;
* a commit with a lower fencing number than one before it.

Each of ``SAFEGUARDS`` can be switched off; then one of these is found. The same protocol in full, with time, a network
and the real code, is in ``tests/simulation``; change both together.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["EVENTS", "SAFEGUARDS", "Found", "Protocol", "Safeguard", "search"]


@dataclass(frozen=True)
class Safeguard:
    """What is no longer done if it is switched off; and where a short search finds the consequence."""

    otherwise: str
    epochs: int = 3
    never: frozenset[str] = frozenset()


EVENTS = frozenset({"beat", "lapse", "evict", "work", "break", "kill", "leave", "rejoin"})

SAFEGUARDS = {
    "release names its mark": Safeguard(
        "a release lets go of whatever mark the token has, not only of the one it answers",
        epochs=4,
        never=EVENTS - {"break"},
    ),
    "force after applied": Safeguard("an overdue mark is forced although its owner has not said that it has seen it"),
    "evict after the lease": Safeguard("a peer is evicted while its lease runs"),
    "lease from sending": Safeguard(
        "an answer that comes late renews the lease from when it came",
        never=EVENTS - {"beat", "lapse", "evict"},
    ),
    "grace on the fast path": Safeguard("a freed lock convicts although the peer may not have noticed yet"),
    "plan names the revision": Safeguard(
        "a plan is published although a peer has come or gone since it was read",
        epochs=4,
        never=EVENTS - {"beat", "leave", "rejoin"},
    ),
    "earlier life counts for nothing": Safeguard(
        "a new life says yes to tokens that were granted to an earlier one", never=EVENTS - {"work", "leave", "rejoin"}
    ),
    "fence": Safeguard("commits are not checked"),
    "fence compares epochs": Safeguard("a commit checks the owner's name only"),
    "epoch of the begin": Safeguard("a commit compares with the epoch its peer knows at the commit"),
}


class Peer(NamedTuple):
    """A process and its row."""

    alive: bool = True
    member: bool = True  # the row of its present life is there
    lock: bool = True  # its session holds the advisory lock
    linked: bool = True  # it has not noticed a break of its connection
    certain: bool = True  # it has taken a view on this connection
    lease: bool = True
    owns: bool = False  # its view
    known: int = 1  # epoch of the view; 0: no life
    grant: int = 0  # epoch of the grant that the view showed; only the checks look at it
    mark: int = 0  # mark it has seen and not answered
    applied: int = 1  # of the row: newest epoch it has said to know
    joined: int = 1  # of the row: epoch of its registration
    work: tuple[int, int, int] | tuple[()] = ()  # known, grant and life at its begin
    sent: tuple[str, int] | tuple[()] = ()  # statement on its way, or waiting at the server
    answer: tuple[object, ...] = ()  # on its way back
    late: tuple[str, int] | tuple[()] = ()  # statement of a lost connection that the server may still carry out

    @property
    def says_yes(self) -> bool:
        return self.alive and self.owns and self.lease and self.certain


class State(NamedTuple):
    """Everything at one moment. ``plan`` is what a leader has read and may publish: step, as read, target."""

    peers: tuple[Peer, ...]
    owner: int | None = 0
    since: int = 1  # epoch at which the owner got the token: its fencing number
    target: int | None = None
    mark: int = 0
    epoch: int = 1
    plan: tuple[str, int | None, int | None, int | None] | tuple[()] = ()
    plan_stands: bool = False  # no peer has come or gone since it was read
    committed: int = 0  # highest fencing number of a commit
    wrong: str = ""

    def peer(self, i: int, **changes: object) -> State:
        peers = self.peers
        return self._replace(peers=(*peers[:i], peers[i]._replace(**changes), *peers[i + 1 :]))

    def granted(self, i: int | None, epoch: int) -> State:
        return self._replace(owner=i, since=epoch, target=None, mark=0)

    def member_changed(self) -> State:
        return self._replace(epoch=self.epoch + 1, plan_stands=False)


Move = tuple[str, State]


@dataclass(frozen=True)
class Protocol:
    """The rules.

    Parameters
    ----------
    peers : int
        How many.
    epochs : int
        No step that would raise the cluster's epoch above this is taken.
    off : frozenset of str
        Names of ``SAFEGUARDS`` that do not hold.
    never : frozenset of str
        Kinds of ``EVENTS`` left out, to look deeper elsewhere.
    """

    peers: int = 2
    epochs: int = 3
    off: frozenset[str] = frozenset()
    never: frozenset[str] = frozenset()

    def first(self) -> State:
        """All are members, and peer 0 owns the token."""
        rest = (Peer() for _ in range(self.peers - 1))
        return State((Peer(owns=True, grant=1), *rest))

    def moves(self, s: State) -> Iterator[Move]:
        """What may happen next."""
        for i, p in enumerate(s.peers):
            yield from self._statements(s, i, p)
            if p.alive:
                yield from self._process(s, i, p)
            if not p.alive and "rejoin" not in self.never:
                yield f"{i} is started again", s.peer(i, alive=True, known=0, linked=True, lock=True, certain=False)
            if p.member and s.epoch < self.epochs and self._is_dead(p) and "evict" not in self.never:
                yield f"the leader evicts {i}", s.peer(i, member=False).member_changed()
        yield from self._leader(s)

    # -- one process -------------------------------------------------------------------------------------------

    def _process(self, s: State, i: int, p: Peer) -> Iterator[Move]:
        if p.linked and p.known and not p.sent and not p.answer:
            if "beat" not in self.never:
                yield f"{i} sends a heartbeat, applied {p.known}", s.peer(i, sent=("beat", p.known))
            yield f"{i} asks for its view", s.peer(i, sent=("refresh", 0))
            if p.mark:
                yield f"{i} sends the release of mark {p.mark}", s.peer(i, sent=("release", p.mark))
        if p.answer:
            yield f"{i} takes the answer: {p.answer[0]}", self._answered(s, i, p)
        if p.lease and "lapse" not in self.never:
            late_answer = p.answer
            if p.answer[:1] == ("beat",) and "lease from sending" not in self.off:
                late_answer = ("beat", False)  # the time is counted from when it was sent
            yield f"the lease of {i} runs out", s.peer(i, lease=False, answer=late_answer)
        if p.answer == ("beat", True) and not p.lease and "lease from sending" not in self.off:
            yield f"an answer to {i} is late", s.peer(i, answer=("beat", False))
        if p.says_yes and not p.work and "work" not in self.never:
            yield f"{i} begins work, knowing epoch {p.known}", s.peer(i, work=(p.known, p.grant, p.joined))
        if p.work:
            yield self._commit(s, i, p)
        if not p.known and p.linked and not (p.sent or p.answer) and "rejoin" not in self.never:
            yield from self._register(s, i)
        earlier = s.owner == i and s.since < p.joined and s.target is None
        if earlier and p.member and p.known and p.linked and s.epoch < self.epochs:
            yield f"{i} regains the token", s._replace(since=s.epoch + 1, epoch=s.epoch + 1)
        if "break" not in self.never:
            if p.lock and p.linked:
                lost = s.peer(i, lock=False, sent=(), answer=(), late=p.late or p.sent)
                yield f"the server's end of {i}'s connection ends", lost
            if p.linked and not p.lock:
                yield f"{i} notices", s.peer(i, linked=False, certain=False)
            if not p.linked:
                yield f"{i} reconnects", s.peer(i, linked=True, lock=True)
        if "leave" not in self.never and p.known and p.member and not p.sent and not p.answer and s.epoch < self.epochs:
            gone = s.peer(i, member=False, known=0, owns=False, certain=False, mark=0)
            yield f"{i} leaves", gone.member_changed()
        if "kill" not in self.never:
            dead = Peer(member=p.member, applied=p.applied, joined=p.joined, late=p.late or p.sent)
            dead = dead._replace(alive=False, lock=False, linked=False, certain=False, lease=False, known=0)
            yield f"{i} is killed", s._replace(peers=(*s.peers[:i], dead, *s.peers[i + 1 :]))

    def _answered(self, s: State, i: int, p: Peer) -> State:
        kind, *values = p.answer
        if kind == "gone":  # this life is over
            return s.peer(i, answer=(), known=0, owns=False, certain=False, lease=False, mark=0)
        if kind == "beat":
            return s.peer(i, answer=(), lease=p.lease or bool(values[0]))
        if kind == "view":
            owns, known, grant, mark = values
            return s.peer(i, answer=(), owns=owns, known=known, grant=grant, mark=mark, certain=True)
        return s.peer(i, answer=(), mark=0)

    def _register(self, s: State, i: int) -> Iterator[Move]:
        """A new life under the old name; the token, if it is still under the name, is granted anew with it."""
        if s.epoch >= self.epochs:
            return
        epoch = s.epoch + 1
        new = s.peer(i, member=True, known=epoch, applied=0, joined=epoch, lease=False, certain=False, owns=False)
        new = new.peer(i, mark=0).member_changed()
        if s.owner == i:
            yield f"{i} registers and takes the token up at epoch {epoch}", new.granted(i, epoch)
            yield f"{i} registers; an application holds the token's row", new
        else:
            yield f"{i} registers at epoch {epoch}", new

    def _commit(self, s: State, i: int, p: Peer) -> Move:
        known, grant, life = p.work  # type: ignore[misc]
        if "epoch of the begin" in self.off:
            known = p.known
        passes = s.owner == i and (s.since <= known or "fence compares epochs" in self.off)
        after = s.peer(i, work=())
        if not passes and "fence" not in self.off:
            return f"{i}'s commit is refused", after
        wrong = ""
        if s.owner != i:
            wrong = "a commit on a token that is another's"
        elif s.since != grant:
            wrong = "a commit of work from before the token was granted anew"
        elif life != p.joined and p.owns:
            wrong = "a commit of an earlier life's work on a token that is the present one's"
        elif s.since < s.committed:
            wrong = "a commit with a lower fencing number than one before"
        return f"{i} commits", after._replace(committed=max(s.committed, s.since), wrong=wrong)

    # -- the server --------------------------------------------------------------------------------------------

    def _statements(self, s: State, i: int, p: Peer) -> Iterator[Move]:
        if p.sent and p.lock:
            after, answer = self._carried_out(s, i, p, *p.sent)
            yield f"{p.sent[0]} of {i} is carried out", after.peer(i, sent=(), answer=answer)
        if p.late:
            after, _ = self._carried_out(s, i, p, *p.late)
            yield f"late {p.late[0]} of {i} is carried out", after.peer(i, late=())
            yield f"late {p.late[0]} of {i} is lost", s.peer(i, late=())

    def _carried_out(self, s: State, i: int, p: Peer, kind: str, value: int) -> tuple[State, tuple[object, ...]]:
        if not p.member:
            return s, ("gone",)
        if kind == "beat":
            return s.peer(i, applied=max(p.applied, min(value, s.epoch))), ("beat", True)
        mine = s.owner == i
        if kind == "refresh":
            counts = s.since >= p.joined or "earlier life counts for nothing" in self.off
            owns = mine and s.target is None and counts
            return s, ("view", owns, s.epoch, s.since if owns else 0, s.mark if mine and s.target is not None else 0)
        answers = s.mark == value or "release names its mark" in self.off
        if mine and s.target is not None and answers and s.peers[s.target].member:
            return s.granted(s.target, s.mark), ("released",)  # at the epoch of the mark; the cluster's stays
        return s, ("released",)

    # -- the leader --------------------------------------------------------------------------------------------

    def _is_dead(self, p: Peer) -> bool:
        """Whether the evidence allows to evict this peer."""
        silent = not p.lease and p.answer != ("beat", True)
        if "lease from sending" in self.off:
            silent = not p.lease
        freed = not p.lock and (not p.certain or "grace on the fast path" in self.off)
        return silent or freed or "evict after the lease" in self.off

    def _leader(self, s: State) -> Iterator[Move]:
        if s.epoch >= self.epochs:
            return
        for plan in self._plans(s):
            if not s.plan_stands or plan != s.plan:
                yield f"the leader reads, and plans to {plan[0]} to {plan[3]}", s._replace(plan=plan, plan_stands=True)
        if s.plan and (s.plan_stands or "plan names the revision" in self.off):
            step, owner, target, to = s.plan
            if (s.owner, s.target) != (owner, target):
                return
            epoch, after = s.epoch + 1, s._replace(epoch=s.epoch + 1, plan=(), plan_stands=False)
            if step == "give":
                yield f"published: the token is given to {to} at epoch {epoch}", after.granted(to, epoch)
            elif step == "mark":
                yield f"published: mark {epoch} for {to}", after._replace(target=to, mark=epoch)
            elif step == "withdraw":
                yield "published: the mark is withdrawn", after._replace(target=None, mark=0)
            elif s.peers[owner or 0].applied >= s.mark or "force after applied" in self.off:
                yield f"published: the token is forced to {to} at epoch {epoch}", after.granted(to, epoch)

    def _plans(self, s: State) -> Iterator[tuple[str, int | None, int | None, int | None]]:
        """What a leader that reads the database now may want."""
        members = [j for j, q in enumerate(s.peers) if q.member]
        if s.owner is None or not s.peers[s.owner].member:
            for j in members:
                yield "give", s.owner, s.target, j
        elif s.target is None:
            for j in members:
                if j != s.owner:
                    yield "mark", s.owner, None, j
        else:
            yield "withdraw", s.owner, s.target, None
            if s.target in members:
                yield "force", s.owner, s.target, s.target


@dataclass(frozen=True)
class Found:
    """What a search has found. ``trace`` is empty if nothing was wrong; ``complete`` if no state was left out."""

    wrong: str
    trace: list[str]
    states: int
    complete: bool

    def __str__(self) -> str:
        if not self.wrong:
            return f"no violation in {'all ' if self.complete else ''}{self.states} states"
        steps = "\n".join(f"  {number:2} {step}" for number, step in enumerate(self.trace, 1))
        return f"{self.wrong}, after {len(self.trace)} steps ({self.states} states):\n{steps}"


def search(protocol: Protocol, states: int) -> Found:
    """Search breadth first through at most this many states."""
    start = protocol.first()
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    todo = deque([start])
    while todo and len(came_from) < states:
        state = todo.popleft()
        for step, after in protocol.moves(state):
            if after in came_from:
                continue
            came_from[after] = (state, step)
            wrong = after.wrong
            if sum(peer.says_yes for peer in after.peers) > 1:
                wrong = "two peers say yes"
            if wrong:
                trace, at = [], came_from[after]
                while at is not None:
                    trace.append(at[1])
                    at = came_from[at[0]]
                return Found(wrong, trace[::-1], len(came_from), False)
            todo.append(after)
    return Found("", [], len(came_from), not todo)


def main() -> None:
    parser = argparse.ArgumentParser(description="Search the hand-off protocol for a violation.")
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--states", type=int, default=5_000_000)
    parser.add_argument("--off", action="append", default=[], choices=SAFEGUARDS)
    arguments = parser.parse_args()
    found = search(Protocol(arguments.peers, arguments.epochs, frozenset(arguments.off)), arguments.states)
    print(found)
    raise SystemExit(bool(found.wrong))


if __name__ == "__main__":
    main()
