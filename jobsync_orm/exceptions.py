"""Every error this library raises on purpose, in one hierarchy.

Catch :class:`JobsyncError` to catch them all. Where an error is also of a built-in kind (a wrong value, a
wrong type, a deadline) it derives from that built-in too, so code that catches the built-in keeps working.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "ClaimEnded",
    "ClaimRefused",
    "ClusterMismatch",
    "ConfigurationError",
    "EmbeddedUnavailable",
    "FenceNotApplicable",
    "FilterNotApplicable",
    "ForkedJob",
    "InvalidJob",
    "InvalidPattern",
    "InvalidPayload",
    "InvalidPosition",
    "InvalidTaskId",
    "JobCancelled",
    "JobConflict",
    "JobTimeout",
    "JobsyncError",
    "LeaseLost",
    "LockConflict",
    "LockNotAcquired",
    "NodeNameInUse",
    "NotEnqueued",
    "NotFinished",
    "NotRunning",
    "OperationRefused",
    "OwnershipLost",
    "PooledConnection",
    "ProcessDied",
    "SchemaNotReady",
    "SessionMisused",
    "UnknownJob",
    "UnknownJobType",
    "UnstableTaskId",
]


class JobsyncError(Exception):
    """Root of the hierarchy."""


class ConfigurationError(JobsyncError, ValueError):
    """A setting is out of range or contradicts another one. The message names the value and the remedy."""


class ClusterMismatch(ConfigurationError):
    """This node's ``total_tokens`` or ``hash_function`` differ from what the cluster was created with."""


class PooledConnection(ConfigurationError):
    """The coordination connection goes through a pooler that does not keep a session for its client."""


class SchemaNotReady(JobsyncError):
    """The library's tables are missing or of another version; the message says which command to run."""


class EmbeddedUnavailable(JobsyncError):
    """The embedded PostgreSQL cannot be used here; the message says what to install."""


class NodeNameInUse(JobsyncError):
    """A live process already runs under this node name."""


class NotRunning(JobsyncError):
    """The job has not been started, or has been stopped, and the call needs a running one."""


class OperationRefused(JobsyncError):
    """What an operator asked for would do harm, or is about something that is not there. Nothing has been changed."""


class ForkedJob(NotRunning):
    """A job was started before this process was forked: its thread and its connection are its parent's, not its own."""


class UnstableTaskId(JobsyncError, TypeError):
    """A task id of a type whose text form is not the same in every process."""


class InvalidTaskId(JobsyncError, ValueError):
    """A task id whose text PostgreSQL cannot store (a NUL character, a lone surrogate)."""


class InvalidPosition(JobsyncError, ValueError):
    """A checkpoint's position that is no JSON, or that PostgreSQL cannot store; nothing is written."""


class InvalidPattern(JobsyncError, ValueError):
    """A LIKE pattern that PostgreSQL would refuse, or an empty list of patterns."""


class LockNotAcquired(JobsyncError):
    """A lock could not be had."""


class LockConflict(LockNotAcquired):
    """Two pins share a token and no node name can match both.

    Attributes
    ----------
    token_id : int
        The token both tasks hash to.
    task_ids : tuple[str, str]
        The task refused, and the task that already holds the token.
    """

    def __init__(self, message: str, token_id: int, task_ids: tuple[str, str]) -> None:
        super().__init__(message)
        self.token_id = token_id
        self.task_ids = task_ids


class FilterNotApplicable(JobsyncError):
    """An ownership filter was asked for where it could not filter, or would filter wrongly."""


class FenceNotApplicable(JobsyncError):
    """A write in a fenced session of which it cannot be known which tokens it touches. It has not been sent."""


