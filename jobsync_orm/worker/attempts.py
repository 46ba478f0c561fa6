"""An attempt on its way through a worker, and what runs it.

The pump claims a job, makes an :class:`Attempt` of it and submits it to the :class:`Executor` of its handler's kind.
The executor reports how it ended, and the pump writes that down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from jobsync_orm.queue.jobs import ClaimedJob, Ending

__all__ = ["Attempt", "Executor", "Report", "Why"]

Why = Literal["timeout", "cancelled", "lost", "stopping"]


class Attempt:
    """One claimed job in this process.

    Attributes
    ----------
    job : ClaimedJob
        What is to be done.
    handler : Handler
        What does it.
    context : JobContext
        What the handler is given.
    claimed_at : float
        ``time.monotonic()`` when the claim's answer was there.
    began_at : float or None
        ``time.monotonic()`` when the handler was called; None as long as it waits for a slot.
    over : bool
        Whether its first report has been taken: what is reported later is ignored. Written by the pump only.
    """

    __slots__ = ("began_at", "claimed_at", "context", "handler", "job", "over")

    def __init__(self, job: ClaimedJob, handler: Any, context: Any, claimed_at: float) -> None:
        self.job = job
        self.handler = handler
        self.context = context
        self.claimed_at = claimed_at
        self.began_at: float | None = None
        self.over = False

    def ran_since(self) -> float:
        """When it began; for one that has not, when it was claimed."""
        return self.claimed_at if self.began_at is None else self.began_at

    def ends_at(self) -> float:
        """When its time is over: after its job's timeout, unless the handler has asked for another."""
        limit: float | None = self.context.limit
        return self.ran_since() + self.job.timeout if limit is None else limit


if TYPE_CHECKING:
    Report = Callable[[Attempt, Ending], None]
else:
    Report = object


class Executor(Protocol):
    """Runs attempts of one kind of handler.

    The pump's thread submits and withdraws; the rest may be called by any. Nothing but ``stop`` takes long.
    Its constructor is given a ``report``, to be called once for each attempt when it has ended, from any thread: it
    never blocks nor raises. An attempt must be counted as ended in ``free`` before it is reported.
    """

    slots: int
    """How many attempts it runs at once."""

    def start(self) -> None:
        """Get ready."""

    def free(self) -> int:
        """``slots`` less the attempts submitted and not ended: negative if some wait for a slot."""

    def submit(self, attempt: Attempt) -> None:
        """Run it as soon as there is a slot. Never blocks."""

    def withdraw(self) -> list[Attempt]:
        """Give back all that wait for a slot; they are not run, and not reported."""

    def give_up(self, attempt: Attempt, why: Why) -> None:
        """End it if it runs. What cannot be ended is told, and at its timeout its slot is free for another one.

        It is reported as what it was given up for; ``lost`` is not, somebody else has the job. Nothing happens if it
        has ended already.
        """

    def running(self) -> list[Attempt]:
        """What has begun and not ended."""

    def look(self, now: float) -> None:
        """See after what takes time; called a few times a second with ``time.monotonic()``."""

    @property
    def abandoned(self) -> int:
        """How many attempts go on that nobody waits for any more. With very many of them nothing is free."""

    def is_mine(self, thread: threading.Thread) -> bool:
        """Whether it is one in which handlers run."""

    def problems(self) -> list[str]:
        """What is wrong, for the worker's health."""

    def stop(self, grace_sec: float) -> None:
        """Take nothing more, wait ``grace_sec`` for what runs, and give up the rest. May be called again."""
