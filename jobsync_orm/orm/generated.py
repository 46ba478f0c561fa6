"""The expression of the generated column ``token_id``, in the words of each database.

On PostgreSQL it is written just as the server prints it back (``sync_token_of((sku)::text)``, and without the
cast where the key is ``text`` already), because Alembic compares the two texts and warns where they differ.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import CHAR, NCHAR, Column, Enum, Integer, String, TypeDecorator, Uuid, literal_column
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import ColumnElement
from sqlalchemy.types import NullType

from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.naming import Names

__all__ = ["TokenOf", "check_key_type"]


_POSTGRESQL = postgresql.dialect()  # type: ignore[no-untyped-call]


class TokenOf(ColumnElement[int]):
    """Token of a key: a column, or SQL text. Both are bound once the class is mapped.

    Attributes
    ----------
    names : Names or None
        Cluster whose function is called.
    source : Column or str or None
        What is hashed: the key column, or SQL that yields text.
    """

    inherit_cache = False
    type = Integer()
    names: Names | None = None
    source: Column[Any] | str | None = None


def check_key_type(owner: str, key: Column[Any]) -> None:
    """Refuse a key whose text in the database is not ``str()`` of its value in Python.

    Raises
    ------
    ConfigurationError
        The column is of another type than integers, text or UUID, or is one of those that print differently.
    """
    reason = _unfit(key.type)
    if reason is not None:
        raise ConfigurationError(
            f"{owner}: key column {key.name!r} is of type {key.type!r}: {reason}. Use an integer, "
            "text (String, Text) or Uuid column, or give the text to hash as SQL in __token_key_sql__"
        )


# Where a type of an application's own may change a value on its way to the database or back, or write SQL around it.
_CHANGES = ("process_bind_param", "process_result_value", "bind_processor", "result_processor")
_CHANGES_SQL = ("bind_expression", "column_expression")


def _unfit(type_: Any) -> str | None:
    if isinstance(type_, TypeDecorator):
        # One that changes nothing, as that of SQLModel's text columns, is what it decorates.
        if all(getattr(type(type_), name) is getattr(TypeDecorator, name) for name in _CHANGES + _CHANGES_SQL):
            return _unfit(type_.load_dialect_impl(_POSTGRESQL))
        return "it may change the value, and its text in the database need not be str() of its value"
    if isinstance(type_, Enum):
        return "an enumeration's label is not its value, and its cast to text is not immutable"
    if isinstance(type_, CHAR | NCHAR):
        return "char(n) pads its value with blanks"
    if isinstance(type_, Uuid) and not type_.native_uuid:
        return "without native_uuid the database holds 32 digits, not the text of the UUID"
    if isinstance(type_, NullType):
        return "its type is not known; name it in mapped_column(...)"
    if isinstance(type_, Integer | String | Uuid):
        return None
    return "its text in the database need not be str() of its value"


def _bound(element: TokenOf) -> tuple[Names, Column[Any] | str]:
    if element.names is None or element.source is None:
        raise ConfigurationError("token_id has no key: the class that declares it could not be mapped")
    return element.names, element.source


@compiles(TokenOf)
def _postgresql(element: TokenOf, compiler: SQLCompiler, **kw: Any) -> str:
    names, source = _bound(element)
    function = names.token_function
    if names.schema is not None:
        function = f"{compiler.preparer.quote_schema(names.schema)}.{function}"
    if isinstance(source, str):
        return f"{function}({compiler.process(literal_column(source), **kw)})"
    text = compiler.process(source, **{**kw, "include_table": False})
    if source.type.compile(dialect=compiler.dialect).split()[0] == "TEXT":
        return f"{function}({text})"
    return f"{function}(({text})::text)"


@compiles(TokenOf, "sqlite")
def _sqlite(element: TokenOf, compiler: SQLCompiler, **kw: Any) -> str:
    names, source = _bound(element)
    if isinstance(source, str):
        return f"{names.token_function}({compiler.process(literal_column(source), **kw)})"
    text = compiler.process(source, **{**kw, "include_table": False})
    if isinstance(source.type, Uuid):
        # SQLAlchemy stores the 32 digits alone; the token is that of the usual text.
        dashed = " || '-' || ".join(f"substr({text}, {start}, {length})" for start, length in _UUID_GROUPS)
        return f"{names.token_function}({dashed})"
    return f"{names.token_function}(CAST({text} AS TEXT))"


_UUID_GROUPS = ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))
