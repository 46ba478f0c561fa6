"""What an application does with its tokens: transactions that end with the commit fence, and claims.

A transaction begins with the view its node has then, and may commit much later. The fence is the statement of the
project's commit fence: the token row, locked FOR SHARE, must be this node's at an epoch the begin-view knew.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobsync_orm.coordinator.view import View
from tests.simulation.store import Claim

if TYPE_CHECKING:
    from tests.simulation.nodes import SimNode
    from tests.simulation.world import World

__all__ = ["Application"]


@dataclass(slots=True)
class Work:
    """One transaction on one token."""

    node: SimNode
    token: int
    view: View
    grant: int
    server: object  # a transaction ends with the server it runs on


class Application:
    """The work of all nodes."""

    def __init__(self, world: World, rng: random.Random, fence: str) -> None:
        self._world = world
        self._rng = rng
        self._fence = fence
        self._claims = 0

    def attend(self, node: SimNode) -> None:
        """Let this node work from now on."""
        self._world.scheduler.after(0.8 * self._rng.random(), self._turn, node)

    def _turn(self, node: SimNode) -> None:
        if node.dead:
            return
        world, rng = self._world, self._rng
        world.scheduler.after(0.05 + 0.9 * rng.random(), self._turn, node)
        token = rng.randrange(world.total_tokens)
        if not node.may_finish(token) or token not in node.grants:
            return
        draw = rng.random()
        if draw < 0.8:  # a token that is asked for may still be worked on in a fenced transaction
            work = Work(node, token, node.coordinator.ownership.held, node.grants[token], world.server_life)
            world.scheduler.after(self._duration(), self._end, work)
        elif node.says_yes(token):
            self._claim(node, token)

    def _duration(self) -> float:
        draw = self._rng.random()
        return 0.05 * draw if draw < 0.4 else 8 * (draw - 0.4) if draw < 0.75 else 60 * (draw - 0.75)

    # -- transactions ------------------------------------------------------------------------------------------

    def _end(self, work: Work) -> None:
        """The last statement of the transaction: the fence."""
        world = self._world
        if work.node.dead or work.server is not world.server_life:
            return
        if work.node.paused:
            world.scheduler.after(0.05, self._end, work)
            return
        if not self._passes(work):
            world.ledger.refused += 1
            return
        world.store.shared[work.token] += 1
        draw = self._rng.random()
        world.scheduler.after(0 if draw < 0.8 else 1.5 * (draw - 0.8) / 0.2, self._commit, work)

    def _passes(self, work: Work) -> bool:
        row = self._world.store.now.tokens[work.token]
        if self._fence == "none":
            return True
        known = work.view.epoch
        if self._fence == "epoch at commit":
            known = work.node.coordinator.ownership.held.epoch
        return row.node == work.node.name and (row.epoch <= known or self._fence == "any epoch")

    def _commit(self, work: Work) -> None:
        # Sent already: it is carried out whether or not the process still lives.
        world = self._world
        if work.server is not world.server_life:
            return
        world.store.shared[work.token] -= 1
        if self._rng.random() < 0.97:
            world.log("%s commits on token %d, begun at epoch %d", work.node.title, work.token, work.view.epoch)
            world.ledger.on_commit(world.store, work.token, work.node.name, work.grant)

    # -- claims ------------------------------------------------------------------------------------------------

    def _claim(self, node: SimNode, token: int) -> None:
        world = self._world
        row = world.store.now.tokens[token]
        life = world.store.now.nodes.get(node.name)
        incarnation = node.coordinator.incarnation
        if life is None or life.incarnation != incarnation or row.node != node.name or row.next_node is not None:
            return
        self._claims += 1
        task = f"t{self._claims}"
        world.log("%s claims %s on token %d", node.title, task, token)
        world.store.now.claims[task] = Claim(token, node.name, incarnation, row.epoch)
        world.scheduler.after(4 * self._rng.random(), self._complete, node, task)

    def _complete(self, node: SimNode, task: str) -> None:
        if not node.dead:
            self._world.store.now.claims.pop(task, None)
