"""The user's callbacks run one at a time, in order, off the loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from jobsync_orm.coordinator.callbacks import Callback


def call(function: Callable[..., object], *events: object) -> Callback:
    callback = Callback("on_test", function, lambda: None)
    for event in events:
        callback.send(event)
    assert callback.finish(30)
    return callback


def test_in_order_with_the_event() -> None:
    seen: list[object] = []
    call(seen.append, 1, 2, 3)
    assert seen == [1, 2, 3]


def test_without_argument() -> None:
    seen: list[str] = []
    call(lambda: seen.append("called"), 1, 2)
    assert seen == ["called", "called"]


def test_optional_argument_gets_the_event() -> None:
    got: list[object] = []
    call(lambda event=None: got.append(event), "e")
    assert got == ["e"]


def test_raising_is_logged_and_the_next_call_comes(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[object] = []

    def fussy(event: object) -> None:
        if event == 1:
            raise ValueError("on purpose")
        seen.append(event)

    with caplog.at_level(logging.ERROR):
        call(fussy, 1, 2)
    assert seen == [2]
    assert "on_test raised" in caplog.text


def test_finish_gives_up_on_one_that_does_not_return(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    callback = Callback("on_test", lambda: release.wait(60), lambda: None)
    callback.send(None)
    assert not callback.finish(0.05)
    release.set()


def test_after_each_call_the_loop_is_told() -> None:
    told = threading.Event()
    callback = Callback("on_test", lambda: None, told.set)
    delivery = callback.send(None)
    assert told.wait(60)
    assert delivery.done.is_set()
    assert callback.finish(30)


def test_one_that_ends_its_thread_does_not_end_the_calls(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[object] = []

    def leaving(event: object) -> None:
        seen.append(event)
        raise SystemExit(1)

    callback = Callback("on_test", leaving, lambda: None)
    callback.send(1)
    callback.send(2)
    assert callback.finish(5)
    assert seen == [1, 2]
    assert "on_test raised" in caplog.text
