"""Reads the history of a run and says what must not have happened.

Pure: it takes a :class:`~tests.chaos.history.History` and returns sentences. Each rule is a function of its own.

What gives the order of commits on one token: each transaction reads the token's counter and writes it one higher. If no
update was lost, which is checked first, the counter's values are the order. The server's commit times are a second,
independent one, and put effects and changes of ownership into one order: a fenced commit holds the token's row in share
mode, so the two never commit on one token at the same time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from tests.chaos.history import Effect, History, Ownership, Sweep
from tests.chaos.nemesis import Disturbance

__all__ = ["RULES", "Gap", "check", "longest_undisturbed", "marks", "unserved"]

# Two looks of one worker that are further apart do not count as one continuous yes.
CONTINUOUS_SEC = 0.5

# A token for which no worker has said yes for this long is unserved.
UNSERVED_SEC = 0.6


def check(history: History) -> dict[str, list[str]]:
    """Rule -> what breaks it. All empty is what must be."""
    return {name: list(rule(history)) for name, rule in RULES.items()}


def lost(history: History) -> Iterator[str]:
    """Every task that was inserted is there, done, and has an effect."""
    todos = {todo.id: todo for todo in history.todos}
    effects = {effect.todo for effect in history.effects}
    for id in range(1, history.confirmed + 1):
        todo = todos.get(id)
        if todo is None:
            yield f"task {id} was inserted and is gone"
        elif not todo.done:
            yield f"task {id} of token {todo.token} is not done"
        elif id not in effects:
            yield f"task {id} of token {todo.token} is done without an effect"


def duplicated(history: History) -> Iterator[str]:
    """No task has two effects."""
    by_todo: defaultdict[int, list[Effect]] = defaultdict(list)
    for effect in history.effects:
        by_todo[effect.todo].append(effect)
    for todo, effects in by_todo.items():
        if len(effects) > 1:
            yield f"task {todo} has {len(effects)} effects: " + "; ".join(map(_who, effects))


def lost_updates(history: History) -> Iterator[str]:
    """The counter of each token went up by one with each effect."""
    for token, effects in _by_token(history.effects).items():
        for version, times in Counter(effect.version for effect in effects).items():
            if times > 1:
                both = [effect for effect in effects if effect.version == version]
                yield f"token {token}: version {version} was written {times} times: " + "; ".join(map(_who, both))
        versions, counter = {effect.version for effect in effects}, history.counters.get(token)
        if versions != set(range(1, len(versions) + 1)) or counter != len(versions):
            yield f"token {token}: {len(versions)} versions up to {max(versions)}, and a counter of {counter}"


def epochs_fall(history: History) -> Iterator[str]:
    """In commit order the epochs known to a token's workers never fall, and rise from one worker to the next."""
    for token, effects in _by_token(history.effects).items():
        for one, other in pairwise(sorted(effects, key=lambda effect: effect.version)):
            same = (one.node, one.incarnation) == (other.node, other.incarnation)
            if other.epoch < one.epoch or (other.epoch == one.epoch and not same):
                yield f"token {token}: {_who(one)} and then {_who(other)}"
            if other.committed_us < one.committed_us:
                yield f"token {token}: version {one.version} was committed after version {other.version}"


def not_the_owner(history: History) -> Iterator[str]:
    """Each effect was committed while its token was its worker's, at an epoch that worker knew."""
    changes = _by_token(history.ownership)
    times = {token: [row.committed_us for row in rows] for token, rows in changes.items()}
    for effect in history.effects:
        before = bisect_right(times.get(effect.token, []), effect.committed_us)
        row = changes[effect.token][before - 1] if before else None
        if row is None or row.node != effect.node or row.epoch > effect.epoch:
            owner = "nobody's" if row is None else f"{row.node}'s at epoch {row.epoch}"
            yield f"token {effect.token} was {owner} at the commit of {_who(effect)}"


def ownership_epochs_fall(history: History) -> Iterator[str]:
    """The epoch of a token never falls, and rises when the token gets another owner."""
    for token, rows in _by_token(history.ownership).items():
        for one, other in pairwise(rows):
            if other.epoch < one.epoch or (other.epoch == one.epoch and other.node != one.node):
                yield f"token {token}: {one.node} at epoch {one.epoch}, then {other.node} at epoch {other.epoch}"


