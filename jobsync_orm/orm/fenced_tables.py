"""Which tables hold rows that have tokens, and how the token of a row is found.

A table of a ``TokenOwned`` model either has ``token_id`` itself, or is another table of the same joined-inheritance
hierarchy: then a row's token is in the row it is joined to. Models register here when they are mapped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Column, Select, Table, select, tuple_
from sqlalchemy.orm import Mapper
from sqlalchemy.sql.expression import ColumnElement

from jobsync_orm.naming import Names
from jobsync_orm.orm.criteria import names_of
from jobsync_orm.orm.generated import TokenOf

__all__ = ["FencedTable", "fenced_table", "register"]

# Values in one IN list: far below the 65,535 parameters that one message may have.
CHUNK = 1000


class FencedTable:
    """A table whose rows have tokens.

    Attributes
    ----------
    table : Table
        The table.
    token : Column
        ``token_id``, in this table or in a joined one.
    names : Names
        Cluster whose tokens these are.
    direct : bool
        Whether ``token`` is a column of ``table``.
    """

    def __init__(self, table: Table, token: Column[Any], names: Names, joins: Sequence[ColumnElement[bool]]) -> None:
        self.table = table
        self.token = token
        self.names = names
        self.direct = token.table is table
        self._joins = tuple(joins)

    @cached_property
    def returned(self) -> tuple[Column[Any], ...]:
        """Columns of this table that lead to a row's token: ``token_id`` itself, or the primary key."""
        return (self.token,) if self.direct else self.primary_key

    @cached_property
    def primary_key(self) -> tuple[Column[Any], ...]:
        return tuple(self.table.primary_key)

    @cached_property
    def deciding(self) -> frozenset[str]:
        """Keys of the columns whose change may change the row's token."""
        if not self.direct:
            return frozenset(column.key for column in self.primary_key)
        if self.token.computed is None:  # a trigger keeps it, and what that reads is not known here
            return frozenset(column.key for column in self.table.columns)
        expression = self.token.computed.sqltext
        source = expression.source if isinstance(expression, TokenOf) else str(expression)
        if isinstance(source, Column):
            return frozenset((source.key,))
        # SQL of the user's own: each column it might name, and every one if it might name the whole row.
        words = {word.lower() for word in re.findall(r"\w+", source or "")}
        if self.table.name.lower() in words:
            return frozenset(column.key for column in self.table.columns)
        return frozenset(column.key for column in self.table.columns if column.name.lower() in words)

    def locking(self, keys: Sequence[tuple[Any, ...]], *, delete: bool) -> Iterator[Select[Any]]:
        """SELECTs of the tokens of the rows with these primary keys, whose locks keep them as they are.

        A row that is to be written is locked as the write would lock it, in the order of the primary key; of a joined
        one the row with the token is locked ``FOR SHARE``.
        """
        single = self.primary_key[0] if len(self.primary_key) == 1 else None
        for start in range(0, len(keys), CHUNK):
            part = keys[start : start + CHUNK]
            within: ColumnElement[bool] = (
                tuple_(*self.primary_key).in_(part) if single is None else single.in_([key[0] for key in part])
            )
            statement = select(self.token).where(within, *self._joins).order_by(*self.primary_key)
            if self.direct:
                yield statement.with_for_update(key_share=not delete)
            else:
                yield statement.with_for_update(read=True, of=self.token.table)


_tables: WeakKeyDictionary[Table, tuple[FencedTable, ...]] = WeakKeyDictionary()


def fenced_table(table: Table) -> tuple[FencedTable, ...]:
    """What is known of ``table``; empty if its rows have no tokens.

    Several for the table of a parent class whose subclasses have tokens of their own.
    """
    return _tables.get(table, ())


def register(mapper: Mapper[Any]) -> None:
    """Note the tables of a ``TokenOwned`` class. Called when it has been mapped."""
    token = mapper.columns["token_id"]
    names = names_of(mapper)
    levels = [level for level in mapper.iterate_to_root() if isinstance(level.local_table, Table)]
    home = next((place for place, level in enumerate(levels) if level.local_table is token.table), None)
    if isinstance(token.table, Table) and token.table not in _tables:
        _tables[token.table] = (FencedTable(token.table, token, names, ()),)
    if home is None:
        return
    for place, level in enumerate(levels):
        table: Any = level.local_table
        known = _tables.get(table, ())
        if any(one.direct or one.token is token for one in known):
            continue
        between = levels[min(place, home) : max(place, home)]
        joins = [one.inherit_condition for one in between if one.inherit_condition is not None]
        _tables[table] = (*known, FencedTable(table, token, names, joins))
