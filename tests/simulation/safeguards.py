"""The protocol's safeguards, each with a way to switch it off: a simulation that cannot fail shows nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jobsync_orm.coordinator import Coordinator
from tests.simulation.world import Weakening

__all__ = ["SAFEGUARDS"]


def _longer_lease(coordinator: Coordinator) -> None:
    """The node says yes for two seconds after the others may take it for dead."""
    coordinator._lease_sec += 2.2


def _lease_from_receipt(coordinator: Coordinator) -> None:
    """The lease counts from when the answer came, not from when the heartbeat was sent."""
    real = coordinator._membership.beat

    def beat(*arguments: Any, **named: Any) -> Any:
        answer = real(*arguments, **named)
        return replace(answer, sent_at=answer.received_at)

    coordinator._membership.beat = beat  # type: ignore[method-assign]


def _no_grace(coordinator: Coordinator) -> None:
    """A freed lock convicts at once."""
    observer = coordinator._observer
    real = observer.dead

    def dead(asked_at: float, among: Any) -> Any:
        return real(asked_at + 2.5 * 0.6, among)  # as though that had been seen for so long already

    observer.dead = dead  # type: ignore[method-assign]


def _unwatched_connection(coordinator: Coordinator) -> None:
    """The view is good for the whole lease, whatever happens to the connection."""
    coordinator._valid_until = lambda: coordinator._lease_until  # type: ignore[method-assign]
    coordinator.ownership.doubt = lambda: None  # type: ignore[method-assign]


def _impatient(coordinator: Coordinator) -> None:
    """A heartbeat that stands still for two seconds convicts."""
    observer = coordinator._observer
    real = observer.dead

    def dead(asked_at: float, among: Any) -> Any:
        return real(asked_at + 2.0, among)

    def look(rows: Any, *others: Any) -> None:
        aged([replace(row, age_sec=row.age_sec + 2.0) for row in rows], *others)

    aged = observer.look
    observer.look = look  # type: ignore[method-assign]
    observer.dead = dead  # type: ignore[method-assign]


def _boasting(coordinator: Coordinator) -> None:
    """A heartbeat says that the newest epoch is applied although the view is older."""
    membership = coordinator._membership
    real = membership.beat

    def beat(session: Any, applied: int, **named: Any) -> Any:
        return real(session, applied + 1000, **named)

    membership.beat = beat  # type: ignore[method-assign]


CHURN = {"join": 4, "leave": 4, "restart": 2, "pin": 4, "unpin": 2}
REJOINS = {"join": 3, "pause": 5, "stall": 5, "restart": 5, "reset": 3, "packets lost": 2}
ORDERS = {"join": 4, "leave": 1, "drain": 5, "undrain": 4, "expel": 4}
PROMOTIONS = {"join": 4, "leave": 2, "promotion": 5, "starve": 3}

SAFEGUARDS = {
    "the lease ends before the others may act": Weakening(coordinator=_longer_lease),
    "the lease counts from when the heartbeat was sent": Weakening(
        coordinator=_lease_from_receipt, mix={"join": 3, "pause": 10}
    ),
    "a freed lock convicts only after the grace": Weakening(
        coordinator=_no_grace, mix={"join": 3, "reset": 8, "terminate": 2}
    ),
    "a broken connection ends the certainty": Weakening(coordinator=_unwatched_connection),
    "a silent node is given its whole timeout": Weakening(("evict_any_heartbeat",), coordinator=_impatient),
    "a node says which marks it has applied": Weakening(coordinator=_boasting),
    "a mark is forced only once it has been applied": Weakening(("force_without_applied",)),
    "a release answers one mark": Weakening(("release_any_mark",), mix={"join": 4, "leave": 1, "pin": 8, "unpin": 6}),
    "a plan is for the members it was made for": Weakening(("publish_any_revision",), mix=REJOINS),
    "tokens of an earlier life are taken up at a new epoch": Weakening(("refresh_any_epoch",), mix=REJOINS),
    "a cluster formed anew rests": Weakening(("reform_without_rest",), mix=PROMOTIONS),
    "a drained node is asked for its tokens": Weakening(("drained_is_gone",), mix=ORDERS),
    "who is expelled keeps its tokens until it has heard of it": Weakening(("expel_evicts",), mix=ORDERS),
    "a commit is fenced": Weakening(fence="none"),
    "the fence compares epochs": Weakening(fence="any epoch", mix=CHURN),
    "the fence knows the epoch of the begin": Weakening(fence="epoch at commit", mix=CHURN),
}
