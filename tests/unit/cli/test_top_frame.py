from __future__ import annotations

import datetime

import pytest

from jobsync_orm.cli.top_frame import Frame, lines
from jobsync_orm.models.states import JobState
from jobsync_orm.operate import Rebalance
from jobsync_orm.operate.happenings import Happenings
from jobsync_orm.operate.watching import Ended, Look
from jobsync_orm.queue import Pause
from tests.unit.operate.looks import START, look, node

LATER = START + datetime.timedelta(seconds=60)
PLAN = Rebalance(START, "join", "w1", 1, 2, 5000, 0.01, 5)


def drawn(frame: Frame, width: int = 80, height: int = 24) -> list[str]:
    return [line.plain.rstrip() for line in lines(frame, width, height)]


def frame_of(now: Look, *before: Look, **given: object) -> Frame:
    seen = Happenings()
    for one in (*before, now):
        seen.see(one)
    return Frame(now, seen, **given)  # type: ignore[arg-type]


def many(number: int) -> Look:
    nodes = [node(f"a-rather-long-name-of-a-worker-{n}", n) for n in range(number)]
    return look(60, *nodes, problems=tuple(f"problem {n} " * 20 for n in range(5)), rebalances=(PLAN,) * 10)


@pytest.mark.parametrize("number", [0, 1, 4, 60])
@pytest.mark.parametrize(("width", "height"), [(40, 10), (80, 24), (100, 40), (130, 24), (200, 60)])
def test_it_fits_whatever_there_is_to_show(number: int, width: int, height: int) -> None:
    frame = frame_of(many(number), keys="q quit")
    made = lines(frame, width, height)
    assert len(made) <= height
    assert all(line.cell_len <= width for line in made)


def test_a_small_terminal_shows_nodes_queue_and_what_has_happened() -> None:
    first = int(LATER.timestamp())
    now = look(
        60,
        node("w1", 7500, leader=True),
        node("w2", 2500, "cut off"),
        rebalances=(PLAN,),
        problems=("w2 is cut off",),
        ended=(Ended(first - 2, 30, 0), Ended(first - 1, 60, 10)),
        counts={JobState.PENDING: 12, JobState.RETRYING: 3},
        paused=(Pause("mail", START, None), Pause(None, START, None)),
    )
    frame = frame_of(now, look(59, node("w1", 7500), node("w2", 2500)), keys="q quit")
    shown = drawn(frame)
    assert shown[0].endswith("NOT HEALTHY")
    assert shown[1] == "leader w1  epoch 5  nodes 2  tokens 10000/10000 owned, 0 moving, 0 parked"
    assert shown[2] == "! w2 is cut off"
    assert shown[5].split()[:2] == ["w2", "cut"]  # those that need somebody stand first
    assert shown[6].split()[:3] == ["w1", "*", "live"]
    assert "queue  pending 12  processing 0  retrying 3" in shown
    assert any("mail paused  ALL paused  completed 9.0/s  failed 1.0/s" in line for line in shown)
    (top,) = [line for line in shown if line.startswith("    60/s")]
    assert top.endswith(" █")
    assert any(line.endswith("w2 is cut off: its session has ended; 2500 tokens") for line in shown)
    assert any(line.endswith("rebalance (join): 5000 tokens, 1 -> 2 nodes") for line in shown)
    assert shown[23] == "q quit"


def test_a_wide_terminal_shows_the_queue_beside_the_nodes() -> None:
    shown = drawn(frame_of(look(60, node("w1", 10), rebalances=(PLAN,))), 150, 30)
    beside = [line for line in shown if line.startswith("node") and "│ queue" in line]
    assert len(beside) == 1


def test_a_dead_node_stays_for_a_while() -> None:
    frame = frame_of(look(3, node("w1", 10)), look(0, node("w1", 5), node("w2", 5)),
                     look(1, node("w1", 5), node("w2", 5, "cut off")))  # fmt: skip
    (line,) = [line for line in drawn(frame) if line.startswith("w2 ")]
    assert line.split() == ["w2", "dead", "0.0", "s", "ago"]


def test_no_answer_is_said_with_its_reason() -> None:
    frame = frame_of(look(0, node("w1", 1)), stale_sec=7.4, error="the server is\x1b[2J gone", paused=True)
    shown = drawn(frame)
    assert "PAUSED" in shown[0]
    assert shown[1] == "no answer for 7.4 s: the server is\N{REPLACEMENT CHARACTER}[2J gone"


def test_more_nodes_than_lines() -> None:
    shown = drawn(frame_of(look(0, *(node(f"w{n}", 1) for n in range(40)))))
    assert any(line.startswith("... and ") and line.endswith(" more") for line in shown)
