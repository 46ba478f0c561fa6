"""Payloads with a type: a dataclass or a pydantic model that a handler gets instead of keyword arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

from jobsync_orm.exceptions import InvalidJob, InvalidPayload
from jobsync_orm.queue.options import brief

__all__ = ["checked_model", "dump", "load"]


def checked_model(model: Any) -> type[Any]:
    """``model``, if payloads can be made of it and it of payloads.

    Raises
    ------
    InvalidJob
        It is neither a dataclass nor a pydantic model.
    """
    if isinstance(model, type) and (_is_pydantic(model) or dataclasses.is_dataclass(model)):
        return model
    raise InvalidJob(f"payload={brief(model)} must be a dataclass or a pydantic model: the class, not an instance")


def dump(model: type[Any], value: Any) -> dict[str, Any]:
    """The JSON object that stands for ``value``: an instance of ``model``, or a dict that one can be made of.

    Raises
    ------
    InvalidPayload
        It does not fit the model; the message says where.
    """
    instance = value if isinstance(value, model) else load(model, value)
    fields: dict[str, Any] = instance.model_dump(mode="json") if _is_pydantic(model) else dataclasses.asdict(instance)
    return fields


def load(model: type[Any], payload: Any) -> Any:
    """The instance of ``model`` that ``payload`` stands for.

    Raises
    ------
    InvalidPayload
        It does not fit the model; the message says where.
    """
    try:
        return model.model_validate(payload) if _is_pydantic(model) else model(**payload)
    except Exception as error:  # whatever validators of the application's raise
        raise InvalidPayload(f"the payload is no {model.__name__}: {error}") from error


def _is_pydantic(model: type[Any]) -> bool:
    return hasattr(model, "model_validate") and hasattr(model, "model_dump")
