"""When a picture is read anew, and what is given until then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from jobsync_orm.exceptions import SchemaNotReady
from jobsync_orm.web.pictures import PERIOD_SEC, SHARE, Kept, Picture
from jobsync_orm.web.workbench import Workbench


class Clock:
    """A clock that stands still unless it is moved on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("jobsync_orm.web.pictures.time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


class Book:
    """Something to read, which may be out of reach."""

    def __init__(self, clock: Clock, takes: float = 0.0) -> None:
        self.clock, self.takes = clock, takes
        self.readings = 0
        self.away = False

    def read(self) -> int:
        self.clock.now += self.takes
        self.readings += 1
        if self.away:
            raise SchemaNotReady("no tables")
        return self.readings


def get(picture: Picture[int]) -> Kept[int]:
    return asyncio.run(picture.get())


def made(read: Callable[[], int], period: float = PERIOD_SEC) -> Picture[int]:
    return Picture(read, Workbench(1), lambda _: period)


def test_it_is_read_once_a_period(clock: Clock) -> None:
    book = Book(clock)
    picture = made(book.read)
    assert get(picture) == Kept(1, 0.0, PERIOD_SEC, None)
    clock.now += 0.75
    assert get(picture) == Kept(1, 0.75, 0.25, None)
    clock.now += 0.25
    assert get(picture).value == 2


def test_what_takes_long_is_read_more_rarely(clock: Clock) -> None:
    picture = made(Book(clock, takes=2.0).read)
    assert get(picture).next_sec == (SHARE - 1) * 2.0


def test_a_database_that_is_away_is_asked_once_a_period_and_forgotten_when_it_is_back(clock: Clock) -> None:
    book = Book(clock)
    picture = made(book.read)
    get(picture)
    clock.now += PERIOD_SEC
    book.away = True
    for _ in range(3):
        assert get(picture) == Kept(1, PERIOD_SEC, PERIOD_SEC, "no tables")
    assert book.readings == 2
    clock.now += PERIOD_SEC
    book.away = False
    assert get(picture) == Kept(3, 0.0, PERIOD_SEC, None)


def test_who_goes_away_does_not_end_it_for_the_others() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def read() -> int:
        begun.set()
        go_on.wait()
        return 7

    async def look() -> Kept[int]:
        picture = made(read)
        first, second = (asyncio.ensure_future(picture.get()) for _ in range(2))
        await asyncio.to_thread(begun.wait)
        first.cancel()
        await asyncio.wait([first])
        go_on.set()
        return await second

    try:
        assert asyncio.run(look()).value == 7
    finally:
        go_on.set()
