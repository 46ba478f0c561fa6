"""Payloads with a type: a dataclass or a pydantic model that a handler gets instead of keyword arguments.

::

    @dataclass
    class Payment:
        order_id: int
        amount: Decimal
        due: date | None = None

    @queue.handler("pay", payload=Payment)
    def pay(ctx: JobContext, payment: Payment) -> None: ...

    queue.enqueue(session, "pay", Payment(order_id=7, amount=Decimal("9.99")))
    queue.enqueue(session, "pay", {"order_id": 7, "amount": "9.99"})

It is checked when the job is enqueued, where the mistake is made, and again when it runs, because a job may be older
than the code that runs it. What does not fit then has failed for good: fields that are added later need a default, and
one that is taken away has to stay until the jobs that have it are done.

Of a dataclass, names and types are checked: ``str``, ``int``, ``float``, ``bool``, ``None``, ``Any``, ``Literal``,
unions, ``list``, ``tuple``, ``dict`` with text keys, other dataclasses, pydantic models; and what is stored as text,
``datetime``, ``date``, ``time``, ``UUID``, ``Decimal``, or by its value, an ``Enum``. Of a union the first type that
fits is taken. A class with a field of any other type is refused when the handler is registered. A pydantic model checks
itself.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, Union
from uuid import UUID

from jobsync_orm.exceptions import InvalidJob, InvalidPayload
from jobsync_orm.queue.options import brief

__all__ = ["checked_model", "dump", "load"]


def checked_model(model: Any) -> type[Any]:
    """``model``, if payloads can be made of it and it of payloads.

    Raises
    ------
    InvalidJob
        It is neither a dataclass nor a pydantic model, or a dataclass with a field of a type that has no JSON.
    """
    if isinstance(model, type) and _is_pydantic(model):
        return model
    if isinstance(model, type) and dataclasses.is_dataclass(model):
        _check_dataclass(model, set())
        return model
    raise InvalidJob(f"payload={brief(model)} must be a dataclass or a pydantic model: the class, not an instance")


def dump(model: type[Any], value: Any) -> dict[str, Any]:
    """The JSON object that stands for ``value``: an instance of ``model``, or a dict that one can be made of.

    Raises
    ------
    InvalidPayload
        It does not fit the model; the message says where.
    """
    fields: dict[str, Any]
    if _is_pydantic(model):
        with _validation(model):
            instance = value if isinstance(value, model) else model.model_validate(value)
            fields = instance.model_dump(mode="json", by_alias=True, round_trip=True)
        load(model, fields)  # it may not be able to read what it has written
        return fields
    fields = _dumped(model, value if isinstance(value, model) else load(model, value), model.__name__)
    return fields


def load(model: type[Any], payload: Any) -> Any:
    """The instance of ``model`` that ``payload`` stands for.

    Raises
    ------
    InvalidPayload
        It does not fit the model; the message says where.
    """
    if not _is_pydantic(model):
        return _loaded(model, payload, model.__name__)
    with _validation(model):
        # As JSON, not as Python values: a strict model takes a date from text only where there is no other way.
        return model.model_validate_json(json.dumps(payload))


def _is_pydantic(model: type[Any]) -> bool:
    return hasattr(model, "model_validate_json") and hasattr(model, "model_dump")


@contextmanager
def _validation(model: type[Any]) -> Iterator[None]:
    """Turns what a model's own validation raises, which may be anything, into an InvalidPayload."""
    try:
        yield
    except Exception as error:
        raise InvalidPayload(f"the payload is no {model.__name__}: {_explained(error)}") from error


def _explained(error: Exception) -> str:
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return str(error) or type(error).__name__
    return "; ".join(f"{'.'.join(map(str, entry['loc'])) or 'the payload'}: {entry['msg']}" for entry in errors())


# A type of values: from JSON, and to JSON. Each takes the place of the value as well, for the error.
_Converter = Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True)
class _Shape:
    load: _Converter
    dump: _Converter


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    shape: _Shape
    is_needed: bool


def _wrong(value: Any, place: str, wanted: str) -> InvalidPayload:
    return InvalidPayload(f"{place} is {brief(value)} ({type(value).__name__}), not {wanted}")