def outcomes(history: History) -> Iterator[str]:
    """A confirmed commit left all its effects, a refused or failed one none."""
    effects = Counter(effect.attempt for effect in history.effects)
    for attempt in history.attempts:
        left = effects[attempt.name]
        if attempt.outcome == "done" and left != attempt.todos:
            yield f"attempt {attempt.name} was confirmed with {attempt.todos} tasks and left {left} effects"
        if attempt.outcome in ("refused", "failed") and left:
            yield f"attempt {attempt.name} was {attempt.outcome} and left {left} effects"


def claims(history: History) -> Iterator[str]:
    """Fencing numbers grow in commit order; each completed claim left one row in the audit and its checkpoint."""
    for token, effects in _by_token(history.effects).items():
        claimed = sorted((one for one in effects if one.fence is not None), key=lambda effect: effect.version)
        for one, other in pairwise(claimed):
            if other.fence < one.fence or (other.fence == one.fence and other.attempt != one.attempt):
                yield f"token {token}: fence {one.fence} of {_who(one)}, then {other.fence} of {_who(other)}"
        completed, audited = len({effect.attempt for effect in claimed}), history.audit.get(token, 0)
        if completed != audited:
            yield f"token {token}: {completed} claims completed, {audited} in the audit"
        last, stored = claimed[-1].version if claimed else None, history.checkpoints.get(token)
        if last != stored:
            yield f"token {token}: version {last} was done under a claim last, the checkpoint says {stored}"


def broken(history: History) -> Iterator[str]:
    """No worker ends by an error."""
    yield from history.broken


def two_say_yes(history: History) -> Iterator[str]:
    """No worker says yes to a token between two answers of another that are both yes."""
    points: defaultdict[int, list[tuple[float, float, str, int]]] = defaultdict(list)
    for (node, life), sweeps in history.sweeps.items():
        for sweep in sweeps:
            for token in _tokens(sweep.held):
                points[token].append((sweep.begun, sweep.ended, node, life))
    for many in points.values():
        many.sort()
    changes = _by_token(history.ownership)
    for (node, life), sweeps in history.sweeps.items():
        for one, other in pairwise(sweeps):
            if other.begun - one.ended > CONTINUOUS_SEC:
                continue
            for token in _tokens(one.held & other.held):
                many = points[token]
                first, after = bisect_left(many, (one.ended,)), bisect_right(many, (other.begun,))
                for begun, ended, who, whose in many[first:after]:
                    between = whose != life and ended <= other.begun
                    if between and not _went_and_came(history, changes.get(token, []), one, other):
                        yield f"token {token}: {node} (process {life}) and {who} (process {whose}), at {begun:.3f} s"


def _went_and_came(history: History, changes: Sequence[Ownership], one: Sweep, other: Sweep) -> bool:
    """Whether the token was handed away and back between two looks."""
    times = [history.at(row.committed_us) for row in changes]
    rows = changes[bisect_left(times, one.ended - 0.2) : bisect_right(times, other.begun + 0.2)]
    return len({row.epoch for row in rows}) > 1


def unserved_too_long(history: History) -> Iterator[str]:
    """No token is without a worker that says yes for longer than the bound, as it is defined in settings.py."""
    for gap in unserved(history):
        if gap.undisturbed > history.bound_sec:
            yield f"token {gap.token}: no yes for {gap.seconds:.1f} s, {gap.undisturbed:.1f} s of it undisturbed"


def marked_too_long(history: History) -> Iterator[str]:
    """No token is asked back from its owner for longer than the bound."""
    for gap in marks(history):
        if gap.undisturbed > history.bound_sec:
            yield f"token {gap.token}: drained for {gap.seconds:.1f} s, {gap.undisturbed:.1f} s of it undisturbed"


RULES: dict[str, Callable[[History], Iterator[str]]] = {
    "lost tasks": lost,
    "duplicated effects": duplicated,
    "lost updates": lost_updates,
    "epochs fall in commit order": epochs_fall,
    "commits by others than the owner": not_the_owner,
    "epochs of ownership fall": ownership_epochs_fall,
    "commits that were not what was said": outcomes,
    "claims, their fences, audit and checkpoints": claims,
    "workers that ended by an error": broken,
    "two say yes at one time": two_say_yes,
    "tokens ownerless past the bound": unserved_too_long,
    "tokens draining past the bound": marked_too_long,
}


