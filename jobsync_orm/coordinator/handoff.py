"""This node's own tokens: take the view the database gives, let go of what it asks for.

A refresh reads, in one snapshot, which tokens are this node's and which of them it has been asked to give up. From that
moment it says no to the latter; then ``on_revoke`` runs, off the loop; then the tokens are released, naming the mark
each release answers, so that one which arrives late changes nothing. Tokens with an open claim wait for its end, and a
token whose row an application's transaction holds waits for that; past ``drain_timeout_sec`` the leader moves them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jobsync_orm.coordinator.callbacks import Callback, Delivery
from jobsync_orm.coordinator.clock import SYSTEM, Clock
from jobsync_orm.coordinator.events import RebalanceEvent, RevokeEvent
from jobsync_orm.coordinator.membership import Membership
from jobsync_orm.coordinator.session import Session, array, parse_array
from jobsync_orm.coordinator.statements import HEAVY_SEC, Statements
from jobsync_orm.coordinator.view import Ownership
from jobsync_orm.observe import Audience, OwnershipChanged, TokensReleased

__all__ = ["Handoff", "Refreshed"]

# Seconds between two tries to release tokens that something still holds.
RETRY_FIRST_SEC, RETRY_MOST_SEC = 0.1, 1.0


@dataclass(frozen=True, slots=True)
class Refreshed:
    """What a refresh found. ``state`` None: this life of the node is over."""

    state: str | None
    epoch: int
    owned: int = 0
    coming: int = 0
    resting: bool = False  # the cluster has been formed anew, and nobody owns anything yet


class Handoff:
    """The owner's part of a hand-off."""

    def __init__(
        self,
        statements: Statements,
        membership: Membership,
        ownership: Ownership,
        drain_timeout_sec: float,
        on_rebalance: Callback | None,
        on_revoke: Callback | None,
        clock: Clock = SYSTEM,
        audience: Audience | None = None,
    ) -> None:
        self._clock = clock
        self._audience = audience or Audience()
        self._asked_at: dict[int, float] = {}  # when it was seen that a token is to be handed over, if anybody wants it
        self._sql = statements
        self._membership = membership
        self._ownership = ownership
        self._drain = drain_timeout_sec
        self._on_rebalance = on_rebalance
        self._on_revoke = on_revoke
        self._draining: set[int] = set()
        self._marks: list[int] = []
        self._revoking: list[tuple[Delivery, frozenset[int]]] = []
        self._earlier = False
        self._told = False
        self._retry = RETRY_FIRST_SEC
        self.coming = False  # whether tokens are on their way here
        self.known_epoch = 0  # of the view this life of the node has taken
        self.release_at = self.refresh_at = float("inf")
        self._rest_until = 0.0
        self.first_rebalance: Delivery | None = None

    # -- refresh ------------------------------------------------------------------------------------------------

    def refresh(self, session: Session, valid_until: Callable[[], float], known_epoch: int = 0) -> Refreshed:
        """Take the database's view of this node's tokens, unless it is from before ``known_epoch``.

        ``valid_until`` says for how long it may be trusted.
        """
        ((state, epoch_text, owned_text, draining_text, marks, coming, earlier, rest),) = session.execute(
            self._sql.refresh,
            self._membership.name,
            self._membership.incarnation,
            timeout=self._membership.answer_sec,
        )
        epoch = int(epoch_text or 0)
        if state is None or epoch < max(known_epoch, self.known_epoch):
            # An epoch that has gone back is that of a restored or promoted copy, which has not seen all that was.
            return Refreshed(None, epoch)
        owned, draining = parse_array(owned_text), set(parse_array(draining_text))
        # The end by this process's clock as it was seen first counts as well: the server's clock may be set forward.
        if rest is not None:
            self._rest_until = max(self._rest_until, self._clock.now() + float(rest))
        resting = self._clock.now() < self._rest_until
        if resting:
            owned = []
        gained, lost = self._ownership.publish(owned, epoch, valid_until(), () if resting else draining)
        self.known_epoch = epoch
        has_earlier = earlier not in (None, "0")
        if draining != self._draining or has_earlier != self._earlier:
            self._retry = RETRY_FIRST_SEC
            self.release_at = (
                max(self._clock.now(), self._rest_until + 0.01) if draining or has_earlier else float("inf")
            )
        # What the database gives out after its rest may have been read before this process's own was over.
        self.refresh_at = self._rest_until + 0.01 if resting else float("inf")
        self._draining, self._marks, self._earlier = draining, parse_array(marks), has_earlier
        self.coming = coming not in (None, "0")
        if self._audience.active:
            self._time(draining, owned)
        self._tell(gained, lost, draining, epoch)
        return Refreshed(state, epoch, len(owned), int(coming or 0), resting)

    def lose_all(self) -> None:
        """This life of the node is over: whatever it had is gone."""
        epoch, self.known_epoch = self.known_epoch, 0  # the next life takes whatever epoch the database has
        lost = self._ownership.clear()
        self._draining, self._marks, self._earlier = set(), [], False
        self._asked_at = {}
        self.release_at = self.refresh_at = float("inf")
        self._tell([], lost, set(), epoch)

    def _time(self, draining: set[int], owned: list[int]) -> None:
        """Take the time of tokens on their way out: those that are no longer, and not kept after all, are out."""
        if self._asked_at:
            self._released(self._asked_at.keys() - draining - set(owned))
        now = self._clock.now()
        self._asked_at = {token: self._asked_at.get(token, now) for token in draining}

    def _released(self, tokens: set[int]) -> None:
        asked_at = [at for token in tokens if (at := self._asked_at.pop(token, None)) is not None]
        if asked_at:
            took = self._clock.now() - min(asked_at)
            self._audience.tell(TokensReleased(self._membership.name, self.known_epoch, len(asked_at), took))

    def _tell(self, gained: list[int], lost: list[int], draining: set[int], epoch: int) -> None:
        if self._audience.active and (gained or lost):
            self._audience.tell(OwnershipChanged(self._membership.name, epoch, len(gained), len(lost)))
        if self._on_revoke is not None and lost:
            asked, gone = draining.intersection(lost), set(lost) - draining
            if asked:
                tokens = frozenset(asked)
                event = RevokeEvent(tokens, self._drain, lost=False)
                self._revoking.append((self._on_revoke.send(event), tokens))
            if gone:
                self._on_revoke.send(RevokeEvent(frozenset(gone), 0, lost=True))
        if self._on_rebalance is not None and (gained or lost):
            first = not self._told and bool(gained)
            self._told = self._told or first
            removed = 0 if first else len(lost)
            delivery = self._on_rebalance.send(RebalanceEvent(first, epoch, len(gained), removed))
            if first:
                self.first_rebalance = delivery

    # -- release ------------------------------------------------------------------------------------------------

    @property
    def revoked(self) -> bool:
        """Whether ``on_revoke`` has returned for tokens that now wait to be released."""
        return any(delivery.done.is_set() for delivery, _ in self._revoking)

    def release(self, session: Session) -> bool:
        """Release what can be released now; True if a refresh is needed to know what is left, or has been taken up."""
        self._revoking = [(delivery, tokens) for delivery, tokens in self._revoking if not delivery.done.is_set()]
        busy = {token for _, tokens in self._revoking for token in tokens}
        ready = len(self._draining - busy)
        self.release_at = self._clock.now() + self._retry  # whatever fails below is tried again
        moved = 0
        taken_up = False
        if ready:
            # A mark names all its tokens: one plan is one epoch, and the refresh that saw the mark saw them all.
            rows = session.execute(
                self._sql.release,
                self._membership.name,
                self._membership.incarnation,
                array(self._marks),
                array(sorted(busy)),
                timeout=HEAVY_SEC,
            )
            moved = sum(int(row[1] or 0) for row in rows)
            taken_up = any(row[0] == self._membership.name for row in rows)
            if moved == ready:
                if self._audience.active:
                    self._released(self._draining - busy)
                self._draining &= busy
        regained = 0
        if self._earlier:
            ((count,),) = session.execute(
                self._sql.regain, self._membership.name, self._membership.incarnation, timeout=HEAVY_SEC
            )
            regained = int(count or 0)
        if self._draining - busy or self._earlier:
            self.release_at = max(self._clock.now() + self._retry, self._rest_until + 0.01)
            self._retry = min(2 * self._retry, RETRY_MOST_SEC)
        else:
            self.release_at = float("inf")
        return taken_up or regained > 0 or 0 < moved < ready

    def revoke_all(self) -> Delivery | None:
        """Say no to everything, because this node leaves, and tell ``on_revoke``."""
        lost = self._ownership.clear()
        if self._on_revoke is None or not lost:
            return None
        return self._on_revoke.send(RevokeEvent(frozenset(lost), self._drain, lost=False))
