"""Handlers: which function runs the jobs of a type, and how.

::

    @queue.handler("resize", timeout=30)
    def resize(ctx: JobContext, image_id: int, width: int = 800) -> dict:
        ...
        return {"bytes": size}

    queue.enqueue(session, "resize", {"image_id": 7})

The payload's entries are the function's keyword arguments. With ``payload=Model``, a dataclass or a pydantic model, the
function is called with an instance instead: ``resize(ctx, order)``. What it returns is kept as the job's result, so it
must be JSON; an exception is a failure (see :mod:`jobsync_orm.queue.outcomes` for the others).

Where a handler runs is its ``kind``:

``"thread"``
    In a thread of the worker: the default for a plain function. A call that never returns cannot be stopped from
    outside. At its timeout the attempt is recorded as such, nothing it still does is taken, ``ctx.cancelled`` is set,
    and another thread takes the place of its thread, which stays behind.
``"async"``
    In the worker's event loop: the default for a coroutine function. Cancelled at its timeout.
``"process"``
    In a child process of its own, killed at the timeout. The function must be one that a module of the application
    has under its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar, cast, get_args

from jobsync_orm.coordinator.session import array
from jobsync_orm.exceptions import InvalidJob, InvalidPayload, UnknownJobType
from jobsync_orm.queue.backoff import Backoff, BackoffFunction, checked_backoff
from jobsync_orm.queue.core import QueueCore
from jobsync_orm.queue.options import brief, job_type, retries, seconds
from jobsync_orm.queue.typed_payload import checked_model, dump

__all__ = ["Handler", "HandlerCalls", "HandlerKind", "option_arrays"]

HandlerKind = Literal["thread", "process", "async"]

Model = type[Any]

F = TypeVar("F", bound=Callable[..., Any])

MAX_RETRIES = 3
TIMEOUT_SEC = 3600.0
BACKOFF: Final = Backoff()


@dataclass(frozen=True, slots=True)
class Handler:
    """The function that runs the jobs of a type. Made by :meth:`~jobsync_orm.JobQueue.handler`.

    Attributes
    ----------
    type : str
        Of the jobs.
    function : callable
        Called with the :class:`~jobsync_orm.JobContext` and the payload.
    kind : str
        ``"thread"``, ``"process"`` or ``"async"``.
    max_retries : int
        How often a job may fail and be tried again, unless the call that enqueued it says otherwise.
    timeout : float
        Seconds an attempt may take, unless the call that enqueued it says otherwise.
    backoff : callable
        Seconds to wait after a failure, given the number of failures before it and the error.
    payload : type or None
        Class of the function's second argument; None passes the payload as keyword arguments.
    retry_blocks_key : bool
        Whether a job with a key that backs off holds up those of its key that come after it.
    """

    type: str
    function: Callable[..., Any]
    kind: HandlerKind = "thread"
    max_retries: int = MAX_RETRIES
    timeout: float = TIMEOUT_SEC
    backoff: BackoffFunction = BACKOFF
    payload: Model | None = None
    retry_blocks_key: bool = True
    _needed: frozenset[str] = field(init=False, repr=False, compare=False)
    _known: frozenset[str] | None = field(init=False, repr=False, compare=False)  # None: any

    def __post_init__(self) -> None:
        needed, known = _arguments(self.type, self.function, typed=self.payload is not None)
        object.__setattr__(self, "_needed", needed)
        object.__setattr__(self, "_known", known)

    def check(self, payload: Mapping[str, Any]) -> None:
        """See whether the function can be called with ``payload``.

        Raises
        ------
        InvalidPayload
            An argument without a default is missing, or there is one the function does not have; or, for a typed
            payload, it does not fit the model.
        """
        if self.payload is not None:
            dump(self.payload, payload)
            return
        given = payload.keys()
        if given >= self._needed and (self._known is None or given <= self._known):
            return
        wrong = [f"{brief(name)} is missing" for name in sorted(self._needed - given)]
        if self._known is not None:
            wrong += [f"it takes no {brief(name)}" for name in sorted(map(str, given - self._known))]
        raise InvalidPayload(f"payload of a {self.type!r} job does not fit {_name(self.function)}: {', '.join(wrong)}")


class HandlerCalls(QueueCore):
    """The part of a queue that knows its handlers."""

    def handler(
        self,
        type: str,
        *,
        kind: HandlerKind | None = None,
        max_retries: int = MAX_RETRIES,
        timeout: float = TIMEOUT_SEC,
        backoff: BackoffFunction = BACKOFF,
        payload: Model | None = None,
        retry_blocks_key: bool = True,
    ) -> Callable[[F], F]:
        """Decorate the function that runs the jobs of ``type``. The function itself is returned as it is.

        Parameters
        ----------
        type : str
            Under which the jobs are enqueued; 1 to 200 characters.
        kind : str, optional
            Where it runs: ``"thread"``, ``"process"`` or ``"async"``; see :mod:`jobsync_orm.queue.handlers`. None takes
            ``"async"`` for a coroutine function and ``"thread"`` for any other.
        max_retries : int
            How often a job that failed is tried again before it has failed for good; 0 is never.
        timeout : float
            Seconds an attempt may take.
        backoff : Backoff or callable
            How long to wait before that; a function gets the number of failures before this one and the error, and
            returns seconds.
        payload : type, optional
            A dataclass or pydantic model: payloads are checked against it when they are enqueued and again when they
            run, and the function gets an instance.
        retry_blocks_key : bool
            Whether a job with a key that backs off holds up those of its key that come after it. True keeps their
            order; False lets them go first.

        Raises
        ------
        InvalidJob
            A value out of range, a type that has a handler already, or a function that cannot be called this way.
        """
        if callable(type):
            raise InvalidJob('@queue.handler needs the type of the jobs: @queue.handler("send_mail")')

        def decorate(function: F) -> F:
            self.register(
                type,
                function,
                kind=kind,
                max_retries=max_retries,
                timeout=timeout,
                backoff=backoff,
                payload=payload,
                retry_blocks_key=retry_blocks_key,
            )
            return function

        return decorate

    def register(
        self,
        type: str,
        function: Callable[..., Any],
        *,
        kind: HandlerKind | None = None,
        max_retries: int = MAX_RETRIES,
        timeout: float = TIMEOUT_SEC,
        backoff: BackoffFunction = BACKOFF,
        payload: Model | None = None,
        retry_blocks_key: bool = True,
    ) -> Handler:
        """Have ``function`` run the jobs of ``type``; as :meth:`handler`, for a function that is defined elsewhere."""
        if not isinstance(retry_blocks_key, bool):
            raise InvalidJob(f"retry_blocks_key={brief(retry_blocks_key)} must be True or False")
        handler = Handler(
            job_type(type),
            _checked_function(type, function),
            _checked_kind(type, function, kind),
            retries(max_retries),
            seconds("timeout", timeout, above=0),
            checked_backoff(backoff),
            None if payload is None else checked_model(payload),
            retry_blocks_key,
        )
        before = self.handlers.setdefault(handler.type, handler)
        if before is not handler:
            raise InvalidJob(
                f"{type!r} has a handler already, {_name(before.function)}: give {_name(function)} another type, or "
                f"take that one out of queue.handlers first"
            )
        return handler

    def handler_of(self, type: str) -> Handler:
        """The handler for jobs of ``type``.

        Raises
        ------
        UnknownJobType
            There is none.
        """
        handler = self.handlers.get(type)
        if handler is None:
            known = ", ".join(sorted(self.handlers)) or "none; is the module imported that registers them?"
            raise UnknownJobType(f"no handler for jobs of type {brief(type)}; there are handlers for: {known}")
        return handler


def option_arrays(handlers: Mapping[str, Handler], types: Iterable[str]) -> tuple[str, str, str]:
    """What the handlers of ``types`` say, for a statement that claims: arrays, NULL where there is no handler."""
    known = [handlers.get(type) for type in types]
    return (
        array(None if handler is None else handler.max_retries for handler in known),
        array(None if handler is None else handler.timeout for handler in known),
        array(None if handler is None else handler.retry_blocks_key for handler in known),
    )


def _name(function: Any) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"{module}.{name}" if module and name else brief(function)


def _checked_function(type: str, function: Any) -> Callable[..., Any]:
    if not callable(function):
        raise InvalidJob(f"the handler of {brief(type)} is {brief(function)}, which cannot be called")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidJob(f"{_name(function)} is a generator: calling it would run nothing. Return instead of yield")
    return cast("Callable[..., Any]", function)


def _is_coroutine_function(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _checked_kind(type: str, function: Any, kind: Any) -> HandlerKind:
    is_async = _is_coroutine_function(function)
    if kind is None:
        return "async" if is_async else "thread"
    if kind not in get_args(HandlerKind):
        raise InvalidJob(f"kind={brief(kind)} must be one of {', '.join(map(repr, get_args(HandlerKind)))}")
    if is_async != (kind == "async"):
        what, remedy = ("a coroutine function", "'async'") if is_async else ("no coroutine function", "'thread'")
        raise InvalidJob(f"kind={kind!r}, but {_name(function)} is {what}: use kind={remedy}, or leave kind out")
    name = getattr(function, "__qualname__", "")
    if kind == "process" and (not name or "<" in name):
        raise InvalidJob(
            f"kind='process' for {brief(type)}: a child process imports the function by its name, so it must be "
            f"defined with def, in a module or a class; {_name(function)} is not"
        )
    return cast("HandlerKind", kind)


def _arguments(type: str, function: Any, *, typed: bool) -> tuple[frozenset[str], frozenset[str] | None]:
    """The keyword arguments that ``function`` needs, and those it knows (None: any)."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # one of C's that does not say
        return frozenset(), None
    kinds = inspect.Parameter
    in_place = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    by_place = 2 if typed else 1
    rest = any(p.kind is kinds.VAR_POSITIONAL for p in parameters)
    named = [p for p in in_place[by_place:] if p.kind is not kinds.POSITIONAL_ONLY]
    named += [p for p in parameters if p.kind is kinds.KEYWORD_ONLY]
    needed = [p.name for p in named if p.default is kinds.empty]
    stuck = [p for p in in_place[by_place:] if p.kind is kinds.POSITIONAL_ONLY and p.default is kinds.empty]
    if (len(in_place) < by_place and not rest) or stuck or (typed and needed):
        how = "(ctx, payload)" if typed else "(ctx, ...), all after ctx by keyword"
        raise InvalidJob(
            f"{_name(function)}{inspect.signature(function)} cannot be the handler of {brief(type)}: it will be called "
            f"as {how}"
        )
    if any(p.kind is kinds.VAR_KEYWORD for p in parameters):
        return frozenset(needed), None
    return frozenset(needed), frozenset(p.name for p in named)
