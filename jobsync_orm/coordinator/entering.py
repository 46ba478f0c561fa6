"""When a node that has joined may begin to work, and how long that is waited for.

It enters once ``minimum_nodes`` are there, a leader has planned, and all tokens meant for it have come; of an owner
that is slow to let go of its part it waits only a moment. Where that does not happen within ``wait_on_enter``, the
error says what was missing.
"""

from __future__ import annotations

import threading

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.coordinator.clock import Clock
from jobsync_orm.coordinator.handoff import Refreshed

__all__ = ["Entering"]

# Longest that entering waits for the rest of its tokens once it has some.
SLOW_OWNER_SEC = 1.0


class Entering:
    """One node's way in.

    Parameters
    ----------
    config : CoordinationConfig
        The settings.
    node_name : str
        This node.
    clock : Clock
        The loop's time.

    Attributes
    ----------
    done : threading.Event
        Set once this node works, or never will.
    deadline : float
        Until when it may take, on the loop's clock.
    unreachable : str
        Why the database could not be reached the last time.
    """

    def __init__(self, config: CoordinationConfig, node_name: str, clock: Clock) -> None:
        self.done = threading.Event()
        self.deadline = 0.0
        self.unreachable = ""
        self._config = config
        self._name = node_name
        self._clock = clock
        self._complete = self._planned = self._resting = False
        self._first_tokens_at: float | None = None

    def refreshed(self, found: Refreshed) -> None:
        """This is what the database says of this node."""
        self._resting = found.resting
        self._planned = found.state == "active" and not found.resting
        # Tokens on their way are waited for, but not one owner that is slow to let go of its part.
        if found.owned > 0 and self._first_tokens_at is None:
            self._first_tokens_at = self._clock.now()
        self._complete = self._planned and found.coming == 0

    def may(self, live_nodes: int) -> bool:
        """Whether it may work, where so many nodes are there."""
        enough = live_nodes >= self._config.minimum_nodes
        return enough and (self._complete or (self._planned and self._clock.now() >= self._by()))

    def look_again_at(self, live_nodes: int) -> float:
        """When to ask :meth:`may` again, if nothing happens before."""
        if self.done.is_set():
            return float("inf")
        enough = live_nodes >= self._config.minimum_nodes
        return self._by() if self._planned and enough else self.deadline

    def is_late(self) -> bool:
        """Whether it has taken longer than it may."""
        return not self.done.is_set() and self._clock.now() >= self.deadline

    def no_database(self) -> TimeoutError:
        """Why it is late, without a connection."""
        return TimeoutError(
            f"{self._name}: the database could not be reached before wait_on_enter had passed: {self.unreachable}"
        )

    def no_entry(self, members: list[str]) -> TimeoutError:
        """Why it is late, where these nodes are members."""
        names, least = ", ".join(members), self._config.minimum_nodes
        if len(members) < least:
            return TimeoutError(
                f"{self._name}: minimum_nodes={least}, but when wait_on_enter had passed only "
                f"{len(members)} were there: {names}"
            )
        if self._resting:
            return TimeoutError(
                f"{self._name}: when wait_on_enter had passed, the cluster still rested after a failover or a restore "
                "of the database: give wait_on_enter more than the longest heartbeat_timeout_sec"
            )
        return TimeoutError(
            f"{self._name}: no leader has assigned tokens before wait_on_enter had passed; there are: {names}. "
            "At least one live node needs can_lead=True"
        )

    def _by(self) -> float:
        """When to enter even if some tokens are still on their way."""
        first = self._first_tokens_at
        return self.deadline if first is None else min(self.deadline, first + SLOW_OWNER_SEC)