def _loaded(model: type[Any], value: Any, place: str) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong(value, place, f"a dict with the fields of {model.__name__}")
    fields = _fields(model)
    missing = [name for name, field in fields.items() if field.is_needed and name not in value]
    unknown = [name for name in value if name not in fields]
    if missing or unknown:
        wrong = [f"{brief(name)} is missing" for name in missing]
        wrong += [f"there is no field {brief(name)}" for name in unknown]
        raise InvalidPayload(f"{place}: {', '.join(wrong)}")
    arguments = {name: fields[name].shape.load(part, f"{place}.{name}") for name, part in value.items()}
    with _validation(model):
        return model(**arguments)


def _dumped(model: type[Any], value: Any, place: str) -> dict[str, Any]:
    if type(value) is not model:
        raise _wrong(value, place, f"a {model.__name__}")
    return {name: field.shape.dump(getattr(value, name), f"{place}.{name}") for name, field in _fields(model).items()}


# They are made once for a class, for as long as the process lives.
_known: dict[type[Any], dict[str, _Field]] = {}


def _fields(model: type[Any]) -> dict[str, _Field]:
    fields = _known.get(model)
    if fields is None:
        fields = _known[model] = _read(model)
    return fields


def _read(model: type[Any]) -> dict[str, _Field]:
    try:
        hints = typing.get_type_hints(model)
    except Exception as error:
        raise InvalidJob(
            f"the types of {model.__name__}'s fields cannot be found out ({error}): define what they name in its module"
        ) from error
    fields = {}
    for field in model.__dataclass_fields__.values():
        hint = hints[field.name]
        if isinstance(hint, dataclasses.InitVar):
            raise InvalidJob(f"{model.__name__}.{field.name} is an InitVar, which an instance does not keep")
        if typing.get_origin(hint) is typing.ClassVar or hint is typing.ClassVar or not field.init:
            continue
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        fields[field.name] = _Field(field.name, _shape(hint, f"{model.__name__}.{field.name}"), not has_default)
    return fields


def _check_dataclass(model: type[Any], seen: set[type[Any]]) -> None:
    """See that all its fields, and those of the dataclasses in them, can be stored."""
    if model in seen:
        return
    seen.add(model)
    _fields(model)
    for hint in typing.get_type_hints(model).values():
        for inner in _classes_in(hint):
            if dataclasses.is_dataclass(inner) and not _is_pydantic(inner):
                _check_dataclass(inner, seen)


def _classes_in(hint: Any) -> list[type[Any]]:
    return [inner for part in typing.get_args(hint) for inner in _classes_in(part)] or (
        [hint] if isinstance(hint, type) else []
    )


def _identity(value: Any, place: str) -> Any:
    return value


def _shape(hint: Any, place: str) -> _Shape:
    """How values of the type that ``hint`` names are stored."""
    while hasattr(hint, "__supertype__"):  # a NewType
        hint = hint.__supertype__
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return _Shape(_identity, _identity)
    if origin is Literal:
        return _literal(arguments)
    if origin in (Union, types.UnionType):
        return _union(arguments, place)
    if origin is list or hint is list:
        return _sequence(list, (*arguments, ...) if arguments else (Any, ...), place)
    if origin is tuple or hint is tuple:
        return _sequence(tuple, arguments or (Any, ...), place)
    if origin is dict or hint is dict:
        return _dict(arguments or (str, Any), place)
    if hint is None or hint is type(None):
        return _exactly(type(None))
    if isinstance(hint, type):
        if hint in _PLAIN:
            return _PLAIN[hint]
        if issubclass(hint, enum.Enum):
            return _enum(hint, place)
        if _is_pydantic(hint):
            return _Shape(lambda value, place: load(hint, value), lambda value, place: dump(hint, value))
        if dataclasses.is_dataclass(hint):
            return _Shape(lambda value, place: _loaded(hint, value, place), lambda v, place: _dumped(hint, v, place))
    raise InvalidJob(
        f"{place} is of type {getattr(hint, '__name__', hint)}, which is not kept as JSON: use one of those that "
        "jobsync_orm.queue.typed_payload names, or a pydantic model"
    )


def _exactly(kind: type[Any]) -> _Shape:
    wanted = "None" if kind is type(None) else kind.__name__

    def convert(value: Any, place: str) -> Any:
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        raise _wrong(value, place, wanted)

    return _Shape(convert, convert)


