"""Finding the keys that have work for this worker.

The jobs that are ready lie in an index by priority and by the moment they became ready. The search walks along it, each
priority by itself, and goes on from its *mark* when a notification tells that there is more, or after a while. It goes
no further than it needs to know enough keys to keep the worker busy, so that a long backlog does not fill its memory.

What becomes ready at a place that the walk has passed (a transaction was slow to commit, a worker died, the token of a
key has come here from elsewhere) is found by a look at the first job of each key that there is, in the order of the
keys: it leaps over the rest of each line. It takes a tenth of the time at most.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from jobsync_orm.coordinator.session import Session, array
from jobsync_orm.queue.waker import lanes_of

if TYPE_CHECKING:
    from jobsync_orm.queue.statements import QueueStatements
    from jobsync_orm.worker.keys import Keys

__all__ = ["KeySearch"]

ANSWER_SEC = 10.0

# Rows of one step along the index, and keys of one step from key to key.
STEP_ROWS, STEP_KEYS = 1000, 200

# A walk goes on while fewer keys wait, and looks from key to key add none once more wait: those they leave out are
# found again.
ENOUGH, TOO_MANY = 1000, 3000

# The rest after each step from key to key, in multiples of its duration, and the least one after the last step.
REST = 9.0
LEAST_SEC = 0.1

# Priorities known; with more, those where nothing was found are forgotten.
MOST_KNOWN = 1000


class _Walk:
    """How far along one priority the search has come."""

    __slots__ = ("ahead", "mark", "priority")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.mark = (0, 0)
        self.ahead = True


class KeySearch:
    """A duty of the pump; see :class:`~jobsync_orm.worker.pump.Duty`.

    Parameters
    ----------
    statements : QueueStatements
        The SQL.
    keys : Keys
        Where what is found goes.
    node_name : str
        This worker.
    incarnation : callable
        This life of the node, empty while it is no member.
    types : callable
        The types it may take now; none while it stops.
    tokens : callable
        What the node owns, in any form that can be compared.
    poll_sec : float
        Seconds between looks for jobs of which no notification told.
    """

    def __init__(
        self,
        statements: QueueStatements,
        keys: Keys,
        node_name: str,
        incarnation: Callable[[], str],
        types: Callable[[], Collection[str]],
        tokens: Callable[[], object],
        poll_sec: float,
    ) -> None:
        self._sql = statements
        self._keys = keys
        self._node_name = node_name
        self._incarnation = incarnation
        self._types = types
        self._tokens = tokens
        self._poll_sec = poll_sec
        self._walks: dict[int, _Walk] = {}
        self._poll_at = 0.0
        self._after = ""
        self._pass_at = 0.0
        self._pass_not_before = 0.0
        self._as_of: object = None

    def _situation(self) -> tuple[str, frozenset[str], object]:
        return self._incarnation(), frozenset(self._types()), self._tokens()

    def due_at(self) -> float:
        """Now if there may be more ahead and more is needed; see above."""
        incarnation, types, _ = situation = self._situation()
        if not incarnation or not types:
            return math.inf
        if situation != self._as_of:
            return 0.0
        if any(self._is_open(walk) for walk in self._walks.values()):
            return 0.0
        return min(self._poll_at, max(self._pass_at, self._pass_not_before))

    def _is_open(self, walk: _Walk) -> bool:
        return walk.ahead and self._keys.waiting(walk.priority) < ENOUGH

    def look_again(self) -> None:
        """There may be something behind the marks."""
        self._pass_at = 0.0

    def woken(self, payloads: set[str]) -> None:
        """Go on where jobs with a key are said to be."""
        for payload in payloads:
            if payload.startswith("{"):  # an order
                continue
            lanes = lanes_of(payload)
            if lanes is None:
                self._look_everywhere()
                continue
            for type, priority, keyed in lanes:
                if keyed and type in self._types():
                    self._walks.setdefault(priority, _Walk(priority)).ahead = True
                    self._pass_at = 0.0

    def _look_everywhere(self) -> None:
        for walk in self._walks.values():
            walk.ahead = True
        self._pass_at = 0.0

    def run(self, session: Session) -> None:
        """A step along the index, and a step from key to key, as they are due."""
        now = time.monotonic()
        incarnation, types, _ = situation = self._situation()
        if situation != self._as_of:
            self._begin_anew()
            self._as_of = situation
        if now >= self._poll_at:
            self._poll_at = now + self._poll_sec
            self._look_everywhere()
        whose = (self._node_name, incarnation, array(sorted(types)), True)
        walks = [walk for walk in self._walks.values() if self._is_open(walk)]
        if walks:
            self._go_on(session, whose, walks)
        if now >= max(self._pass_at, self._pass_not_before):
            self._leap(session, whose)

    def _begin_anew(self) -> None:
        """Other keys are this worker's, or other types: what was found or passed by may be wrong."""
        self._keys.forget()
        for walk in self._walks.values():
            walk.mark = (0, 0)
        self._after, self._pass_not_before = "", 0.0
        self._look_everywhere()

    def _go_on(self, session: Session, whose: tuple[str, str, str, bool], walks: list[_Walk]) -> None:
        walks.sort(key=lambda walk: -walk.priority)
        ((marks, found),) = session.prepared(
            self._sql.discover,
            *whose,
            array(walk.priority for walk in walks),
            array(walk.mark[0] for walk in walks),
            array(walk.mark[1] for walk in walks),
            array(STEP_ROWS for _ in walks),
            timeout=ANSWER_SEC,
        )
        for walk in walks:
            walk.ahead = False
        for priority, at, id, rows in json.loads(marks or "[]"):
            walk = self._walks[priority]
            walk.mark = at, id
            walk.ahead = rows >= STEP_ROWS
        for name, *place in json.loads(found or "[]"):
            self._keys.seen(name, tuple(place))

    def _leap(self, session: Session, whose: tuple[str, str, str, bool]) -> None:
        began = time.monotonic()
        ((found, last),) = session.prepared(self._sql.lines, *whose, self._after, STEP_KEYS, timeout=ANSWER_SEC)
        for name, type, priority, ready_at in json.loads(found or "[]"):
            if priority not in self._walks:
                self._walks[priority] = _Walk(priority)
            if self._keys.waiting(priority) < TOO_MANY:
                self._keys.ready(name, (type, priority, ready_at))
        now = time.monotonic()
        rest = REST * (now - began)
        self._after = last or ""
        if last is None:
            self._pass_at = now + self._poll_sec
            self._pass_not_before = now + max(LEAST_SEC, rest)
            self._forget_priorities()
        else:
            self._pass_at = 0.0
            self._pass_not_before = now + rest

    def _forget_priorities(self) -> None:
        if len(self._walks) > MOST_KNOWN:
            walks = self._walks.items()
            self._walks = {priority: w for priority, w in walks if w.ahead or self._keys.waiting(priority)}
