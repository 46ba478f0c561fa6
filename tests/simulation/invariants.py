"""What must hold after every step, whoever does what.

* No two live processes say yes to one token.
* Only a token's owner commits work on it, and only work begun under the grant that is in force: not work from before
  the token went away and came back, nor that of an earlier life of the node.
* A token's epoch never falls, and each change of its owner raises it: one chain of grants, each with a fencing number
  of its own. The fencing numbers of a token's commits never fall.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tests.simulation.store import Store, Token

if TYPE_CHECKING:
    from tests.simulation.nodes import SimNode

__all__ = ["Ledger", "Violation"]


class Violation(AssertionError):
    """Something happened that must never happen."""


class Ledger:
    """Remembers every grant and every commit, and compares.

    A *grant* of a token begins when its owner or its epoch changes, and when a new life of a node takes up the token.
    """

    def __init__(self, total_tokens: int) -> None:
        self.grant = [0] * total_tokens  # number of the grant in force
        self.commits = 0
        self.refused = 0
        self._holder: list[str | None] = [None] * total_tokens  # incarnation that has taken up the token
        self._committed = [0] * total_tokens

    def on_token(self, token: int, old: Token, new: Token) -> None:
        """A row of the token table is written."""
        if new.epoch < old.epoch:
            raise Violation(f"the epoch of token {token} falls from {old.epoch} to {new.epoch}")
        if new.node != old.node and new.epoch == old.epoch:
            raise Violation(f"token {token} goes from {old.node} to {new.node} without a new epoch")
        if (new.node, new.epoch) != (old.node, old.epoch):
            self.grant[token] += 1
            self._holder[token] = None

    def on_refresh(self, incarnation: str, owned: Mapping[int, bool]) -> dict[int, int]:
        """A life of a node reads that it owns these tokens; False where that is no longer so when it is answered.

        Returns the number of each one's grant, -1 for one that is over.
        """
        grants = {}
        for token, current in owned.items():
            if not current:
                grants[token] = -1
                continue
            if self._holder[token] != incarnation:
                self.grant[token] += self._holder[token] is not None
                self._holder[token] = incarnation
            grants[token] = self.grant[token]
        return grants

    def on_promotion(self, old: Sequence[Token], new: Sequence[Token]) -> None:
        """The database has forgotten the newest grants: what is begun under one to another node is late."""
        for token, (forgotten, row) in enumerate(zip(old, new, strict=True)):
            if forgotten.node != row.node:
                self.grant[token] += 1
                self._holder[token] = None

    def on_commit(self, store: Store, token: int, node: str, grant: int) -> None:
        """Work on ``token`` commits that was begun under ``grant``."""
        row = store.now.tokens[token]
        if row.node != node:
            raise Violation(f"{node} commits work on token {token}, which is {row.node}'s")
        if grant != self.grant[token]:
            raise Violation(f"{node} commits stale work on token {token}: grant {grant}, now {self.grant[token]}")
        if row.epoch < self._committed[token]:
            raise Violation(f"token {token}: fencing number {row.epoch} after {self._committed[token]}")
        self._committed[token] = row.epoch
        self.commits += 1

    def check_one_yes(self, nodes: Iterable[SimNode]) -> None:
        """No two of these processes say yes to one token at this moment."""
        taken = 0
        for node in nodes:
            mine = node.saying_yes()
            if taken & mine:
                twice = taken & mine
                tokens = [token for token in range(len(self.grant)) if twice >> (8 * token) & 1]
                others = [n.title for n in nodes if n.saying_yes() & twice]
                raise Violation(f"{' and '.join(others)} both say yes to {tokens}")
            taken |= mine
