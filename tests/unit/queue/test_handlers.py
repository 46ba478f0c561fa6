from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from jobsync_orm import CoordinationConfig
from jobsync_orm.exceptions import InvalidJob, InvalidPayload, UnknownJobType
from jobsync_orm.queue import Backoff, JobQueue


@pytest.fixture
def queue() -> JobQueue:
    return JobQueue(CoordinationConfig(url="postgresql+psycopg://nobody@nowhere/none"))


def plain(ctx: Any, order_id: int, amount: str = "0") -> None: ...


async def coroutine(ctx: Any, **rest: Any) -> None: ...


@dataclasses.dataclass
class Order:
    id: int


class Methods:
    def bound(self, ctx: Any, id: int) -> None: ...

    @staticmethod
    def static(ctx: Any, id: int) -> None: ...


class Callable_:
    async def __call__(self, ctx: Any) -> None: ...


def test_decorated_function_is_returned_as_it_is(queue: JobQueue) -> None:
    decorated = queue.handler("plain", max_retries=5, timeout=30, retry_blocks_key=False)(plain)
    assert decorated is plain
    assert pickle.loads(pickle.dumps(decorated)) is plain
    handler = queue.handlers["plain"]
    assert (handler.type, handler.function, handler.kind) == ("plain", plain, "thread")
    assert (handler.max_retries, handler.timeout, handler.retry_blocks_key) == (5, 30.0, False)
    assert queue.handler_of("plain") is handler


def test_defaults(queue: JobQueue) -> None:
    handler = queue.register("plain", plain)
    assert (handler.max_retries, handler.timeout, handler.backoff) == (3, 3600.0, Backoff(60, 2, 3600, 0.1))
    assert handler.retry_blocks_key
    assert handler.payload is None


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (plain, "thread"),
        (coroutine, "async"),
        (functools.partial(coroutine, x=1), "async"),
        (Callable_(), "async"),
        (Methods().bound, "thread"),
        (Methods.static, "thread"),
        (lambda ctx: None, "thread"),
        (print, "thread"),
    ],
)
def test_kind_by_function(queue: JobQueue, function: Callable[..., Any], kind: str) -> None:
    assert queue.register("t", function).kind == kind


def test_process_kind_needs_a_function_with_a_name(queue: JobQueue) -> None:
    assert queue.register("a", plain, kind="process").kind == "process"
    with pytest.raises(InvalidJob, match="imports the function by its name"):
        queue.register("b", lambda ctx: None, kind="process")

    def local(ctx: Any) -> None: ...

    with pytest.raises(InvalidJob, match="imports the function by its name"):
        queue.register("b", local, kind="process")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": ""}, "has 0 characters"),
        ({"type": "x" * 201}, "has 201 characters"),
        ({"type": 7}, "type=7 must be text"),
        ({"type": "a\0b"}, "NUL"),
        ({"type": "a\ud800"}, "lone surrogate"),
        ({"timeout": -1}, "timeout=-1 must be"),
        ({"timeout": 0}, "more than 0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"timeout": float("inf")}, "timeout=inf"),
        ({"timeout": None}, "timeout=None"),
        ({"timeout": True}, "timeout=True"),
        ({"max_retries": -1}, "max_retries=-1"),
        ({"max_retries": 1.5}, "max_retries=1.5"),
        ({"max_retries": 2**31 - 1}, "max_retries=2147483647"),
        ({"max_retries": True}, "max_retries=True"),
        ({"kind": "fiber"}, "kind='fiber' must be one of"),
        ({"kind": "async"}, "no coroutine function: use kind='thread'"),
        ({"function": coroutine, "kind": "thread"}, "a coroutine function: use kind='async'"),
        ({"function": coroutine, "kind": "process"}, "a coroutine function: use kind='async'"),
        ({"backoff": 10}, "backoff=10 must be a Backoff"),
        ({"backoff": Backoff}, "must be a Backoff"),
        ({"payload": dict}, "must be a dataclass or a pydantic model"),
        ({"payload": Order(1)}, "the class, not an instance"),
        ({"retry_blocks_key": "no"}, "retry_blocks_key='no'"),
        ({"function": None}, "cannot be called"),
        ({"function": lambda: None}, r"will be called as \(ctx"),
        ({"function": lambda ctx, a, /: None}, "all after ctx by keyword"),
        ({"function": lambda ctx: None, "payload": Order}, r"will be called as \(ctx, payload\)"),
        ({"function": lambda ctx, order, more: None, "payload": Order}, r"will be called as \(ctx, payload\)"),
        ({"function": lambda ctx: (yield)}, "is a generator"),
    ],
)
def test_refused(queue: JobQueue, options: dict[str, Any], message: str) -> None:
    options = {"type": "t", "function": plain, **options}
    with pytest.raises(InvalidJob, match=message):
        queue.register(options.pop("type"), options.pop("function"), **options)
    assert not queue.handlers


def test_second_handler_of_a_type_is_refused_and_names_the_first(queue: JobQueue) -> None:
    first = queue.register("t", plain)
    with pytest.raises(InvalidJob, match=r"'t' has a handler already, .*\.plain"):
        queue.register("t", coroutine)
    assert queue.handlers == {"t": first}


def test_decorator_without_type(queue: JobQueue) -> None:
    with pytest.raises(InvalidJob, match="needs the type"):
        queue.handler(plain)  # type: ignore[arg-type]


def test_unknown_type_names_those_known(queue: JobQueue) -> None:
    with pytest.raises(UnknownJobType, match="is the module imported"):
        queue.handler_of("x")
    queue.register("t", plain)
    with pytest.raises(UnknownJobType, match="there are handlers for: t"):
        queue.handler_of("x")


@pytest.mark.parametrize("payload", [{"order_id": 1}, {"order_id": 1, "amount": "2"}])
def test_payload_that_fits(queue: JobQueue, payload: dict[str, Any]) -> None:
    queue.register("t", plain).check(payload)


def test_payload_that_fits_any(queue: JobQueue) -> None:
    queue.register("a", coroutine).check({"whatever": 1})
    queue.register("c", lambda *args, **rest: None).check({"whatever": 1})
    queue.register("d", functools.partial(plain, amount="1")).check({"order_id": 1})


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({}, "'order_id' is missing"),
        ({"order_id": 1, "x": 1}, "it takes no 'x'"),
        ({"order_id": 1, "ctx": 1}, "it takes no 'ctx'"),
        ({"y": 1, "x": 1}, "'order_id' is missing, it takes no 'x', it takes no 'y'"),
    ],
)
def test_payload_that_does_not_fit(queue: JobQueue, payload: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidPayload, match=message) as raised:
        queue.register("t", plain).check(payload)
    assert "'t' job" in str(raised.value)
    assert "plain" in str(raised.value)