class ClaimRefused(JobsyncError):
    """A task could not be claimed.

    Attributes
    ----------
    reason : str
        ``"not owned"``: its token is another node's, or nobody's. ``"moving"``: its token is on its way to another
        node. ``"claimed"``: another node has claimed it, or an open transaction holds its claim. ``"claimed here"``:
        this process has claimed it. ``"not running"``: this job is not a member of its cluster. ``"in doubt"``: this
        node cannot know at the moment.
    holder : str or None
        The node that has the token, gets it, or has the claim.
    """

    def __init__(self, message: str, reason: str, holder: str | None) -> None:
        super().__init__(message)
        self.reason = reason
        self.holder = holder


class ClaimEnded(JobsyncError):
    """A claim was to be completed that has been completed or released before."""


class OwnershipLost(JobsyncError):
    """Work on tokens that are not, or no longer, this node's. What was to be stored for them is not.

    Parameters
    ----------
    tokens : iterable of int
        The tokens.
    owners : mapping of int to str or None
        Who owns each of them now, where that is known.
    node : str, optional
        This node, so that the message can say of which tokens it is the owner now.

    Attributes
    ----------
    tokens : tuple[int, ...]
        The tokens, ascending.
    owners : dict[int, str | None]
        Who owns each of them now: a node's name, None for nobody. A token of which that could not be found out is
        missing. This node's own name stands for a token that was another's in between, or that it got after the
        transaction had begun.
    """

    def __init__(self, tokens: Iterable[int], owners: Mapping[int, str | None], node: str | None = None) -> None:
        self.tokens = tuple(sorted(tokens))
        self.owners = {token: owners[token] for token in self.tokens if token in owners}
        self._node = node
        super().__init__(self.tokens, self.owners, node)

    def __str__(self) -> str:
        shown = ", ".join(f"{token} ({self._owner(token)})" for token in self.tokens[:5])
        more = f" and {len(self.tokens) - 5} more" if len(self.tokens) > 5 else ""
        plural = "token" if len(self.tokens) == 1 else "tokens"
        them = "it" if len(self.tokens) == 1 else "them"
        return (
            f"{plural} {shown}{more}: not this node's for as long as the work took, so nothing is stored for {them}. "
            "Start again, in a new transaction, from what this node owns now"
        )

    def _owner(self, token: int) -> str:
        if token not in self.owners:
            return "owner unknown"
        owner = self.owners[token]
        if owner is None:
            return "nobody's"
        return "this node's, but not since the work began" if owner == self._node else f"now {owner}'s"


class InvalidJob(JobsyncError, ValueError):
    """A job, or an option of a handler or worker, that cannot be. The message names the value and the remedy."""


class InvalidPayload(InvalidJob):
    """A payload or result that is no JSON object PostgreSQL can keep, is too large, or does not fit its handler."""


class UnknownJobType(JobsyncError, LookupError):
    """No handler is registered for this job type."""


class UnknownJob(JobsyncError, LookupError):
    """There is no job of this id."""


class JobConflict(JobsyncError):
    """What was asked of a job contradicts the state it is in, or another live job. The message names both."""


class LeaseLost(JobsyncError):
    """A write of an attempt that is over: the job is another worker's by now, or finished. Nothing is stored."""


class SessionMisused(JobsyncError):
    """A handler has committed or closed its ``ctx.session``, or used it when its attempt was over."""


class JobCancelled(JobsyncError):
    """Raised in a handler by :meth:`JobContext.check` when its attempt is no longer wanted."""


class JobTimeout(JobsyncError, TimeoutError):
    """An attempt took longer than its job's ``timeout``."""


class NotEnqueued(JobsyncError):
    """The id of a job whose transaction ended before the job was sent to the database: it does not exist."""


class NotFinished(JobsyncError, TimeoutError):
    """A job that was waited for has not finished in time.

    Attributes
    ----------
    status : JobStatus
        Of the job at that moment.
    """

    def __init__(self, message: str, status: Any) -> None:
        super().__init__(message)
        self.status = status


class ProcessDied(JobsyncError):
    """The child process that ran an attempt ended by itself. The message says by which signal, or with which code."""
