"""The answers for those who look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Engine
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jobsync_orm.operate import JobFilter, as_json, search_jobs, why_it_waits
from jobsync_orm.queue import JobQueue, JobStatus, QueueStats
from jobsync_orm.web.answers import Json
from jobsync_orm.web.masking import masked
from jobsync_orm.web.pictures import (
    SLOW_SEC,
    ClusterPicture,
    ClusterReader,
    Kept,
    Picture,
    PinsPicture,
    QueuePicture,
    QueueReader,
    Sample,
)
from jobsync_orm.web.workbench import Workbench

__all__ = ["Reading"]

T = TypeVar("T")

# Attempts of a job that are shown: the last ones.
ATTEMPTS = 50

# Jobs on a page.
PAGE = 50


class Reading:
    """The endpoints that read."""

    def __init__(self, engine: Engine, queue: JobQueue, bench: Workbench) -> None:
        self._engine, self._queue, self._bench = engine, queue, bench
        cluster, rates = ClusterReader(engine, queue.names), QueueReader(engine, queue)
        self._cluster = Picture(cluster.read, bench, cluster.period_sec)
        self._rates = Picture(rates.read, bench, lambda _: 1.0)
        self._pins = Picture(lambda: PinsPicture.read(engine, queue.names), bench, lambda _: SLOW_SEC)

    async def cluster(self, request: Request) -> Response:
        """The cluster. With ``?after=`` only the samples later than that moment."""
        after = _number(request, "after", float) or 0.0
        return _kept(await self._cluster.get(), partial(_cluster, after=after))

    async def pins(self, request: Request) -> Response:
        """Pins and what they park."""
        return _kept(await self._pins.get(), as_json)

    async def queue(self, request: Request) -> Response:
        """The queue. With ``?after=`` only the samples later than that moment."""
        after = _number(request, "after", float) or 0.0
        return _kept(await self._rates.get(), partial(_queue, after=after))

    async def jobs(self, request: Request) -> Response:
        """A page of jobs: ``?id=&type=&state=&key=&error=&before=``."""
        given = {name: value for name, value in request.query_params.items() if value}
        wanted = JobFilter(
            (given["type"],) if "type" in given else (),
            (given["state"],) if "state" in given else (),
            given.get("key"),
            given.get("error"),
        )
        id, before = _number(request, "id", int), _number(request, "before", int)
        found = await self._bench.do(
            lambda: search_jobs(self._engine, self._queue.names, wanted, PAGE, id=id, before=before)
        )
        return Json(as_json(found))

    async def job(self, request: Request) -> Response:
        """One job, with its last attempts."""
        found, why = await self._bench.do(lambda: self._look_at(request.path_params["id"]))
        shown = {name: getattr(found, name) for name in type(found).__dataclass_fields__}
        shown |= {name: masked(shown[name]) for name in ("payload", "result")}
        shown["attempts"] = [
            {**asdict(attempt), "outcome": str(attempt.outcome)} for attempt in found.attempts[-ATTEMPTS:]
        ]
        shown["why"] = why
        shown["attempts_left_out"] = max(0, len(found.attempts) - ATTEMPTS)
        return Json(as_json(shown))

    def _look_at(self, id: int) -> tuple[JobStatus, tuple[str, ...]]:
        found = self._queue.status(id)
        return found, why_it_waits(self._queue, found)

    def outdate(self) -> None:
        """Something has been written."""
        for picture in (self._cluster, self._rates, self._pins):
            picture.outdate()


def _kept(kept: Kept[T], shown: Callable[[T], Any]) -> Response:
    return Json(
        {
            "age_sec": round(kept.age_sec, 3),
            "next_sec": round(kept.next_sec, 3),
            "problem": kept.problem,
            "value": None if kept.value is None else shown(kept.value),
        },
        200 if kept.problem is None else 503,
    )


def _cluster(picture: ClusterPicture, after: float) -> Any:
    return {
        "status": as_json(picture.status),
        "rebalances": as_json(picture.rebalances),
        "owned": _later(picture.owned, after),
    }


def _queue(picture: QueuePicture, after: float) -> Any:
    types = sorted({*picture.depths, *picture.rates.by_type})
    nothing = QueueStats(None)
    return {
        "at": picture.at,
        "types": [
            {
                **_figures(picture.rates.by_type.get(name, nothing)),
                **_depth(picture.depths.get(name, nothing)),
                "type": name,
            }
            for name in types
        ],
        "all": _figures(picture.rates),
        "workers": as_json([{**worker, "types": list(worker["types"])} for worker in picture.workers]),
        "paused": as_json(picture.paused),
        "ended": as_json(picture.ended),
        "waiting": _later(picture.waiting, after),
    }


def _figures(stats: QueueStats) -> Any:
    return {
        "last_minute": as_json(stats.last_minute),
        "wait_sec": as_json(stats.wait_sec),
        "run_sec": as_json(stats.run_sec),
        "workers": stats.workers,
    }


def _depth(stats: QueueStats) -> Any:
    return {
        "counts": as_json(stats.counts),
        "estimated": as_json(stats.estimated),
        "oldest_pending_sec": as_json(stats.oldest_pending_sec),
    }


def _later(samples: tuple[Sample, ...], after: float) -> Any:
    return [as_json(sample) for sample in samples if sample.at > after]


def _number(request: Request, name: str, kind: Callable[[str], T]) -> T | None:
    given = request.query_params.get(name)
    if not given:
        return None
    try:
        return kind(given)
    except ValueError:
        raise HTTPException(400, f"{name}={given!r} must be a number") from None
