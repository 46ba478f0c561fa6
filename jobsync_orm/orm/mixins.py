"""Rows that have a token: the mixin :class:`TokenOwned`.

::

    class Item(TokenOwned, Base):
        __tablename__ = "item"
        __token_key__ = "sku"

        id: Mapped[int] = mapped_column(primary_key=True)
        sku: Mapped[str]

The table gets a column ``token_id``, computed by PostgreSQL itself from the key with the SQL twin of the hash
function (``sync_token_of``). It is a STORED generated column because that is the one way which holds on every
path by which a row can be written or changed: the unit of work, bulk inserts, Core, ``INSERT ... SELECT``,
``COPY``, raw SQL, an UPDATE of the key. The function must be there before the table: run
:func:`jobsync_orm.migrate.upgrade` first.

In a table that was too large to be rewritten a trigger keeps the column instead (:mod:`jobsync_orm.migrate.online`).
The model is the same: what keeps the column is the database's affair.

Number of tokens and hash function are in that SQL function alone. A cluster that is created anew with others
needs the column rewritten (drop it and add it).

The key
-------
``__token_key__`` is the name of a mapped attribute whose column is in the same table and cannot be NULL. Its
type is an integer, text or UUID, whose text in the database is ``str()`` of the value in Python: so a row has
the token of the task ``item.sku``. For anything else give the text to hash as SQL instead::

    __token_key_sql__ = "lower(email)"

The expression must be immutable and yield text. Alembic compares it with what PostgreSQL prints, so write it
the way ``\\d item`` shows it (here ``lower((email)::text)``) if you use autogenerate.

Other names
-----------
For a job with another ``appname`` or ``schema`` set ``__token_appname__`` and ``__token_schema__`` on the
model, or on its Base for all models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from sqlalchemy import Column, Computed, FetchedValue, Integer, Select, event
from sqlalchemy import column as sql_column
from sqlalchemy import inspect as sa_inspect
from sqlalchemy.orm import Mapped, Mapper, declared_attr, mapped_column
from sqlalchemy.orm.exc import UnmappedColumnError
from sqlalchemy.sql.expression import ColumnElement
from sqlalchemy.types import NullType

from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.orm import fenced_tables
from jobsync_orm.orm.criteria import Owner, in_tokens, names_of, owned_by
from jobsync_orm.orm.generated import TokenOf, check_key_type

__all__ = ["TokenOwned"]

# Behind the model's own columns, wherever the mixin stands among the bases.
_LAST = 1_000_000


class TokenOwned:
    """Mixin that gives a model a token for each row. See the module's description.

    Works with plain and ``MappedAsDataclass`` bases, abstract bases, single-table and joined inheritance.

    Raises
    ------
    ConfigurationError
        When the class is declared: no key, an unknown or nullable one, or one of a type whose text is not the
        same in Python and in the database.
    """

    # No values here: they would hide those of a Base that stands behind the mixin.
    __token_key__: ClassVar[str | None]
    __token_key_sql__: ClassVar[str | None]
    __token_appname__: ClassVar[str]
    __token_schema__: ClassVar[str | None]

    if TYPE_CHECKING:
        token_id: Mapped[int]
    else:
        # Without an annotation, which would make it a constructor argument of a dataclass.
        @declared_attr
        def token_id(cls):  # noqa: N805
            table = cls.__dict__.get("__table__")
            if table is not None and "token_id" in table.columns:
                return table.columns["token_id"]
            return mapped_column(
                Integer,
                Computed(TokenOf(), persisted=True),
                nullable=False,
                sort_order=_LAST,
                use_existing_column=True,
            )

    @classmethod
    def owned_by(cls, job: Owner) -> ColumnElement[bool]:
        """SQL criterion: the row's token belongs to ``job`` when the statement runs.

        Works in ``where()`` of select, update and delete, in ``join(..., onclause)``, in ``any()``/``has()``,
        and on ``aliased(Item)`` for the alias. Parameters and errors as for :func:`jobsync_orm.orm.owned_by`.
        """
        return owned_by(cls, job)

    @classmethod
    def _in_tokens(cls, tokens: Select[tuple[int]]) -> ColumnElement[bool]:
        """The criterion for the whole-session filter, which tries it on the mixin itself before any model."""
        if sa_inspect(cls, raiseerr=False) is None:
            return sql_column("token_id", Integer).in_(tokens)
        return in_tokens(cls, tokens)


@event.listens_for(TokenOwned, "after_mapper_constructed", propagate=True)
def _bind_key(mapper: Mapper[Any], class_: type[TokenOwned]) -> None:
    # An UPDATE would otherwise expire token_id, and async code cannot load it on access.
    mapper.eager_defaults = True
    token_id = mapper.columns.get("token_id")
    if token_id is None or not _left_to_database(token_id):
        raise ConfigurationError(
            f"{class_.__name__}.token_id is not the generated column of TokenOwned: leave the name to the "
            "mixin, or, with a table of your own, give it Column('token_id', Integer, Computed(...), "
            "nullable=False); or, where a trigger keeps it, Column('token_id', Integer, FetchedValue(), "
            "server_onupdate=FetchedValue(), nullable=False)"
        )
    fenced_tables.register(mapper)
    expression = token_id.computed.sqltext if token_id.computed is not None else None
    if not isinstance(expression, TokenOf):
        return  # a table of the user's own, or a reflected one
    key = _key(mapper, class_, token_id)
    names = names_of(mapper)
    if expression.source is not None and (not _same(expression.source, key) or expression.names != names):
        raise ConfigurationError(
            f"{class_.__name__} shares token_id of table {token_id.table.name!r} with another class of "
            "its hierarchy, whose key, appname or schema is another one: one column has one key, so set them "
            "once, on the class the others inherit from"
        )
    expression.names, expression.source = names, key


@event.listens_for(TokenOwned, "mapper_configured", propagate=True)
def _check_key(mapper: Mapper[Any], class_: type[TokenOwned]) -> None:
    # The type of a foreign key may come from a class declared later.
    computed = mapper.columns["token_id"].computed
    expression = computed.sqltext if computed is not None else None
    if isinstance(expression, TokenOf) and isinstance(expression.source, Column):
        check_key_type(class_.__name__, expression.source)


def _left_to_database(token_id: Column[Any]) -> bool:
    """Whether the ORM writes the column neither in INSERT nor in UPDATE, and reads what it has become."""
    if token_id.computed is not None:
        return True
    return isinstance(token_id.server_default, FetchedValue) and isinstance(token_id.server_onupdate, FetchedValue)


def _key(mapper: Mapper[Any], class_: type[TokenOwned], token_id: Column[Any]) -> Column[Any] | str:
    attribute = getattr(class_, "__token_key__", None)
    sql: str | None = getattr(class_, "__token_key_sql__", None)
    if (attribute is None) == (sql is None):
        raise ConfigurationError(
            f"{class_.__name__} needs one of __token_key__ (name of the attribute whose value is hashed) and "
            f"__token_key_sql__ (SQL that yields the text to hash); got {attribute!r} and {sql!r}"
        )
    if sql is not None:
        return sql
    column = next((c for c in token_id.table.columns if _attribute_of(mapper, c) == attribute), None)
    if column is None:
        raise ConfigurationError(
            f"{class_.__name__}.__token_key__ = {attribute!r} is no mapped column of table "
            f"{token_id.table.name!r}: name an attribute of the table that holds token_id, or use "
            "__token_key_sql__"
        )
    if column.nullable:
        raise ConfigurationError(
            f"{class_.__name__}: key column {column.name!r} may be NULL, and a row without a key has no "
            "token: declare it with nullable=False (Mapped[str], not Mapped[str | None])"
        )
    if not (isinstance(column.type, NullType) and column.foreign_keys):
        check_key_type(class_.__name__, column)
    return column


def _attribute_of(mapper: Mapper[Any], column: Column[Any]) -> str | None:
    try:
        return mapper.get_property_by_column(column).key
    except UnmappedColumnError:
        return None


def _same(one: Column[Any] | str, other: Column[Any] | str) -> bool:
    # Two columns must not be compared with ==, which makes SQL.
    return one == other if isinstance(one, str) and isinstance(other, str) else one is other
