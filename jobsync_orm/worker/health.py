"""Whether a worker does its work, for probes and people: ``worker.health()``.

A worker can be alive and useless in more ways than one. Its node's heartbeats go on while its queue's loop waits for a
table that somebody has locked; its loop turns while every claim is refused; its threads are all taken by handlers that
never return. So it is healthy only if *all* of this works, as of now:

* the queue's loop has completed a turn within the last five seconds (three times ``poll_sec`` if that is longer);
* what it does beside claiming has not failed for longer than that;
* its node is a member of the cluster, and its heartbeats are answered;
* its executors can run jobs.

It is healthy again by itself once the cause has gone. Asking takes no lock and sends nothing: a probe may ask as often
as it likes, and is answered at once whatever else hangs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from jobsync_orm.job import Job
    from jobsync_orm.worker.pump import Pump

__all__ = ["WorkerHealth", "examine"]

# Longest that the queue's loop may take for a turn, or a part of it may fail; at least this many times poll_sec.
STALLED_SEC, STALLED_POLLS = 5.0, 3

State = Literal["new", "running", "stopping", "stopped"]


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """How a worker is.

    Attributes
    ----------
    ok : bool
        Whether it does its work. True for one that stops, as long as what it does for that works.
    problems : tuple of str
        Why not, for people.
    state : str
        ``new``, ``running``, ``stopping`` or ``stopped``.
    node : str or None
        Its name; None as long as it has none.
    turn_sec, claim_sec, heartbeat_sec : float or None
        Seconds since the queue's loop completed a turn, since a claim was last answered, with jobs or without, and
        since a heartbeat was. A worker with all its slots busy does not claim. None if there was none yet.
    running : int
        Attempts that run now.
    claimed, completed, failed, released, lost, rescued : int
        Since it started: jobs it claimed; attempts of its own that completed, failed, were given back uncounted, and
        ended after somebody else had been given the job; and jobs that it took from others, which had died or were
        stuck.
    drained : bool
        Whether an operator has drained the node: it ends what it runs, and takes nothing new. It is not a problem.
    abandoned : int
        Attempts that go on although they have timed out, each in a thread that nobody waits for any more.
    reconnects : int
        How often the queue's connection was made anew.
    """

    ok: bool
    problems: tuple[str, ...]
    state: State
    node: str | None = None
    turn_sec: float | None = None
    claim_sec: float | None = None
    heartbeat_sec: float | None = None
    running: int = 0
    claimed: int = 0
    completed: int = 0
    failed: int = 0
    released: int = 0
    lost: int = 0
    rescued: int = 0
    abandoned: int = 0
    reconnects: int = 0
    drained: bool = False


def examine(state: State, job: Job | None, pump: Pump | None, rescued: int, poll_sec: float) -> WorkerHealth:
    """The health of the worker that consists of these. Never raises, never waits."""
    node = None if job is None else job.node_name
    if state in ("new", "stopped") or job is None or pump is None:
        return WorkerHealth(False, (f"the worker is {state}: it runs no jobs",), state, node)
    try:
        return _examine(state, job, pump, rescued, poll_sec)
    except Exception as error:  # noqa: BLE001  # a probe wants an answer
        return WorkerHealth(False, (f"its health cannot be told: {error!r}",), state, node)


def _examine(state: State, job: Job, pump: Pump, rescued: int, poll_sec: float) -> WorkerHealth:
    now = time.monotonic()
    stalled = max(STALLED_SEC, STALLED_POLLS * poll_sec)
    problems = []
    turn_sec = now - pump.turned_at
    if not pump.is_alive:
        problems.append("the queue's loop has ended")
    elif turn_sec > stalled:
        why = f": {pump.failure}" if pump.failure else ""
        problems.append(f"the queue's loop has not completed a turn for {turn_sec:.0f} s{why}")
    # A copy: the loop's thread goes on meanwhile.
    for name, (since, error) in dict(pump.failing).items():
        if now - since > stalled:
            problems.append(f"{name} has failed for {now - since:.0f} s: {error}")
    if not job.am_i_healthy():
        problems.append(f"{job.node_name} is no member of its cluster now, or cannot know: its heartbeats fail")
    running = abandoned = 0
    for executor in list(pump.executors.values()):
        problems += executor.problems()
        running += len(executor.running())
        abandoned += executor.abandoned
    counters, claimed_at, beat_at = pump.counters, pump.counters.claimed_at, job.last_heartbeat_at
    return WorkerHealth(
        ok=not problems,
        problems=tuple(problems),
        state=state,
        node=job.node_name,
        turn_sec=turn_sec,
        claim_sec=None if claimed_at is None else now - claimed_at,
        heartbeat_sec=None if beat_at is None else max(0.0, time.time() - beat_at),
        running=running,
        claimed=counters.claimed,
        completed=counters.completed,
        failed=counters.failed,
        released=counters.released,
        lost=counters.lost,
        rescued=rescued,
        abandoned=abandoned,
        reconnects=max(0, counters.reconnects - 1),  # the first was the connection
        drained=pump.drained,
    )
