"""What a user's callbacks are told."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RebalanceEvent", "RevokeEvent"]


@dataclass(frozen=True, slots=True)
class RebalanceEvent:
    """This node's tokens have changed.

    Attributes
    ----------
    is_initial : bool
        True for this node's first assignment.
    token_version : int
        The cluster's epoch at which the change was seen; only grows.
    tokens_added : int
        Count of tokens gained.
    tokens_removed : int
        Count of tokens lost. Always 0 when ``is_initial`` is True.
    """

    is_initial: bool
    token_version: int
    tokens_added: int
    tokens_removed: int


@dataclass(frozen=True, slots=True)
class RevokeEvent:
    """This node no longer says yes to some tokens and is about to hand them over.

    Attributes
    ----------
    tokens : frozenset[int]
        The tokens.
    deadline_sec : float
        Seconds after which they are handed over even if the callback has not returned. 0 when ``lost``.
    lost : bool
        True if they are gone already: this node was taken for dead.
    """

    tokens: frozenset[int]
    deadline_sec: float
    lost: bool
