"""What cannot be a cluster is refused by name, before anything is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.naming import Names
from jobsync_orm.operate import JobFinder, Operations, drain, reshard, survey, undrain, where

URL = "postgresql+psycopg://me:s3cret@127.0.0.1:1/d"
CALLS: list[Callable[[Any, Any], object]] = [
    Operations,
    JobFinder,
    lambda engine, names: drain(engine, names, "w1", by="me"),
    lambda engine, names: undrain(engine, names, "w1"),
    lambda engine, names: where(engine, names, 1),
    lambda engine, names: survey(engine, names, 5),
    lambda engine, names: reshard(engine, names, 5),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("engine", [URL, None, create_async_engine(URL)], ids=["text", "None", "AsyncEngine"])
def test_what_is_no_engine(call: Callable[[Any, Any], object], engine: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=f"synchronous Engine is needed, not a {type(engine).__name__}"
    ) as caught:
        call(engine, Names())
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("call", [call for n, call in enumerate(CALLS) if n not in (3, 4)])
def test_what_is_no_name(call: Callable[[Any, Any], object]) -> None:
    with pytest.raises(ConfigurationError, match="names='shop' is no Names: give Names"):
        call(create_engine(URL), "shop")
