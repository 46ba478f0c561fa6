"""Observers are told in order, by a thread of their own, and nobody waits for them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from jobsync_orm import observe
from jobsync_orm.observe import Audience, Event, SessionBroke, WokenUp


@pytest.fixture
def audience() -> Iterator[Audience]:
    audience = Audience()
    yield audience
    for observer in audience.observers:
        audience.remove(observer)


def told(audience: Audience, *events: Event) -> None:
    for event in events:
        audience.tell(event)
    assert observe.flush(10)


def test_nobody_is_told_without_observers(audience: Audience) -> None:
    told(audience, SessionBroke("w1"))
    heard: list[Event] = []
    audience.add(heard.append)
    assert audience.active
    told(audience, SessionBroke("w2"))
    assert heard == [SessionBroke("w2")]


def test_all_observers_hear_everything_in_order(audience: Audience) -> None:
    first: list[Event] = []
    second: list[Event] = []
    audience.add(first.append)
    audience.add(second.append)
    events = [WokenUp("w1", many) for many in range(1000)]
    told(audience, *events)
    assert first == second == events
    audience.remove(first.append)
    told(audience, SessionBroke("w1"))
    assert len(second) == len(first) + 1


def test_removed_observer_hears_nothing_more(audience: Audience) -> None:
    heard: list[Event] = []
    observer: Callable[[Event], None] = heard.append
    audience.add(observer)
    audience.remove(observer)
    audience.remove(observer)
    told(audience, SessionBroke("w1"))
    assert heard == []
    assert not audience.active


def test_observer_that_raises_is_told_on_and_logged_once(audience: Audience, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Event] = []

    def raises(event: Event) -> None:
        heard.append(event)
        raise SystemExit("an observer wants to leave")

    audience.add(raises)
    audience.add(heard.append)
    with caplog.at_level(logging.ERROR, "jobsync_orm"):
        told(audience, SessionBroke("w1"), SessionBroke("w2"))
    assert [event.node for event in heard if isinstance(event, SessionBroke)] == ["w1", "w1", "w2", "w2"]
    assert [record.message.split(";")[0] for record in caplog.records] == ["an observer raised"]


def test_observer_that_hangs_holds_up_nobody_and_costs_bounded_memory(
    audience: Audience, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "MOST_WAITING", 10)
    go_on, entered = threading.Event(), threading.Event()
    heard: list[Event] = []

    def hangs(event: Event) -> None:
        entered.set()
        assert go_on.wait(30)
        heard.append(event)

    audience.add(hangs)
    left_out = observe.dropped()
    audience.tell(WokenUp("w1", 0))
    assert entered.wait(10)
    for many in range(1, 31):
        audience.tell(WokenUp("w1", many))
    assert observe.dropped() - left_out == 20
    assert not observe.flush(0.01), "it says that not all has been told"
    go_on.set()
    assert observe.flush(10)
    assert heard == [WokenUp("w1", many) for many in range(11)]


def test_forked_child_tells_its_own_observers(audience: Audience) -> None:
    heard: list[Event] = []
    audience.add(heard.append)
    told(audience, SessionBroke("parent"))
    child = os.fork()
    if child == 0:
        try:
            audience.tell(SessionBroke("child"))
            right = observe.flush(10) and heard == [SessionBroke("parent"), SessionBroke("child")]
            os._exit(0 if right else 1)
        finally:
            os._exit(2)
    deadline = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    assert heard == [SessionBroke("parent")]


def test_where_no_thread_is_to_be_had_the_next_event_tries_again(
    audience: Audience, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    heard: list[Event] = []
    audience.add(heard.append)
    monkeypatch.setattr(observe, "_delivery", observe._Delivery())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        audience.tell(SessionBroke("w1"))
    told(audience, SessionBroke("w2"))
    assert heard == [SessionBroke("w1"), SessionBroke("w2")]
