"""The metrics that there are: one list for Prometheus and OpenTelemetry, and what each event does to them.

Labels are few, and each has few values. ``appname`` is the cluster, ``node`` the node; ``type`` is a job type, of which
the first hundred are told apart. Ids and keys of tasks and jobs are never labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from jobsync_orm.observe import (
    AttemptsEnded,
    Event,
    Evicted,
    FailedOver,
    FenceRejected,
    Heartbeat,
    JobsClaimed,
    JobsEnqueued,
    JobsRescued,
    NodesTakenForDead,
    OwnershipChanged,
    Rebalanced,
    RowsClaimed,
    SessionBroke,
    TaskClaims,
    TokensReleased,
    WokenUp,
)

__all__ = ["METRICS", "MOST_TYPES", "OTHER", "Change", "Metric", "Types", "changes"]

# More job types than these are counted together, as OTHER.
MOST_TYPES = 100
OTHER = "(other)"

# Upper bounds in seconds: of what takes milliseconds, of moves of tokens, and of work.
QUICK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
MOVES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 15, 30, 60)
WORK = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)


@dataclass(frozen=True, slots=True, eq=False)  # each is itself alone, and quick to be found by that
class Metric:
    """One metric.

    Attributes
    ----------
    base : str
        Its name without the library's, a unit and ``total``.
    kind : str
        ``counter``, ``histogram`` or ``gauge``.
    text : str
        What it says.
    labels : tuple of str
        In the order in which values are given; ``appname`` comes first.
    unit : str
        ``s`` for seconds, or empty.
    buckets : tuple of float
        Of a histogram.
    """

    base: str
    kind: Literal["counter", "histogram", "gauge"]
    text: str
    labels: tuple[str, ...]
    unit: str = ""
    buckets: tuple[float, ...] = ()

    @property
    def prometheus_name(self) -> str:
        """As Prometheus has it, without ``_total``, which its client adds."""
        return f"jobsync_{self.base}{'_seconds' if self.unit == 's' else ''}"

    @property
    def opentelemetry_name(self) -> str:
        """As OpenTelemetry has it, where the unit is no part of the name."""
        return f"jobsync.{self.base}"


CLUSTER = ("appname",)
NODE = ("appname", "node")
TYPE = ("appname", "node", "type")


def _counter(base: str, text: str, labels: tuple[str, ...] = NODE) -> Metric:
    return Metric(base, "counter", text, labels)


def _histogram(base: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = NODE) -> Metric:
    return Metric(base, "histogram", text, labels, "s", buckets)


def _gauge(base: str, text: str, labels: tuple[str, ...] = NODE, unit: str = "") -> Metric:
    return Metric(base, "gauge", text, labels, unit)


# -- a node, as it knows itself --------------------------------------------------------------------------------------

TOKENS_OWNED = _gauge("tokens_owned", "Tokens that this node says yes to")
EPOCH = _gauge("epoch", "Highest epoch of the cluster that this node has seen")
APPLIED_EPOCH = _gauge("applied_epoch", "Epoch of the tokens that this node goes by")
LEASE_REMAINING = _gauge("lease_remaining", "Time for which this node may say yes without another heartbeat", unit="s")
HEALTHY = _gauge("healthy", "1 if this node's lease runs and its connection works")
LEADER = _gauge("leader", "1 if this node leads")
LIVE_NODES = _gauge("live_nodes", "Members of the cluster, as of this node's last heartbeat")
LAST_HEARTBEAT = _gauge("last_heartbeat_timestamp", "When the last heartbeat was answered, since 1970", unit="s")

HEARTBEAT = _histogram("heartbeat_duration", "Time until a heartbeat was answered", QUICK)
BROKEN = _counter("connections_lost", "Coordination connections that broke")
EVICTED = _counter("evicted", "Times that this node was taken for dead, or the cluster was formed anew")
TAKEN_FOR_DEAD = _counter("nodes_taken_for_dead", "Nodes that this one has taken out of the cluster")
REBALANCES = _counter("rebalances", "Plans, or batches of large ones, that this node has published", (*NODE, "reason"))
MOVED = _counter("tokens_moved", "Tokens moved by these")
PLANNING = _histogram("rebalance_duration", "Time to read, plan and publish", QUICK)
GAINED = _counter("tokens_gained", "Tokens that have become this node's")
LOST = _counter("tokens_lost", "Tokens that are this node's no longer")
HANDOFF = _histogram("handoff_duration", "Time from when a node is asked for tokens until it has released them", MOVES)
FAILOVER = _histogram(
    "failover_duration", "Time from a dead node's last sign of life until its tokens are others'", MOVES
)

# -- the application's work on rows and tasks ------------------------------------------------------------------------

REJECTED = _counter("fence_rejections", "Writes refused because tokens were not this node's any more", (*NODE, "where"))
CLAIMS = _counter(
    "task_claims", "Claims on tasks: taken, refused, and ended: completed, released, lost", (*NODE, "result")
)
ROWS = _counter("rows_claimed", "Rows that job.claim has returned")

# -- the cluster, read from its tables -------------------------------------------------------------------------------

NODES = _gauge("cluster_nodes", "Members of the cluster, by its table", CLUSTER)
PARKED = _gauge("parked_tokens", "Tokens without a live owner", CLUSTER)
DRAINING = _gauge("draining_tokens", "Tokens on their way to another owner", CLUSTER)
JOBS = _gauge("queue_jobs", "Jobs that have not finished, by state", ("appname", "type", "state"))
OLDEST = _gauge("queue_oldest_pending", "How long the oldest job has been ready", ("appname", "type"), unit="s")
READ_FAILURES = _counter("database_read_failures", "Reads of the cluster's tables that have failed", CLUSTER)

# -- a worker of the queue -------------------------------------------------------------------------------------------

ENQUEUED = _counter("jobs_enqueued", "Jobs that this process has written, committed or not", ("appname", "type"))
CLAIMED = _counter("jobs_claimed", "Jobs that this worker has claimed", TYPE)
ATTEMPTS = _counter("attempts", "Attempts that have ended, by outcome", (*TYPE, "outcome"))
RETRIES = _counter("retries", "Attempts after which the job is to be tried again", TYPE)
RUN = _histogram("attempt_duration", "Time that handlers took", WORK, TYPE)
PICKUP = _histogram("pickup_latency", "Time from when a job was ready until its handler was called", WORK, TYPE)
RESCUED = _counter("jobs_rescued", "Jobs taken from workers that had died or held them too long")
WAKE_UPS = _counter("wake_ups", "Notifications of new jobs that this worker has heard")
WORKER_HEALTHY = _gauge("worker_healthy", "1 if this worker does its work")
RUNNING = _gauge("worker_running_attempts", "Attempts that run now")
ABANDONED = _gauge("worker_abandoned_attempts", "Attempts that go on after their timeout")
TURN = _gauge("worker_turn_age", "Time since the worker's loop completed a turn", unit="s")
DROPPED = _counter("events_dropped", "Events of this process that were not counted, because too many came at once", ())

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))

# A metric, the values of its labels, and how much is added or observed.
Change = tuple[Metric, tuple[str, ...], float]


class Types:
    """Keeps the number of job types bounded: whoever may enqueue may call a type what they like."""

    def __init__(self, most: int = MOST_TYPES) -> None:
        self._most = most
        self._known: set[str] = set()

    def __call__(self, type: str) -> str:
        """The type, or OTHER if there are too many already."""
        if type not in self._known:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(type)
        return type


def changes(event: Event, appname: str, types: Types) -> Iterator[Change]:
    """What ``event`` of the cluster ``appname`` does to the metrics."""
    find: Callable[..., Iterator[Change]] | None = _CHANGES.get(type(event))
    if find is not None:
        yield from find(event, appname, types)


def _attempts(event: AttemptsEnded, app: str, types: Types) -> Iterator[Change]:
    # There may be thousands, nearly all of them alike.
    ended: Counter[tuple[str, str]] = Counter()
    retried: Counter[str] = Counter()
    for attempt in event.attempts:
        labels = (app, event.node, types(attempt.type))
        ended[labels[2], attempt.outcome] += 1
        if attempt.state == "retrying":
            retried[labels[2]] += 1
        if attempt.took is not None:
            yield RUN, labels, attempt.took
        if attempt.waited is not None:
            yield PICKUP, labels, attempt.waited
    for (type, outcome), many in ended.items():
        yield ATTEMPTS, (app, event.node, type, outcome), many
    for type, many in retried.items():
        yield RETRIES, (app, event.node, type), many


def _claimed(event: JobsClaimed, app: str, types: Types) -> Iterator[Change]:
    for type, many in event.by_type.items():
        yield CLAIMED, (app, event.node, types(type)), many


def _rebalanced(event: Rebalanced, app: str, types: Types) -> Iterator[Change]:
    yield REBALANCES, (app, event.node, event.reason), 1
    yield MOVED, (app, event.node), event.moved
    yield PLANNING, (app, event.node), event.seconds


def _changed(event: OwnershipChanged, app: str, types: Types) -> Iterator[Change]:
    yield GAINED, (app, event.node), event.gained
    yield LOST, (app, event.node), event.lost


def _one(metric: Metric, value: Callable[[Any], float] = lambda event: 1, label: str = "") -> Any:
    def change(event: Any, app: str, types: Types) -> Iterator[Change]:
        labels = (app, event.node, getattr(event, label)) if label else (app, event.node)
        yield metric, labels, value(event)

    return change


def _many(event: Any) -> float:
    return float(event.many)


def _seconds(event: Any) -> float:
    return float(event.seconds)


_CHANGES: dict[type, Any] = {
    Heartbeat: _one(HEARTBEAT, _seconds),
    SessionBroke: _one(BROKEN),
    Evicted: _one(EVICTED),
    NodesTakenForDead: _one(TAKEN_FOR_DEAD, _many),
    Rebalanced: _rebalanced,
    FailedOver: _one(FAILOVER, _seconds),
    OwnershipChanged: _changed,
    TokensReleased: _one(HANDOFF, _seconds),
    FenceRejected: _one(REJECTED, label="where"),
    TaskClaims: _one(CLAIMS, _many, label="result"),
    RowsClaimed: _one(ROWS, _many),
    JobsEnqueued: lambda event, app, types: iter([(ENQUEUED, (app, types(event.type)), event.many)]),
    JobsClaimed: _claimed,
    AttemptsEnded: _attempts,
    JobsRescued: _one(RESCUED, _many),
    WokenUp: _one(WAKE_UPS, _many),
}
