"""From stored pins to the nodes each token is allowed on."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence

from jobsync_orm.exceptions import InvalidPattern
from jobsync_orm.like import compile_pattern
from jobsync_orm.logs import fields

__all__ = ["allowed_nodes"]

logger = logging.getLogger("jobsync_orm")


def allowed_nodes(pins: Iterable[tuple[int, Sequence[str]]], names: Collection[str]) -> dict[int, frozenset[str]]:
    """The live nodes each pinned token may be on.

    One pin: all nodes that match the first of its patterns which any node matches. Several pins on one token: the
    nodes that match some pattern of each pin; where there are several, those with the smallest sum of pattern
    positions, so that no pin is served well at another's cost.

    Parameters
    ----------
    pins : iterable of (int, sequence of str)
        Token and ordered patterns, one entry for each pin.
    names : collection of str
        Live nodes.

    Returns
    -------
    dict of int to frozenset of str
        Node names; empty where no live node fits, and the token is parked.
    """
    ordered = sorted(names)
    ranks: dict[tuple[str, ...], dict[str, int]] = {}
    by_token: dict[int, list[tuple[str, ...]]] = {}
    for token, patterns in pins:
        # Something else than a list has been written past register_lock; it matches nobody.
        by_token.setdefault(token, []).append(tuple(patterns) if isinstance(patterns, list | tuple) else ())
    choice: dict[tuple[tuple[str, ...], ...], frozenset[str]] = {}
    allowed = {}
    for token, lists in by_token.items():
        key = tuple(sorted(set(lists))) if len(lists) > 1 else (lists[0],)
        if key not in choice:
            for patterns in key:
                if patterns not in ranks:
                    ranks[patterns] = _ranks(patterns, ordered)
            common = [name for name in ordered if all(name in ranks[patterns] for patterns in key)]
            score = {name: sum(ranks[patterns][name] for patterns in key) for name in common}
            best = min(score.values(), default=0)
            choice[key] = frozenset(name for name in common if score[name] == best)
        allowed[token] = choice[key]
    return allowed


def _ranks(patterns: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """Name -> position of the first pattern it matches."""
    ranks: dict[str, int] = {}
    for position, pattern in enumerate(patterns):
        try:
            matches = compile_pattern(pattern)
        except InvalidPattern as error:  # written past register_lock
            logger.warning("a pin matches no node: %s", error, extra=fields("pin_unusable"))
            continue
        for name in names:
            if name not in ranks and matches(name):
                ranks[name] = position
    return ranks