# -- how long ------------------------------------------------------------------------------------------------------


class Gap:
    """A time without service, or with a mark, and the longest part of it in which nothing disturbed who has part."""

    __slots__ = ("begun", "ended", "token", "undisturbed")

    def __init__(self, token: int, begun: float, ended: float, undisturbed: float) -> None:
        self.token, self.begun, self.ended, self.undisturbed = token, begun, ended, undisturbed

    @property
    def seconds(self) -> float:
        return self.ended - self.begun


def unserved(history: History) -> list[Gap]:
    """For each token the times during which no worker was seen saying yes."""
    served: dict[int, list[tuple[float, float]]] = {token: [] for token in range(history.tokens)}
    for sweeps in history.sweeps.values():
        for sweep in sweeps:
            for token in _tokens(sweep.held):
                served[token].append((sweep.begun, sweep.ended))
    found = []
    changes = _by_token(history.ownership)
    for token, times in served.items():
        last = history.begun
        for begun, ended in [*sorted(times), (history.ended, history.ended)]:
            if begun > history.ended:
                break
            if begun - last > UNSERVED_SEC:
                found.append(_gap(history, token, changes.get(token, []), last, begun))
            last = max(last, ended)
    return found


def marks(history: History) -> list[Gap]:
    """For each token the times during which its owner was asked for it."""
    found = []
    for token, rows in _by_token(history.ownership).items():
        since: float | None = None
        for row in rows:
            at = history.at(row.committed_us)
            if since is not None and row.next_node is None:
                found.append(_gap(history, token, rows, since, at))
            since = (at if since is None else since) if row.next_node is not None else None
        if since is not None:
            found.append(_gap(history, token, rows, since, history.ended))
    return found


def _gap(history: History, token: int, rows: Sequence[Ownership], begun: float, ended: float) -> Gap:
    involved = _leaders(history, begun, ended)
    times = [history.at(row.committed_us) for row in rows]
    for row in rows[max(0, bisect_left(times, begun) - 1) : bisect_right(times, ended)]:
        involved.update(node for node in (row.node, row.next_node) if node)
    return Gap(token, begun, ended, longest_undisturbed(history.disturbances, involved, begun, ended))


def _leaders(history: History, begun: float, ended: float) -> set[str]:
    """Who led at some time from ``begun`` to ``ended``."""
    ordinals: dict[str, int] = {}
    leaders = set()
    for member in history.members:
        if member.at > ended:
            break
        if ordinals and member.at > begun:
            leaders.add(min(ordinals, key=ordinals.__getitem__))
        if member.gone:
            ordinals.pop(member.name, None)
        else:
            ordinals[member.name] = member.ordinal
    if ordinals:
        leaders.add(min(ordinals, key=ordinals.__getitem__))
    return leaders


def longest_undisturbed(disturbances: Sequence[Disturbance], involved: set[str], begun: float, ended: float) -> float:
    """The longest time within ``begun`` to ``ended`` in which nothing happened to those involved or to the server.

    A worker that stays stopped or cut off is no excuse: others have to take its part. Nor is a clock that was stepped.
    """
    longest, last = 0.0, begun
    for one in disturbances:
        if one.kind == "clock step" or (one.worker and one.worker not in involved):
            continue
        if one.ended >= begun and one.begun <= ended:
            longest = max(longest, one.begun - last)
            last = max(last, one.ended)
    return max(longest, ended - last)


# -- helpers -------------------------------------------------------------------------------------------------------


def _by_token(rows: Sequence[Effect] | Sequence[Ownership]) -> dict[int, list]:  # type: ignore[type-arg]
    found: defaultdict[int, list[Effect | Ownership]] = defaultdict(list)
    for row in rows:
        found[row.token].append(row)
    return dict(found)


def _tokens(held: int) -> Iterator[int]:
    while held:
        low = held & -held
        yield low.bit_length() - 1
        held ^= low


def _who(effect: Effect) -> str:
    return (
        f"{effect.node}/{effect.incarnation[:8]} at epoch {effect.epoch} (task {effect.todo}, version {effect.version})"
    )
