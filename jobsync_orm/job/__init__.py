"""Job: the handle a user holds.

    cfg = CoordinationConfig(url="postgresql+psycopg://app@localhost/shop")
    with Job("worker-01", coordination_config=cfg) as job:
        for item in session.query(Item).owned_by(job): ...

A job is one node of the cluster for as long as it runs. Everything it knows about ownership comes from its coordinator,
the one background thread; the methods below that talk to the database use the application's engine (or a small one of
their own) in the calling thread. ``coordination_config=None`` is a standalone job: no database, and everything is its
own.
"""

from __future__ import annotations

from jobsync_orm.job.checkpoints import CheckpointCalls
from jobsync_orm.job.cluster import ClusterCalls
from jobsync_orm.job.pins import PinCalls
from jobsync_orm.job.sessions import SessionCalls

__all__ = ["Job"]


class Job(CheckpointCalls, SessionCalls, PinCalls, ClusterCalls):
    """One worker among those that share a database.

    Parameters
    ----------
    node_name : str
        This worker's name, unique in its cluster.
    coordination_config : CoordinationConfig, optional
        Where and how to coordinate. None runs standalone: no database access, and every task is this job's own.
    date : datetime.date or datetime.datetime, optional
        Processing date of audit rows. None takes the database's date at the time a task is added.
    wait_on_enter : float
        Seconds that starting may take: until ``minimum_nodes`` are there and this node has its tokens.
    wait_on_exit : float
        Seconds to stay a member after the ``with`` block has ended.
    lock_provider : callable, optional
        Called with this job before it joins, to register pins.
    clear_existing_locks : bool
        Delete the pins this node created earlier, before ``lock_provider`` runs.
    on_rebalance : callable, optional
        Called after each change of this node's tokens, with a :class:`~jobsync_orm.RebalanceEvent` or without
        argument. Runs in a thread of its own, one call at a time, and may be slow or raise.
    on_revoke : callable, optional
        Called with a :class:`~jobsync_orm.RevokeEvent` (or without argument) when this node has stopped saying yes to
        tokens and is about to hand them over; the hand-over waits for it, at most ``drain_timeout_sec``.

    Raises
    ------
    TypeError
        ``date`` is no date.
    ConfigurationError
        ``node_name`` is no text of 1 to 200 characters without NUL and lone surrogates.
    """
