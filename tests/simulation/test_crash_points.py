"""One hand-off, stopped at each of its steps: before a statement is sent, while it is on its way, after its answer.

The leader n1 and n2 share all tokens when n3 joins: n1 is leader and source, n2 is a source, n3 the target. Whatever
happens to whom at which step, nobody ever says yes to another's token, and in the end every token has its owner.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation.nodes import SimNode
from tests.simulation.world import Weakening, World, surroundings

JOINS_AT, HEALS_AT = 4.0, 18.0


def restart(world: World, node: SimNode) -> None:
    world.scheduler.after(1.0, world.start, node.name)
    node.kill()


def reset(world: World, node: SimNode) -> None:
    for connection in node.connections:
        if connection.alive:
            connection.reset()


def restart_server(world: World, node: SimNode) -> None:
    world.server.stop()
    world.scheduler.after(1.0, world.server.start)


WHAT: dict[str, Callable[[World, SimNode], None]] = {
    "killed": lambda world, node: node.kill(),
    "killed and started again": restart,
    "paused for less than its lease": lambda world, node: node.freeze(1.5),
    "paused for longer": lambda world, node: node.freeze(7.0),
    "its loop starved": lambda world, node: node.freeze(7.0, whole=False),
    "its connection reset": reset,
    "its packets lost": lambda world, node: world.lose_packets(node, 6.0),
    "the server restarted": restart_server,
}


def hand_off(at: int | None, what: Callable[[World, SimNode], None] | None) -> list[str]:
    """Run it; ``what`` happens at the step of this number. Returns all steps up to the end of the hand-off."""
    steps: list[str] = []
    with surroundings(1) as errors:
        world = World(1, Weakening())
        world.server.network.calm = True

        def on_step(node: SimNode, statement: str, phase: str) -> None:
            if JOINS_AT <= world.scheduler.time < HEALS_AT:
                steps.append(f"{node.name} {statement} {phase}")
                if what is not None and at == len(steps) - 1:
                    what(world, node)

        world.on_step = on_step
        world.start()
        world.scheduler.after(1.0, world.start)
        world.run_until(JOINS_AT)
        assert not world.unsettled()
        world.start()
        if what is None:
            world.settle()
            return steps
        world.run_until(HEALS_AT)
        world.heal()
        world.settle()
        assert not errors.found
        assert world.ledger.commits
        for node in world.nodes:
            node.kill()
    return steps


STEPS = hand_off(None, None)


def test_the_hand_off_has_all_its_parts() -> None:
    for part in (
        "n3 register sent",
        "n1 publish answered",
        "n1 release sent",
        "n2 release answered",
        "n3 refresh before",
    ):
        assert part in STEPS


@pytest.mark.parametrize("what", WHAT)
def test_whoever_it_happens_to_at_whatever_step(what: str) -> None:
    for number, step in enumerate(STEPS):
        try:
            reached = hand_off(number, WHAT[what])
        except BaseException as error:
            error.add_note(f"{what}: {step.split()[0]}, at step {number}: {step}")
            raise
        assert reached[: number + 1] == STEPS[: number + 1]
