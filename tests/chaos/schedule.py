"""The faults of one run: a pure function of the seed.

Same seed, same faults at the same times on the same workers. What the machine makes of them between is its own affair,
so a run that found something is repeated by its seed, more than once if need be.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.chaos.settings import HEARTBEAT_TIMEOUT_SEC

__all__ = ["FEWEST", "MOST", "Act", "first_workers", "schedule"]

FEWEST, MOST = 6, 8

# A run begins when the workers share everything, and this much later with the first fault.
FIRST_SEC = 1.0


@dataclass(frozen=True, slots=True, order=True)
class Act:
    """One thing that the nemesis does at a time, in seconds from the start.

    ``kind`` is what is done. ``fault`` names the fault that begins with it, and is empty for what ends one.
    """

    at: float
    kind: str
    worker: str = ""
    amount: float = 0.0
    how: str = ""
    fault: str = ""


@dataclass(slots=True)
class _World:
    """What the schedule has made of the cluster so far."""

    random: random.Random
    now: float = 0.0
    present: dict[str, float] = field(default_factory=dict)  # worker -> until when something is wrong with it
    absent: list[str] = field(default_factory=list)
    lost: dict[str, float] = field(default_factory=dict)  # worker -> until when its packets are lost
    server_busy: float = 0.0
    born: int = 0
    acts: list[Act] = field(default_factory=list)

    def add(self, kind: str, worker: str = "", *, after: float = 0.0, amount: float = 0.0, how: str = "") -> None:
        fault = "" if after else kind + (f" ({how})" if how else "")
        self.acts.append(Act(round(self.now + after, 2), kind, worker, round(amount, 3), how, fault))

    def healthy(self) -> list[str]:
        return [name for name, until in self.present.items() if until <= self.now]

    def pick(self) -> str | None:
        """A worker with nothing wrong, if enough others are so too."""
        healthy = self.healthy()
        return self.random.choice(healthy) if len(healthy) > 3 else None

    def name(self) -> str:
        """For a newcomer: often that of one who was there before."""
        if self.absent and self.random.random() < 0.5:
            return self.absent.pop(self.random.randrange(len(self.absent)))
        self.born += 1
        return f"w{self.born}"

    def lasts(self) -> float:
        """Seconds of a pause or a broken network: too short to be taken for dead, just long enough, very long."""
        timeout = HEARTBEAT_TIMEOUT_SEC
        low, high = self.random.choice(((0.3, 1.5), (timeout, 1.2 * timeout), (1.3 * timeout, 1.9 * timeout), (7, 9)))
        return self.random.uniform(low, high)


def _kill(world: _World, how: str) -> bool:
    victims = sorted(world.present)
    victim = world.random.choice(victims)
    world.add("kill", victim)
    del world.present[victim]
    if len(world.present) < FEWEST or world.random.random() < 0.3:
        # Its supervisor starts it anew, under its name.
        delay = world.random.uniform(0.1, 3)
        world.add("start", victim, after=delay)
        world.present[victim] = world.now + delay + 3
    else:
        world.absent.append(victim)
    return True


def _leave(world: _World, how: str) -> bool:
    victim = world.pick()
    if victim is None or len(world.present) <= FEWEST:
        return False
    world.add("leave", victim)
    del world.present[victim]
    return True


def _join(world: _World, how: str) -> bool:
    if len(world.present) >= MOST:
        return False
    name = world.name()
    world.add("join", name)
    world.present[name] = world.now + 3
    return True


def _pause(world: _World, how: str) -> bool:
    victim = world.pick()
    if victim is None:
        return False
    seconds = world.lasts()
    world.add("pause", victim, amount=seconds)
    world.add("continue", victim, after=seconds)
    world.present[victim] = world.now + seconds
    return True


def _stop_in_work(world: _World, how: str) -> bool:
    victim = world.pick()
    if victim is None:
        return False
    seconds = max(world.lasts(), 1.0)
    world.add("stop in work", victim, amount=seconds, how=how)
    world.add("continue", victim, after=seconds)
    world.present[victim] = world.now + seconds
    return True


def _network(kind: str) -> Callable[[_World, str], bool]:
    def act(world: _World, how: str) -> bool:
        victim = world.pick()
        if victim is None:
            return False
        seconds = world.random.uniform(1, 5) if kind == "delay" else world.lasts()
        world.add(kind, victim, amount=world.random.uniform(0.02, 0.2) if kind == "delay" else seconds, how=how)
        world.add("heal", victim, after=seconds)
        world.present[victim] = world.now + seconds
        if kind == "blackhole":
            world.lost[victim] = world.now + seconds + 1
        return True

    return act


def _terminate(world: _World, how: str) -> bool:
    # A worker whose packets are lost cannot hear that its session has ended: with trust_freed_locks that is the one
    # documented case in which two may say yes (the fence holds), so it is not asked for here.
    victims = [name for name in sorted(world.present) if world.lost.get(name, 0) <= world.now]
    world.add("terminate", world.random.choice(victims), how=how)
    return True


def _server(kind: str) -> Callable[[_World, str], bool]:
    def act(world: _World, how: str) -> bool:
        if world.server_busy > world.now:
            return False
        down = world.random.choice((0.0, 0.0, 0.5, 3.0))
        world.add(kind, amount=down, how=how)
        world.server_busy = world.now + down + 6
        return True

    return act


def _clock(world: _World, how: str) -> bool:
    step = world.random.choice((-86400, -3600, -30, -3, 3, 30, 3600, 86400 * 400))
    world.add("clock step", world.random.choice(sorted(world.present)), amount=step)
    return True


# One deck: each of these once, in a new order each time the deck is through.
DECK: tuple[tuple[Callable[[_World, str], bool], str], ...] = (
    *[(_kill, "")] * 3,
    *[(_leave, "")] * 2,
    *[(_join, "")] * 4,
    *[(_pause, "")] * 3,
    *[(_stop_in_work, point) for point in ("READ", "READ", "WRITTEN", "WRITTEN", "FENCED", "FENCED")],
    *[(_network("cut"), how) for how in ("end", "reset")],
    (_network("delay"), ""),
    *[(_network("blackhole"), how) for how in ("both", "up", "down")],
    *[(_terminate, how) for how in ("coordination", "work", "all")],
    *[(_server("restart"), how) for how in ("fast", "immediate")],
    (_server("crash"), ""),
    *[(_clock, "")] * 2,
)


# With this few cards that cannot be played just now the next deck is begun.
STUCK = 3


def first_workers(seed: int) -> list[str]:
    """The workers a run starts with."""
    return [f"w{number}" for number in range(1, 1 + random.Random(seed).randint(FEWEST + 1, MOST))]


def _decks(chance: random.Random) -> Iterator[list[tuple[Callable[[_World, str], bool], str]]]:
    while True:
        deck = list(DECK)
        chance.shuffle(deck)
        yield deck


def schedule(seed: int, duration: float) -> list[Act]:
    """What the nemesis does in a run of ``duration`` seconds, in order of time.

    Parameters
    ----------
    seed : int
        Decides everything.
    duration : float
        Seconds from the first act to the last fault's beginning; what has not ended by then is ended by the caller.
    """
    first = first_workers(seed)
    world = _World(random.Random(f"faults/{seed}"), FIRST_SEC, dict.fromkeys(first, 0.0), born=len(first))
    for deck in _decks(world.random):
        waiting = deck
        while waiting:
            done = next((card for card in waiting if card[0](world, card[1])), None)
            if done is not None:
                waiting.remove(done)
            elif len(waiting) <= STUCK:
                break  # what is left waits for something that is in the next deck
            # Bursts and lulls: some faults hit while the last one is still being mended, some do not.
            world.now += world.random.choice((0.1, 0.4, 1.0, 1.5, 2.5))
            if world.now > duration:
                return sorted(one for one in world.acts if one.at <= duration)
    raise AssertionError("unreachable")
