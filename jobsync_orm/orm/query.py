"""``session.query(Item).owned_by(job)``, for code that uses the Query API.

::

    Session = sessionmaker(engine, class_=OwnedQuerySession)
    with Session() as session:
        session.query(Item).owned_by(job).order_by(Item.id).limit(100).all()

:class:`OwnedQuerySession` is an ordinary session whose ``query()`` is known to type checkers to return a
:class:`ShardedQuery`. For a Session class of your own, ``sessionmaker(query_cls=ShardedQuery)`` does the same
at run time. A query class of your own can inherit from ``ShardedQuery``.

Neither has to do with ``sqlalchemy.ext.horizontal_shard``, whose ``ShardedQuery`` and ``ShardedSession``
choose between several databases.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar, overload

from sqlalchemy import Select, inspect
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Query, Session

from jobsync_orm.exceptions import FilterNotApplicable
from jobsync_orm.orm.criteria import Owner, owned_by, token_mapper

if TYPE_CHECKING:
    from typing import Self

    from sqlalchemy.orm.util import AliasedClass

__all__ = ["OwnedQuerySession", "ShardedQuery"]

T = TypeVar("T")


class ShardedQuery(Query[T]):
    """A :class:`sqlalchemy.orm.Query` with :meth:`owned_by`."""

    # The entities named in select_from(), which a query of expressions alone does not know from its columns.
    _selected_from: tuple[Any, ...] = ()

    def select_from(self, *from_obj: Any) -> Self:
        """As :meth:`sqlalchemy.orm.Query.select_from`; :meth:`owned_by` remembers the entities."""
        query = super().select_from(*from_obj)
        query._selected_from = from_obj
        return query

    def owned_by(self, job: Owner) -> Self:
        """Only rows whose token belongs to ``job`` when the query runs.

        Every ``TokenOwned`` entity that the query selects from is filtered: the classes and aliases it
        returns or of which it returns columns, and those named in ``select_from()``. An entity that is only
        joined is not; filter it with ``.filter(Other.owned_by(job))`` or in the ON clause.

        Parameters
        ----------
        job : Owner
            The job. For a standalone job, which owns everything, the query stays as it is.

        Raises
        ------
        FilterNotApplicable
            The query has no ``TokenOwned`` entity, has a LIMIT or OFFSET already, or is a UNION of columns.
        ConfigurationError
            The model's tokens are those of another appname or schema than the job's.
        """
        entities = list(self._token_entities())
        if not entities:
            raise FilterNotApplicable(
                "owned_by found no TokenOwned entity among what this query returns: name one with "
                "select_from(Item), or filter explicitly with .filter(Item.owned_by(job))"
            )
        try:
            query = self.filter(*(owned_by(entity, job) for entity in entities))
        except InvalidRequestError as error:
            raise FilterNotApplicable(
                "owned_by must come before limit() and offset(), because it decides which rows are counted, "
                "and cannot follow from_statement(): write session.query(Item).owned_by(job).limit(...)"
            ) from error
        # Columns over a UNION or another subquery without token_id would bring the table in a second time.
        if not self._returns_entities(entities) and _froms(query) > _froms(self):
            raise FilterNotApplicable(
                "owned_by cannot reach token_id through this query's subquery: apply owned_by to the queries "
                "inside it (each part of a union) instead"
            )
        return query

    def _token_entities(self) -> Iterable[Any]:
        seen = set()
        described = (description["entity"] for description in self.column_descriptions)
        for entity in (*described, *self._selected_from):
            if entity is not None and token_mapper(entity) is not None:
                key = inspect(entity)
                if key not in seen:
                    seen.add(key)
                    yield key.entity

    def _returns_entities(self, entities: list[Any]) -> bool:
        returned = [d["expr"] for d in self.column_descriptions]
        return all(any(entity is expr for expr in returned) for entity in entities)


def _froms(query: Query[Any]) -> int:
    statement = query.statement
    return len(statement.get_final_froms()) if isinstance(statement, Select) else 1


class OwnedQuerySession(Session):
    """A session whose ``query()`` returns a :class:`ShardedQuery`.

    Takes the arguments of :class:`sqlalchemy.orm.Session`. ``query_cls`` may be a subclass of
    ``ShardedQuery``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("query_cls", ShardedQuery)
        super().__init__(*args, **kwargs)

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def query(self, _entity: type[T], /) -> ShardedQuery[T]: ...

        @overload
        def query(self, _entity: AliasedClass[T], /) -> ShardedQuery[T]: ...

        @overload
        def query(self, *entities: Any, **kwargs: Any) -> ShardedQuery[Any]: ...

        def query(self, *entities: Any, **kwargs: Any) -> ShardedQuery[Any]: ...
