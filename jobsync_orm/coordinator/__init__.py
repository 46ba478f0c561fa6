"""The running service of one node: membership, leadership, hand-off, and the loop that ties them together."""

from jobsync_orm.coordinator.events import RebalanceEvent, RevokeEvent
from jobsync_orm.coordinator.service import Coordinator

__all__ = ["Coordinator", "RebalanceEvent", "RevokeEvent"]
