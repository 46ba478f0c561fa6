"""The one criterion behind every filter: rows whose token belongs to a node, as the database sees it.

::

    item.token_id IN (SELECT token_id FROM sync_token WHERE node = :me AND next_node IS NULL)

The SQL is constant and its only bound value is the node's name, so it is compiled once for all jobs and all
token counts. It is evaluated by the server, with the statement it stands in: a token that has moved by then
is not matched, and neither is one that its owner has been asked to hand over (``next_node``).
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Integer,
    Select,
    TableClause,
    Text,
    and_,
    bindparam,
    column,
    inspect,
    select,
    table,
    true,
)
from sqlalchemy.orm import Mapper
from sqlalchemy.orm.util import AliasedInsp
from sqlalchemy.sql.expression import ColumnElement

from jobsync_orm.exceptions import ConfigurationError, FilterNotApplicable, NotRunning
from jobsync_orm.naming import DEFAULT_APPNAME, Names

if TYPE_CHECKING:
    from jobsync_orm.coordinator.view import View
    from jobsync_orm.observe import Audience

__all__ = ["Owner", "owned_by"]


class Owner(Protocol):
    """What a filter needs to know of a job; :class:`~jobsync_orm.Job` has it."""

    @property
    def node_name(self) -> str:
        """Name of the node whose rows are wanted."""

    @property
    def names(self) -> Names | None:
        """Names of the cluster's tables; None for a standalone job, which owns every row."""

    @property
    def total_tokens(self) -> int:
        """Tokens of the cluster."""

    @property
    def hash_function(self) -> str:
        """Name of the cluster's hash function."""

    @property
    def audience(self) -> Audience:
        """Who is told what happens."""

    def check_process(self) -> None:
        """Raise ForkedJob if the job is that of the process which this one is a fork of."""

    def held_view(self) -> View | None:
        """What this node owned at its last refresh; None if it does not run. The commit fence asks for it."""


def owned_by(entity: Any, job: Owner) -> ColumnElement[bool]:
    """SQL criterion: the row's token belongs to ``job``.

    Parameters
    ----------
    entity : type or aliased class
        A mapped class with :class:`~jobsync_orm.orm.TokenOwned`, or an ``aliased()`` of one.
    job : Owner
        The job. A standalone job owns everything: the criterion is then ``true()``.

    Raises
    ------
    FilterNotApplicable
        ``entity`` is not ``TokenOwned``.
    ConfigurationError
        The model's tokens are those of another appname or schema than the job's, or ``job`` is no job.
    NotRunning
        The job has not been started or has been stopped; at execution too.
    ForkedJob
        This process is a fork of the job's; at execution too.
    """
    if token_mapper(entity) is None:
        raise FilterNotApplicable(
            f"{entity!r} has no tokens: owned_by needs a mapped class with the TokenOwned mixin, or an alias of one"
        )
    if not hasattr(job, "names"):
        raise ConfigurationError(f"owned_by needs a Job, not {job!r}")
    if job.names is None:
        return true()
    running_name(job)
    # Made once for each class: what it says is constant, and making it costs more than anything else here.
    made: dict[Any, ColumnElement[bool]] | None = getattr(job, "owned_by_made", None)
    criterion = made.get(entity) if made is not None else None
    if criterion is None:
        node = bindparam("node", callable_=partial(running_name, job), type_=Text(), unique=True)
        criterion = in_tokens(entity, owned_tokens(job.names, node))
        if made is not None and isinstance(entity, type):  # an alias is made anew for each statement
            made[entity] = criterion
    return criterion


def token_mapper(entity: Any) -> Mapper[Any] | None:
    """Mapper of a ``TokenOwned`` class or of an alias of one, else None."""
    inspected = inspect(entity, raiseerr=False)
    if not isinstance(inspected, Mapper | AliasedInsp):
        return None
    mapper: Mapper[Any] = inspected.mapper
    return mapper if hasattr(mapper.class_, "_in_tokens") else None


def names_of(mapper: Mapper[Any]) -> Names:
    """The names a ``TokenOwned`` model was declared for."""
    class_ = mapper.class_
    return _names(getattr(class_, "__token_appname__", DEFAULT_APPNAME), getattr(class_, "__token_schema__", None))


@lru_cache(maxsize=64)
def _names(appname: str, schema: str | None) -> Names:
    return Names(appname, schema)


def owned_tokens(names: Names, node: str | BindParameter[str]) -> Select[tuple[int]]:
    """``SELECT`` of the tokens that belong to ``node`` and stay with it."""
    token = _token_table(names)
    return select(token.c.token_id).where(token.c.node == node, token.c.next_node.is_(None))


def running_name(job: Owner) -> str:
    """The name of ``job``'s node.

    Asked at each execution: the name of a node that does not run may still stand in the table, or be another
    process's.
    """
    if not getattr(job, "is_running", True):
        job.check_process()
        raise NotRunning(
            f"{job.node_name} is not running and owns nothing: use `with Job(...) as job:` or job.start() first, and "
            "query before it is stopped"
        )
    return job.node_name


@lru_cache(maxsize=64)
def _token_table(names: Names) -> TableClause:
    return table(
        names.bare("token"),
        column("token_id", Integer),
        column("node", Text),
        column("epoch", BigInteger),
        column("next_node", Text),
        schema=names.schema,
    )


def in_tokens(entity: Any, tokens: Select[tuple[int]]) -> ColumnElement[bool]:
    """``entity.token_id IN (tokens)``, made to hold in UPDATE and DELETE of a joined-inheritance class too.

    Raises
    ------
    ConfigurationError
        ``tokens`` come from the token table of another cluster.
    """
    inspected = inspect(entity)
    mapper: Mapper[Any] = inspected.mapper
    names = names_of(mapper)
    source: Any = tokens.columns_clause_froms[0]
    if (source.name, source.schema) != (names.bare("token"), names.schema):
        raise _mismatch(mapper, names, source.name, source.schema)
    criterion: ColumnElement[bool] = entity.token_id.in_(tokens)
    if inspected.is_mapper:
        # UPDATE and DELETE name the subclass's own table only; without the join condition the parent table
        # with token_id would stand beside it unrelated, and every row would match. In a SELECT the condition
        # repeats the JOIN's and changes nothing.
        joins = list(_joins_up_to_token(mapper))
        if joins:
            return and_(*joins, criterion)
    return criterion


def _joins_up_to_token(mapper: Mapper[Any]) -> list[ColumnElement[bool]]:
    token_table = mapper.columns["token_id"].table
    joins = []
    level: Mapper[Any] | None = mapper
    while level is not None and level.local_table is not token_table:
        if level.inherit_condition is not None:
            joins.append(level.inherit_condition)
        level = level.inherits
    return joins


def _mismatch(mapper: Mapper[Any], names: Names, table_name: str, schema: str | None) -> ConfigurationError:
    class_ = mapper.class_.__name__
    return ConfigurationError(
        f"{class_} takes its tokens from appname={names.appname!r}, schema={names.schema!r}, but the job's "
        f"token table is {table_name!r} in schema={schema!r}: set __token_appname__ and __token_schema__ on "
        f"{class_} or its Base to the job's appname and schema"
    )
