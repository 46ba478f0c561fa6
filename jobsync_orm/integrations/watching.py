"""Who is measured at the moment: what Prometheus and OpenTelemetry have in common."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from jobsync_orm import observe
from jobsync_orm.integrations.catalogue import DROPPED, METRICS, READ_FAILURES, Metric, Types, changes
from jobsync_orm.integrations.readings import Source
from jobsync_orm.observe import Audience, Event, NodeStopped, WorkerStopped

__all__ = ["COUNTED", "READ", "Registration", "Watching", "guard"]

# What has no event: read when it is asked for.
READ = tuple(metric for metric in METRICS if metric.kind == "gauge" or metric in (READ_FAILURES, DROPPED))
COUNTED = tuple(metric for metric in METRICS if metric not in READ)

# One for all: what is registered, and stopped meanwhile by another thread, must not end half registered.
guard = threading.RLock()

# A server may fork after it has registered: no child is to be left with a lock that a thread of its parent holds.
os.register_at_fork(before=guard.acquire, after_in_parent=guard.release, after_in_child=guard.release)


class Watching:
    """Some sources, whose events are counted until they stop. What is counted, and where, is up to a subclass."""

    def __init__(self) -> None:
        self.types = Types()
        self.sources: list[Source] = []
        self._observers: WeakKeyDictionary[Audience, Any] = WeakKeyDictionary()

    def add(self, sources: Sequence[Source]) -> None:
        """Take them in. One audience is listened to once, whoever has it in common."""
        with guard:
            for source in sources:
                self.sources.append(source)
                for audience in source.audiences:
                    if audience not in self._observers:
                        observer = self._observers[audience] = self._observer(audience, source.appname)
                        audience.add(observer)

    def remove(self, sources: Sequence[Source]) -> None:
        """Let go of them. What is not here any more is no error."""
        with guard:
            gone = [source for source in self.sources if source in sources]
            self.sources = [source for source in self.sources if source not in gone]
            for audience in list(self._observers):
                if not any(source.listens_to(audience) for source in self.sources):
                    audience.remove(self._observers.pop(audience))
            for source in gone:
                if source.node is not None:
                    self._forget(source.appname, source.node)
            if not self.sources:
                self.emptied()

    def read(self) -> dict[Metric, dict[tuple[str, ...], float]]:
        """What there is to read now. Two sources of one cluster may read the same: the last one counts."""
        with guard:
            self.remove([source for source in self.sources if source.is_gone])
            sources = list(self.sources)
        found: dict[Metric, dict[tuple[str, ...], float]] = {metric: {} for metric in READ}
        found[DROPPED][()] = observe.dropped()
        for source in sources:
            for metric, labels, value in source.figures():
                found[metric][labels] = value
        return found

    def count(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        """Add to a counter, or put into a histogram."""
        raise NotImplementedError

    def happened(self, event: Event, appname: str) -> None:
        """Something has, beside what is counted."""

    def forgotten(self, appname: str, node: str) -> None:
        """Nothing of this node is here any more."""

    def emptied(self) -> None:
        """Nothing is here any more."""

    def _observer(self, audience: Audience, appname: str) -> Any:
        def observe(event: Event) -> None:
            if isinstance(event, NodeStopped | WorkerStopped):
                self._stopped(audience, appname, event)
                return
            for metric, labels, value in changes(event, appname, self.types):
                self.count(metric, labels, value)
            self.happened(event, appname)

        return observe

    def _stopped(self, audience: Audience, appname: str, event: NodeStopped | WorkerStopped) -> None:
        with guard:
            over = [source for source in self.sources if source.listens_to(audience) and source.node == event.node]
            if isinstance(event, WorkerStopped):  # its job may go on
                over = [source for source in over if len(source.audiences) > 1]
            self.remove(over)
            self._forget(appname, event.node)

    def _forget(self, appname: str, node: str) -> None:
        if not any(source.appname == appname and source.node == node for source in self.sources):
            self.forgotten(appname, node)


class Registration:
    """What one call has put in: ``unregister()`` takes it out again."""

    def __init__(self, watching: Watching, sources: Iterable[Source]) -> None:
        self._watching = watching
        self._sources = tuple(sources)

    def unregister(self) -> None:
        """Take it out. What has been stopped is out already."""
        self._watching.remove(self._sources)
