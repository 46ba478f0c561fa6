"""What runs in a child process of a worker: one attempt at a time, for as long as its worker lives.

A child is a fresh interpreter (``spawn``), not a copy of its worker. It imports the module of each handler by its name;
a function in the script that was started works as with :mod:`multiprocessing`, so that script needs its
``if __name__ == "__main__":``. Where that module has the queue itself as a global, the child uses that one, with its
engine and its session factory. Where not, it makes a queue on the same database, from its URL.

It leads a process group of its own, so that what a handler starts ends with it, and so that Ctrl-C in a terminal does
not reach it. SIGTERM and SIGINT it ignores: its worker decides. It ends when its worker does, however that ends: then
there is nobody left at the other end of the pipe that brings its jobs.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from contextvars import copy_context
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from sqlalchemy import URL

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.exceptions import ConfigurationError, InvalidJob
from jobsync_orm.queue import ClaimedJob, Ending, JobQueue
from jobsync_orm.queue.context import CancelFlag, JobContext
from jobsync_orm.queue.execution import execute, failed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection

    from jobsync_orm.queue.handlers import Handler

__all__ = ["SIGNALS", "Recipe", "serve"]

# How often a child sees whether its worker is still there: a fork of the worker may keep the pipe open.
LOOK_SEC: Final = 1.0

# Left to the worker. Blocked in the child until it can say so.
SIGNALS: Final = frozenset({signal.SIGINT, signal.SIGTERM})


@dataclass(frozen=True, slots=True)
class Dish:
    """How a child gets one handler: the pickled function, the pickled handler, and the name its module has the queue
    under. Either of the last two may be None."""

    function: bytes
    handler: bytes | None
    queue: str | None


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a child makes its worker's queue and handlers. It travels over the pipe: the URL has the password in it."""

    worker: str
    url: URL
    appname: str
    schema: str | None
    max_payload_bytes: int
    ageing_sec: float
    session_factory: bytes | None
    has_session_factory: bool
    dishes: dict[str, Dish]

    @classmethod
    def of(cls, queue: JobQueue, handlers: Mapping[str, Handler], worker: str) -> Recipe:
        """For those of ``handlers`` that are of kind ``"process"``.

        Raises
        ------
        InvalidJob
            A child could not import one of them.
        """
        factory = queue.session_factory
        return cls(
            worker,
            queue.config.sqlalchemy_url(),
            queue.names.appname,
            queue.names.schema,
            queue.max_payload_bytes,
            queue.ageing_sec,
            None if factory is None else _pickled(factory),
            factory is not None,
            {type: _dish(queue, handler) for type, handler in handlers.items() if handler.kind == "process"},
        )

    def queue(self) -> JobQueue:
        """A queue on the same database."""
        config = CoordinationConfig(url=self.url, appname=self.appname, schema=self.schema)
        factory = None
        if self.has_session_factory:
            factory = _no_session if self.session_factory is None else pickle.loads(self.session_factory)
        return JobQueue(
            config,
            session_factory=factory,
            max_payload_bytes=self.max_payload_bytes,
            ageing_sec=self.ageing_sec,
        )

    def is_of(self, found: Any) -> TypeGuard[JobQueue]:
        """Whether ``found`` is a queue on the same database and tables."""
        return (
            isinstance(found, JobQueue)
            and (found.names.appname, found.names.schema) == (self.appname, self.schema)
            and found.config.sqlalchemy_url() == self.url
        )


def _pickled(value: Any) -> bytes | None:
    try:
        return pickle.dumps(value)
    except Exception:  # noqa: BLE001  # pickling calls whatever the application has written
        return None


def _no_session() -> Any:
    raise ConfigurationError(
        "the queue's session_factory cannot be sent to a child process: make it a function of a module, or have the "
        "queue as a global of the module that the handler is in"
    )


