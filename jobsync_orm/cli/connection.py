"""Where a command finds its cluster, and what it is given of it.

A command that works on a cluster is a function whose first parameter is a :class:`Cluster`, in a decorator::

    @app.command()
    @on_cluster
    def nodes(cluster: Cluster, all: Annotated[bool, typer.Option(help="...")] = False) -> None:
        \"\"\"The registered nodes.\"\"\"
        found = cluster.operations.nodes()
        cluster.output.show(found, Grid([...], [...]))

The decorator gives it the options ``--url``, ``--appname``, ``--schema``, ``--config`` and ``--json``, makes an engine
that is closed afterwards, and turns errors about input or from the server into one line on stderr and exit code 2 (see
:mod:`jobsync_orm.cli.output`).

The database is looked for in this order: ``--url``; the environment variable ``JOBSYNC_DATABASE_URL``; ``url`` in the
configuration file. ``appname`` and ``schema``: the option, then the file. The file is the one that ``--config`` names;
if none is named, ``jobsync-orm.toml`` in the current folder; if there is none, the table ``[tool.jobsync-orm]`` of a
``pyproject.toml`` in the current folder. A URL is never printed.
"""

from __future__ import annotations

import functools
import inspect
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec

import typer
from sqlalchemy import URL, Engine, NullPool, create_engine
from sqlalchemy.exc import OperationalError

from jobsync_orm import embedded_guardian
from jobsync_orm.cli.output import Output
from jobsync_orm.config import CoordinationConfig
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.naming import DEFAULT_APPNAME, Names
from jobsync_orm.operate import Operations

__all__ = ["ENVIRONMENT", "Cluster", "lasting", "on_cluster"]

ENVIRONMENT = "JOBSYNC_DATABASE_URL"
FILE, PROJECT, TABLE = "jobsync-orm.toml", "pyproject.toml", "jobsync-orm"
KEYS = ("url", "appname", "schema")

# Nothing is prepared, so that it works through any pooler.
CONNECT = {"prepare_threshold": None, "application_name": "jobsync-orm"}

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a command is given.

    Attributes
    ----------
    engine : Engine
        On the database; each use opens a connection, which is closed after it.
    names : Names
        The cluster's.
    operations : Operations
        The cluster, to look at.
    output : Output
        Where answers go.
    """

    engine: Engine
    names: Names
    operations: Operations
    output: Output


OPTIONS = {
    "url": (
        Annotated[
            str | None,
            typer.Option(
                help=f"postgresql://user:password@host:port/dbname. If not given: {ENVIRONMENT}, then the "
                "configuration file."
            ),
        ],
        None,
    ),
    "appname": (Annotated[str | None, typer.Option(help="Prefix of each table; sync_ if not given.")], None),
    "schema": (
        Annotated[str | None, typer.Option(help="Schema of the tables; if not given, search_path decides.")],
        None,
    ),
    "config": (
        Annotated[
            Path | None,
            typer.Option(
                metavar="FILE", help=f"Configuration file; {FILE}, else {PROJECT}, of this folder if not given."
            ),
        ],
        None,
    ),
    "json": (Annotated[bool, typer.Option("--json", help="Print one JSON document.")], False),
}


def on_cluster(command: Callable[Concatenate[Cluster, P], None]) -> Callable[..., None]:
    """Make ``command``, which takes a :class:`Cluster` first, one that takes the options of a connection."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    ours = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, (annotation, default) in OPTIONS.items()
    ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in OPTIONS}
        output = Output(json=chosen.pop("json"))
        with output.errors(), _cluster(output, **chosen) as cluster:
            command(cluster, **given)  # type: ignore[call-arg]

    named = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    del run.__wrapped__
    run.__signature__ = inspect.Signature([*named, *ours])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*named, *ours]}
    return run


@contextmanager
def _cluster(
    output: Output, url: str | None, appname: str | None, schema: str | None, config: Path | None
) -> Iterator[Cluster]:
    found = settings(config)
    address = url or os.environ.get(ENVIRONMENT) or found.get("url")
    if not address:
        raise ConfigurationError(
            f'no database: give --url postgresql://user@host/dbname, or set {ENVIRONMENT}, or write url = "..." into '
            f"{FILE} in this folder (or a file that --config names), or into [tool.{TABLE}] of {PROJECT}"
        )
    names = Names(appname or found.get("appname") or DEFAULT_APPNAME, schema or found.get("schema"))
    engine = create_engine(CoordinationConfig(url=address).sqlalchemy_url(), poolclass=NullPool, connect_args=CONNECT)
    try:
        yield Cluster(engine, names, Operations(engine, names), output)
    except OperationalError as error:
        if (folder := _embedded(engine.url)) is None or embedded_guardian.listens(folder):
            raise
        raise ConfigurationError(
            f"the embedded server in {folder} is not running: start a process that uses it, and try again while that "
            "runs"
        ) from error
    finally:
        engine.dispose()


def _embedded(url: URL) -> str | None:
    """The folder with the data of an embedded server, which mostly is that of its socket too."""
    folder = url.query.get("host") or url.host
    return folder if isinstance(folder, str) and Path(folder, "PG_VERSION").is_file() else None


@contextmanager
def lasting(engine: Engine) -> Iterator[Engine]:
    """An engine on the same database that keeps its connection, for a command that sends many statements."""
    kept = create_engine(engine.url, pool_size=1, pool_pre_ping=True, connect_args=CONNECT)
    try:
        yield kept
    finally:
        kept.dispose()


def settings(file: Path | None) -> Mapping[str, str]:
    """What the configuration file says: ``url``, ``appname``, ``schema``, or some of them.

    Parameters
    ----------
    file : Path, optional
        The file. None looks in the current folder; nothing being there is no error.

    Raises
    ------
    ConfigurationError
        The file is missing, cannot be read, or says something that is no setting.
    """
    path = file if file is not None else next((Path(name) for name in (FILE, PROJECT) if Path(name).is_file()), None)
    if path is None:
        return {}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is no TOML: {error}") from error
    if path.name == PROJECT:
        document = document.get("tool", {}).get(TABLE, {})
    for key, value in document.items():
        if key not in KEYS:
            raise ConfigurationError(f"{path}: there is no setting {key!r}; there are {', '.join(KEYS)}")
        if not isinstance(value, str):
            raise ConfigurationError(f"{path}: {key} must be text")
    return document
