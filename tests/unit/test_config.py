"""jobsync_orm.config: what is given reaches libpq as given, and what cannot work is refused by name."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import URL, Engine, create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.naming import Names
from jobsync_orm.queue import JobQueue


def libpq_parameters(url: URL) -> dict[str, Any]:
    """What the driver is called with."""
    engine = create_engine(url)
    _, parameters = engine.dialect.create_connect_args(engine.url)
    return dict(parameters)


AWKWARD = ["p@ss", "a/b", "a:b", "%41", "100%", "a b", "a+b", "ünïcödé€", "quo'te\"", "back\\slash", "#?&=", "[x]"]


@pytest.mark.parametrize("secret", AWKWARD)
def test_any_password_and_user_reach_libpq_intact(secret: str) -> None:
    config = CoordinationConfig(user=secret, password=secret, dbname=secret, host="db.example", port=5433)
    parameters = libpq_parameters(config.sqlalchemy_url())
    assert parameters["user"] == secret
    assert parameters["password"] == secret
    assert parameters["dbname"] == secret
    assert parameters["host"] == "db.example"
    assert parameters["port"] == 5433


@pytest.mark.parametrize("secret", AWKWARD)
def test_a_url_object_carries_any_password(secret: str) -> None:
    url = URL.create("postgresql+psycopg", "me", secret, "h", 1, "d")
    assert libpq_parameters(CoordinationConfig(url=url).sqlalchemy_url())["password"] == secret
    text = url.render_as_string(hide_password=False)
    assert libpq_parameters(CoordinationConfig(url=text).sqlalchemy_url())["password"] == secret


def test_a_password_is_not_shown() -> None:
    assert "s3cret" not in repr(CoordinationConfig(password="s3cret"))
    assert "s3cret" not in repr(CoordinationConfig(url="postgresql://me:s3cret@h/d"))


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg", "postgresql+asyncpg", "postgresql+psycopg2"])
def test_a_url_is_read_for_psycopg_whatever_its_driver(scheme: str) -> None:
    url = CoordinationConfig(url=f"{scheme}://me@h:7/d?application_name=x").sqlalchemy_url()
    assert url == make_url("postgresql+psycopg://me@h:7/d?application_name=x")


def test_the_parts_have_the_original_defaults() -> None:
    assert CoordinationConfig().sqlalchemy_url() == make_url(
        "postgresql+psycopg://postgres:postgres@localhost:5432/jobsync"
    )


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("not a url", "url is not a database URL"),
        ("", "url is not a database URL"),
        ("sqlite://", "'sqlite' is not PostgreSQL"),
        ("mysql://h/d", "'mysql' is not PostgreSQL"),
    ],
)
def test_a_url_of_something_else_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CoordinationConfig(url=url)


def test_a_broken_url_is_not_repeated_with_its_password() -> None:
    with pytest.raises(ConfigurationError) as caught:
        CoordinationConfig(url="postgres s3cret")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("engine", ["postgresql://me:s3cret@h/d", 5, create_engine])
@pytest.mark.parametrize(
    "take", [lambda engine: CoordinationConfig(engine=engine), lambda engine: JobQueue(engine=engine)]
)
def test_what_is_no_engine_is_refused_and_not_shown(engine: Any, take: Callable[[Any], object]) -> None:
    with pytest.raises(ConfigurationError, match=f"engine is no Engine, but a {type(engine).__name__}: give") as caught:
        take(engine)
    assert "s3cret" not in str(caught.value)


def test_url_and_engine_together_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="url or engine, not both"):
        CoordinationConfig(url="postgresql://h/d", engine=create_engine("postgresql+psycopg://h/d"))


@pytest.mark.parametrize(
    ("name", "value"), [("host", "h2"), ("port", 1), ("dbname", "d2"), ("user", "u"), ("password", "p")]
)
@pytest.mark.parametrize("source", ["url", "engine"])
def test_parts_beside_a_url_or_engine_are_refused_by_name(name: str, value: object, source: str) -> None:
    given: Any = "postgresql://h/d" if source == "url" else create_engine("postgresql+psycopg://h/d")
    with pytest.raises(ConfigurationError, match=f"{name} contradicts {source}"):
        CoordinationConfig(**{source: given, name: value})


def test_a_synchronous_engine_is_used_as_it_is() -> None:
    engine = create_engine("postgresql+psycopg://me:p%40@h:7/d", pool_size=3)
    config = CoordinationConfig(engine=engine)
    assert config.sqlalchemy_url() == engine.url
    assert config.application_engine() is engine
    assert config.connection_pool() is not engine.pool


def test_an_asynchronous_engine_gives_its_url_and_a_synchronous_engine_beside_it() -> None:
    engine = create_async_engine("postgresql+psycopg://me:p%4041@h:7/d")
    config = CoordinationConfig(engine=engine)
    assert libpq_parameters(config.sqlalchemy_url())["password"] == "p@41"
    beside = config.application_engine()
    assert isinstance(beside, Engine)
    assert not beside.dialect.is_async


def test_an_engine_of_another_driver_gives_its_url() -> None:
    # The driver need not be installed: only its name matters.
    stand_in = types.SimpleNamespace(paramstyle="format", __version__="1.31.2")
    engine = create_engine("postgresql+pg8000://me:secret@h:7/d", module=stand_in)
    config = CoordinationConfig(engine=engine)
    assert config.sqlalchemy_url() == make_url("postgresql+psycopg://me:secret@h:7/d")
    assert config.application_engine().driver == "psycopg"


def test_an_engine_of_another_database_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'sqlite' is not PostgreSQL"):
        CoordinationConfig(engine=create_engine("sqlite://"))


WHOLE = [("total_tokens", 1, 2**31 - 1), ("minimum_nodes", 1, 100_000), ("weight", 1, 1_000_000), ("port", 1, 65_535)]


@pytest.mark.parametrize(("name", "low", "high"), WHOLE)
def test_whole_numbers_are_held_to_their_range(name: str, low: int, high: int) -> None:
    for value in (low, high):
        assert getattr(CoordinationConfig(**{name: value}), name) == value
    with pytest.raises(ConfigurationError, match=f"{name} must be a whole number, not text") as text:
        CoordinationConfig(**{name: "postgresql://user:secret@host/db"})  # a URL in the wrong place
    assert "secret" not in str(text.value)
    wrong: tuple[object, ...] = (low - 1, high + 1, 1.0, True, None)
    for bad in wrong:
        with pytest.raises(ConfigurationError) as caught:
            CoordinationConfig(**{name: bad})
        assert str(caught.value) == f"{name}={bad!r} must be a whole number from {low} to {high}"


SECONDS = [
    ("heartbeat_interval_sec", 0.05),
    ("heartbeat_timeout_sec", 1),
    ("connection_grace_sec", 0.05),
    ("drain_timeout_sec", 0),
    ("rejoin_grace_sec", 0),
    ("certainty_wait_sec", 0),
    ("lock_watch_interval_sec", 0.05),
    ("callback_timeout_sec", 0),
]


@pytest.mark.parametrize(("name", "low"), SECONDS)
@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), "5", None, True])
def test_seconds_are_held_to_their_range(name: str, low: float, bad: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        CoordinationConfig(**{name: bad})
    assert str(caught.value) == f"{name}={bad!r} must be a number of seconds, at least {low}"


def test_the_shortest_times_are_taken() -> None:
    config = CoordinationConfig(**dict(SECONDS))
    assert config.heartbeat_interval_sec == 0.05


def test_a_timeout_of_less_than_two_heartbeats_is_refused() -> None:
    assert CoordinationConfig(heartbeat_interval_sec=5, heartbeat_timeout_sec=10).heartbeat_timeout_sec == 10
    with pytest.raises(ConfigurationError, match=r"heartbeat_timeout_sec=9\.9 must be at least twice") as caught:
        CoordinationConfig(heartbeat_interval_sec=5, heartbeat_timeout_sec=9.9)
    assert "heartbeat_interval_sec=5" in str(caught.value)


def test_a_grace_of_half_the_timeout_is_refused() -> None:
    assert CoordinationConfig(connection_grace_sec=7.4).connection_grace_sec == 7.4
    with pytest.raises(ConfigurationError, match=r"connection_grace_sec=7\.5 must be less than half of"):
        CoordinationConfig(connection_grace_sec=7.5)


@pytest.mark.parametrize("name", ["md5", "sha256", "double_sha256"])
def test_known_hash_functions_are_taken(name: str) -> None:
    assert CoordinationConfig(hash_function=name).hash_function == name


@pytest.mark.parametrize("name", ["MD5", "sha1", "", None])
def test_an_unknown_hash_function_is_refused_with_the_known_ones(name: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        CoordinationConfig(hash_function=name)
    assert str(caught.value) == f"hash_function={name!r} is none of double_sha256, md5, sha256"


@pytest.mark.parametrize("appname", ['a"', "a-b", "x" * 24, "Sync_", ""])
def test_a_bad_appname_is_refused(appname: str) -> None:
    with pytest.raises(ConfigurationError, match="appname"):
        CoordinationConfig(appname=appname)


def test_names_follow_appname_and_schema() -> None:
    assert CoordinationConfig(appname="x_", schema="s").names == Names("x_", "s")


RETIRED = [
    "rebalance_check_interval_sec",
    "dead_node_check_interval_sec",
    "token_refresh_initial_interval_sec",
    "token_refresh_steady_interval_sec",
    "token_distribution_timeout_sec",
    "leader_lock_timeout_sec",
    "health_check_interval_sec",
    "stale_leader_lock_age_sec",
    "stale_rebalance_lock_age_sec",
]


@pytest.mark.parametrize("name", RETIRED)
def test_a_retired_setting_is_accepted_and_warned_about_where_it_is_given(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"^{name} has no effect any more: .+") as caught:
        CoordinationConfig(**{name: 3})
    assert [warning.filename for warning in caught] == [__file__]


def test_without_retired_settings_nothing_is_warned_about() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CoordinationConfig()


def test_the_original_order_of_the_settings_still_holds() -> None:
    with pytest.warns(DeprecationWarning, match="rebalance_check_interval_sec"):
        config = CoordinationConfig(500, 2, 1, 4, 30, hash_function="md5")
    assert (config.total_tokens, config.minimum_nodes) == (500, 2)
    assert (config.heartbeat_interval_sec, config.heartbeat_timeout_sec) == (1, 4)


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(TypeError, match="heartbeat_interval"):
        CoordinationConfig(heartbeat_interval=3)  # type: ignore[call-arg]
