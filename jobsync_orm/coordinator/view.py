"""What this node may say yes to, and until when.

The loop publishes; the application's threads read. A reader takes one reference to an immutable :class:`View` and
compares one clock with one number, so ``can_claim_task`` needs no lock. The number, ``valid_until``, is the smaller of

* the lease: the time the last acknowledged heartbeat was *sent*, plus ``heartbeat_timeout_sec`` minus a margin; the
  others may not take this node's tokens before that has passed; and
* the loop's last look at the connection plus ``connection_grace_sec``: nobody acts on a freed advisory lock before more
  than twice that has passed.

So a process that was paused, or whose loop cannot run, stops saying yes by itself the moment it runs again, without
having to notice anything. Past ``valid_until`` a reader waits for certainty, bounded, instead of guessing: a batch loop
must not silently skip a task that is its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from jobsync_orm.coordinator.clock import now

__all__ = ["Ownership", "View"]

FOREVER = float("inf")


class View:
    """Tokens owned at one epoch. ``valid_until`` is moved on by the loop.

    ``owned[token]`` is 1 for a token this node may say yes to, 2 for one it has been asked to hand over and still owns,
    so that work begun on it may be finished, else 0.
    """

    __slots__ = ("count", "epoch", "owned", "valid_until")

    def __init__(self, owned: bytes, epoch: int, valid_until: float) -> None:
        self.owned = owned
        self.epoch = epoch
        self.count = owned.count(1)
        self.valid_until = valid_until

    def tokens(self) -> set[int]:
        """The owned tokens as a new set."""
        return {token for token, mine in enumerate(self.owned) if mine == 1}


class Ownership:
    """The present view, shared by the loop and the application's threads.

    Parameters
    ----------
    total_tokens : int
        Tokens of the cluster.
    wait_sec : float
        Seconds for which a reader may wait for certainty, once per interruption.
    """

    def __init__(self, total_tokens: int, wait_sec: float) -> None:
        self._nothing = bytes(total_tokens)
        self._wait_sec = wait_sec
        self._changed = threading.Condition()
        self._waiting = 0
        self._give_up_at: float | None = None
        self.view = View(self._nothing, 0, FOREVER)
        self.held = self.view  # what is owned, whether or not it may be said at the moment

    # -- the loop ----------------------------------------------------------------------------------------------

    def publish(
        self, tokens: Iterable[int], epoch: int, valid_until: float, draining: Iterable[int] = ()
    ) -> tuple[list[int], list[int]]:
        """Own exactly ``tokens`` from now on, and those of ``draining`` that were owned only to finish what was begun.

        Nothing can have been begun on one that was not: it may be an earlier life's, whose work must not meet this
        one's. Returns the tokens gained and lost, each ascending.
        """
        before = self.held.owned
        owned = bytearray(len(before))
        for token in tokens:
            owned[token] = 1
        for token in draining:
            owned[token] = 2 if before[token] else 0
        after = bytes(owned)
        if after == before:
            gained: list[int] = []
            lost: list[int] = []
        else:
            pairs = enumerate(zip(before, after, strict=True))
            changed = [(token, mine == 1) for token, (was, mine) in pairs if (was == 1) != (mine == 1)]
            gained = [token for token, mine in changed if mine]
            lost = [token for token, mine in changed if not mine]
        self.held = View(after, epoch, valid_until)
        self._show(self.held)
        return gained, lost

    def extend(self, valid_until: float) -> None:
        """The present tokens are certain until ``valid_until``."""
        if self.view is not self.held:
            self._show(self.held)
        self.held.valid_until = valid_until
        self._give_up_at = None
        if self._waiting:
            self._wake()

    def doubt(self) -> None:
        """From now on nobody knows, until the next ``extend``, ``publish`` or ``deny``."""
        self.held.valid_until = 0

    def deny(self) -> None:
        """Answer no to everything; ``held`` stays, for when certainty returns."""
        if self.view is self.held:
            self._show(View(self._nothing, self.held.epoch, FOREVER))

    def clear(self) -> list[int]:
        """Own nothing any more. Returns the tokens lost, ascending."""
        lost = self.held.tokens()
        self.held = View(self._nothing, self.held.epoch, FOREVER)
        self._show(self.held)
        return sorted(lost)

    def _show(self, view: View) -> None:
        self.view = view
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._give_up_at = None
            self._changed.notify_all()

    # -- the application's threads -----------------------------------------------------------------------------

    def decide(self, token: int) -> bool:
        """Whether this node may work on ``token``, waiting for certainty where there is none."""
        with self._changed:
            give_up_at = self._give_up_at
            if give_up_at is None:
                # Shared by all readers of one interruption: a loop over 2,000 tasks waits once, not 2,000 times.
                give_up_at = self._give_up_at = now() + self._wait_sec
            self._waiting += 1
            try:
                while True:
                    view = self.view
                    if now() < view.valid_until:
                        return view.owned[token] == 1
                    left = give_up_at - now()
                    if left <= 0:
                        return False
                    # Bounded slices: extend() looks at _waiting without the lock and may just have missed us.
                    self._changed.wait(min(left, 0.05))
            finally:
                self._waiting -= 1
