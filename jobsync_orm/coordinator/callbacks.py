"""The user's callbacks, off the loop.

Each kind of callback has one thread of its own, started with its first event, so that calls of one kind come one at a
time and in order, a slow ``on_rebalance`` does not hold up a hand-off that waits for ``on_revoke``, and neither holds
up a heartbeat. The threads are daemons: a callback that never returns does not keep the process alive.
"""

from __future__ import annotations

import inspect
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from jobsync_orm.logs import fields

__all__ = ["Callback", "Delivery"]

logger = logging.getLogger("jobsync_orm")


class Delivery:
    """One call of a callback; ``done`` is set when it has returned or raised."""

    __slots__ = ("done", "event")

    def __init__(self, event: object) -> None:
        self.event = event
        self.done = threading.Event()


class Callback:
    """A user's function and the thread that calls it.

    Parameters
    ----------
    name : str
        For logs and the thread's name.
    function : callable
        Takes the event, or nothing.
    after : callable
        Called in the thread after each call.
    """

    def __init__(self, name: str, function: Callable[..., Any], after: Callable[[], None]) -> None:
        self._name = name
        self._function = function
        self._takes_event = _takes_argument(function)
        self._after = after
        self._queue: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Delivery | None = None

    def send(self, event: object) -> Delivery:
        """Queue a call with ``event``."""
        delivery = self._last = Delivery(event)
        self._queue.put(delivery)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"jobsync-{self._name}", daemon=True)
            self._thread.start()
        return delivery

    def finish(self, timeout: float) -> bool:
        """Wait until every queued call has returned, at most ``timeout`` seconds, then end the thread."""
        if self._thread is threading.current_thread():  # the callback itself ends the job
            self._queue.put(None)
            return False
        finished = self._last is None or self._last.done.wait(timeout)
        if not finished:
            logger.warning(
                "%s is still running after %.1f s; not waiting any longer",
                self._name,
                timeout,
                extra=fields("callback_slow"),
            )
        self._queue.put(None)
        return finished

    def _run(self) -> None:
        while (delivery := self._queue.get()) is not None:
            try:
                self._function(delivery.event) if self._takes_event else self._function()
            except BaseException:  # SystemExit too: the thread has more calls to make
                logger.exception("%s raised; coordination goes on", self._name, extra=fields("callback_failed"))
            finally:
                delivery.done.set()
                self._after()


def _takes_argument(function: Callable[..., Any]) -> bool:
    """Whether ``function`` can be called with one positional argument."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # a built-in that does not tell
        return True
    return True