def _float(value: Any, place: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise _wrong(value, place, "float")


def _text(kind: type[Any], read: Callable[[str], Any], write: Callable[[Any], str]) -> _Shape:
    """Values that are stored as text."""

    def is_one(value: Any) -> bool:  # a datetime is a date, but not as text
        return isinstance(value, kind) and (kind is not datetime.date or not isinstance(value, datetime.datetime))

    def from_text(value: Any, place: str) -> Any:
        if is_one(value):  # in a dict that is enqueued
            return value
        try:
            if isinstance(value, str):
                return read(value)
        except (ValueError, InvalidOperation):
            pass
        raise _wrong(value, place, f"the text of a {kind.__name__}")

    def to_text(value: Any, place: str) -> str:
        if is_one(value):
            return write(value)
        raise _wrong(value, place, kind.__name__)

    return _Shape(from_text, to_text)


def _date(text: str) -> datetime.date:
    return datetime.date.fromisoformat(text)


_PLAIN: dict[type[Any], _Shape] = {
    str: _exactly(str),
    int: _exactly(int),
    bool: _exactly(bool),
    float: _Shape(_float, _float),
    datetime.datetime: _text(datetime.datetime, datetime.datetime.fromisoformat, datetime.datetime.isoformat),
    datetime.date: _text(datetime.date, _date, datetime.date.isoformat),
    datetime.time: _text(datetime.time, datetime.time.fromisoformat, datetime.time.isoformat),
    UUID: _text(UUID, UUID, str),
    Decimal: _text(Decimal, Decimal, str),
}


def _enum(kind: type[enum.Enum], place: str) -> _Shape:
    if not all(isinstance(member.value, str | int | float | None) for member in kind):
        raise InvalidJob(f"{place}: the members of {kind.__name__} must have text or numbers for values")

    def from_value(value: Any, place: str) -> enum.Enum:
        if isinstance(value, kind):
            return value
        try:
            return kind(value)
        except ValueError:
            raise _wrong(value, place, f"the value of a {kind.__name__}") from None

    def to_value(value: Any, place: str) -> Any:
        if isinstance(value, kind):
            return value.value
        raise _wrong(value, place, f"a {kind.__name__}")

    return _Shape(from_value, to_value)


def _literal(allowed: tuple[Any, ...]) -> _Shape:
    def convert(value: Any, place: str) -> Any:
        if any(type(value) is type(one) and value == one for one in allowed):
            return value
        raise _wrong(value, place, f"one of {', '.join(map(repr, allowed))}")

    return _Shape(convert, convert)


def _union(members: tuple[Any, ...], place: str) -> _Shape:
    # An int is a float as well, and would come back as one.
    shapes = [_shape(member, place) for member in sorted(members, key=lambda member: member is float)]
    names = " or ".join(getattr(member, "__name__", str(member)) for member in members)

    def one_of(converters: list[_Converter]) -> _Converter:
        def convert(value: Any, place: str) -> Any:
            for converter in converters:
                try:
                    return converter(value, place)
                except InvalidPayload:
                    continue
            raise _wrong(value, place, names)

        return convert

    return _Shape(one_of([shape.load for shape in shapes]), one_of([shape.dump for shape in shapes]))


def _sequence(kind: type[Any], members: tuple[Any, ...], place: str) -> _Shape:
    repeated = len(members) == 2 and members[1] is ...
    shapes = [_shape(member, place) for member in (members[:1] if repeated else members)]

    def each(value: Any, place: str, converters: list[_Converter]) -> list[Any]:
        if not isinstance(value, list | tuple) or not (repeated or len(value) == len(converters)):
            raise _wrong(value, place, "a list" if repeated else f"a list of {len(converters)}")
        if repeated:
            converters = converters * len(value)
        return [convert(part, f"{place}[{i}]") for i, (convert, part) in enumerate(zip(converters, value, strict=True))]

    loads, dumps = [shape.load for shape in shapes], [shape.dump for shape in shapes]
    return _Shape(lambda value, place: kind(each(value, place, loads)), lambda value, place: each(value, place, dumps))


def _dict(members: tuple[Any, ...], place: str) -> _Shape:
    if members[0] is not str:
        raise InvalidJob(f"{place} is a dict whose keys are no text: JSON has no other")
    shape = _shape(members[1], place)

    def each(value: Any, place: str, convert: _Converter) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _wrong(value, place, "a dict")
        for key in value:
            if not isinstance(key, str):
                raise _wrong(key, f"a key of {place}", "str")
        return {key: convert(part, f"{place}[{key!r}]") for key, part in value.items()}

    return _Shape(
        lambda value, place: each(value, place, shape.load), lambda value, place: each(value, place, shape.dump)
    )