def _dish(queue: JobQueue, handler: Handler) -> Dish:
    function = handler.function
    module = sys.modules.get(getattr(function, "__module__", ""))
    if module is sys.modules["__main__"] and module.__spec__ is None and not hasattr(module, "__file__"):
        raise InvalidJob(
            f"the handler of {handler.type!r} was typed in, so a child process cannot import it: put it into a file"
        )
    try:
        pickled = pickle.dumps(function)
    except Exception as error:
        raise InvalidJob(
            f"kind='process' for {handler.type!r}: a child process cannot import {function!r} by its name ({error}). "
            "Define it with def in a module, and let @queue.handler be its outermost decorator"
        ) from error
    name = next((name for name, value in vars(module).items() if value is queue), None) if module else None
    whole = _pickled(handler)
    if whole is None and name is None:
        raise InvalidJob(
            f"kind='process' for {handler.type!r}: its backoff or payload cannot be sent to a child process; define "
            "them in a module by their names, or have the queue as a global of the module that the handler is in"
        )
    return Dish(pickled, whole, name)


class Kitchen:
    """The handlers of a child, made by its recipe. One that cannot be made says why, and the others work.

    ``on_extend`` is told until when a handler wants to run that has asked for more time.
    """

    def __init__(self, recipe: Recipe, on_extend: Callable[[float], None]) -> None:
        self._recipe = recipe
        self._on_extend = on_extend
        self._own: JobQueue | None = None
        self._made: dict[str, tuple[JobQueue, Handler] | str] = {}
        for type, dish in recipe.dishes.items():
            try:
                self._made[type] = self._make(type, dish)
            except BaseException:  # noqa: BLE001  # importing runs the application's code
                self._made[type] = traceback.format_exc()

    def _make(self, type: str, dish: Dish) -> tuple[JobQueue, Handler]:
        function = pickle.loads(dish.function)
        if dish.queue is not None:
            found = getattr(importlib.import_module(function.__module__), dish.queue, None)
            if self._recipe.is_of(found) and type in found.handlers:
                return found, found.handlers[type]
        if dish.handler is None:
            raise InvalidJob(f"the module {function.__module__!r} does not register {type!r} when it is imported")
        if self._own is None:
            self._own = self._recipe.queue()
        handler: Handler = pickle.loads(dish.handler)
        self._own.handlers[type] = handler
        return self._own, handler

    def run(self, job: ClaimedJob) -> Ending | str:
        """The end of this attempt, or why it could not begin."""
        made = self._made[job.type]
        if isinstance(made, str):
            return made
        queue, handler = made
        context = JobContext(queue, job, self._recipe.worker, CancelFlag())
        context.on_extend = self._on_extend
        began = monotonic()
        try:
            return copy_context().run(execute, queue, handler, job, context)
        except KeyboardInterrupt as error:  # raised by the handler: signals do nothing here
            return failed(handler, job, error, began, monotonic())


def serve(connection: Connection) -> None:
    """Run what ``connection`` brings: a recipe, then one job after the other, then None.

    Sent back are None once it is ready, and for each job its :class:`Ending`, or why it could not begin; in between,
    the moment (``time.monotonic()``, which is the same in all processes) until which the job may run, when its handler
    has asked for more time.
    """
    os.setsid()
    for number in SIGNALS:
        # Not SIG_IGN, which the programs that a handler starts would inherit.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    orders: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, orders), name="jobsync-child", daemon=True).start()
    sending = threading.Lock()  # a handler may ask for more time in any of its threads

    def send(message: Ending | str | float | None) -> None:
        with sending:
            connection.send(message)

    kitchen = Kitchen(orders.get(), send)
    send(None)
    while (job := orders.get()) is not None:
        send(kitchen.run(job))


def _listen(connection: Connection, orders: SimpleQueue[Any]) -> None:
    parent = multiprocessing.parent_process()
    with contextlib.suppress(EOFError, OSError):
        while parent is None or os.getppid() == parent.pid:
            if connection.poll(LOOK_SEC):
                orders.put(connection.recv())
    os.killpg(0, signal.SIGKILL)
