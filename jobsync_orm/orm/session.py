"""Filter all that a session reads, without a word in each statement.

::

    filter_session(Session, job)          # a sessionmaker, a Session, an AsyncSession, an async_sessionmaker
    session.scalars(select(Item)).all()   # only this node's rows
    session.scalars(select(Item).execution_options(all_tokens=True)).all()   # all of them, this once
    unfilter_session(Session)

Every ``TokenOwned`` entity of an ORM SELECT, UPDATE or DELETE gets the criterion of
:func:`~jobsync_orm.orm.owned_by`, wherever it stands in the statement, and so does every relationship load.
What SQLAlchemy does not show to such a filter (``text()``, Core tables, rows already in the session, ...) is
listed, and tested line by line, in ``docs/filtering.md``. Where a forgotten filter would do harm, prefer
``where(Item.owned_by(job))``.

How it is done, and why so: a ``do_orm_execute`` listener adds ``with_loader_criteria`` for the mixin.
``include_aliases`` because without it a criterion on a mixin is dropped in silence. The listener runs on
relationship loads too and the option does not travel with the loaded objects: it would keep them from being
pickled, and would not reach objects that were made in the session or loaded before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import event
from sqlalchemy.orm import ORMExecuteState, Session, scoped_session, sessionmaker, with_loader_criteria
from sqlalchemy.orm.util import LoaderCriteriaOption

from jobsync_orm.exceptions import ConfigurationError, FilterNotApplicable
from jobsync_orm.orm.criteria import Owner, owned_tokens, running_name, token_mapper
from jobsync_orm.orm.mixins import TokenOwned

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker

    Filterable = (
        Session
        | sessionmaker[Any]
        | scoped_session[Any]
        | AsyncSession
        | async_sessionmaker[Any]
        | async_scoped_session[Any]
    )

__all__ = ["filter_session", "unfilter_session"]

_Listener = Callable[[ORMExecuteState], None]

# By the synchronous Session, or Session class, that the events come from.
_listeners: WeakKeyDictionary[Any, _Listener] = WeakKeyDictionary()

# Session classes made here for an async_sessionmaker.
_own_classes: WeakSet[type[Session]] = WeakSet()


def filter_session(target: Filterable, job: Owner) -> None:
    """Show only the rows of ``job`` to a session, or to all sessions of a factory.

    Parameters
    ----------
    target : Session, sessionmaker, scoped_session, or their async counterparts
        Sessions that an ``async_sessionmaker`` has made before the call stay unfiltered; those of a
        ``sessionmaker`` are filtered too.
    job : Owner
        The job. A standalone job owns everything, so nothing is filtered.

    Raises
    ------
    ConfigurationError
        ``target`` is none of these, or is filtered already.

    Notes
    -----
    The statement option ``execution_options(all_tokens=True)`` leaves one statement, with its eager loads,
    alone. A statement raises :class:`~jobsync_orm.exceptions.FilterNotApplicable` if it updates or deletes a
    joined-inheritance class whose ``token_id`` is in the parent's table.
    """
    source = _event_source(target, making=True)
    if source in _listeners:
        raise ConfigurationError(f"{target!r} is filtered already: call unfilter_session(...) on it first")
    listener = _listener(job)
    event.listen(source, "do_orm_execute", listener)
    _listeners[source] = listener


def unfilter_session(target: Filterable) -> None:
    """Undo :func:`filter_session` on the same ``target``.

    Raises
    ------
    ConfigurationError
        ``target`` is not filtered (a session whose factory is filtered is not filtered itself).
    """
    source = _event_source(target, making=False)
    listener = _listeners.pop(source, None)
    if listener is None:
        raise ConfigurationError(f"{target!r} is not filtered: name what was passed to filter_session")
    event.remove(source, "do_orm_execute", listener)


class _ThisStatement(LoaderCriteriaOption):
    """A loader criterion that holds for all of a statement, joined eager loads included, and for nothing later.

    SQLAlchemy knows two kinds. One that propagates to loaders stays with each loaded object. One that does
    not is left out of joined eager loads. So what is seen when results are loaded is the second kind, and
    what is compiled is the first.
    """

    __slots__ = ("_compiled",)
    # Part of the statement's cache key, as in the base class, whose own class attribute forbids inheriting it.
    _traverse_internals = LoaderCriteriaOption._traverse_internals

    def __init__(self, criterion: LoaderCriteriaOption) -> None:
        for name in LoaderCriteriaOption.__slots__:
            setattr(self, name, getattr(criterion, name))
        self.propagate_to_loaders = False
        self._compiled = criterion

    def get_global_criteria(self, attributes: dict[Any, Any]) -> None:
        self._compiled.get_global_criteria(attributes)


def _listener(job: Owner) -> _Listener:
    if job.names is None:
        return _pass
    tokens = owned_tokens(job.names, job.node_name)
    # SQLAlchemy allows a lambda here little more than a method call on its argument.
    criterion = _ThisStatement(
        with_loader_criteria(TokenOwned, lambda cls: cls._in_tokens(tokens), include_aliases=True)
    )

    def add_criterion(state: ORMExecuteState) -> None:
        # A column load reads more of an object that the session holds already.
        if state.execution_options.get("all_tokens") or state.is_column_load:
            return
        if state.is_update or state.is_delete:
            _refuse_joined(state)
        elif not state.is_select:
            return
        running_name(job)
        state.statement = state.statement.options(criterion)

    return add_criterion


def _pass(state: ORMExecuteState) -> None:
    """A standalone job owns every row."""


def _refuse_joined(state: ORMExecuteState) -> None:
    mapper = state.bind_mapper
    if mapper is None or token_mapper(mapper) is None:
        return
    home = mapper.columns["token_id"].table
    if home is not mapper.local_table:
        name = mapper.class_.__name__
        raise FilterNotApplicable(
            f"UPDATE or DELETE of {name} concerns its own table {mapper.local_table.description!r} only, "
            f"while token_id is in {home.description!r}: SQLAlchemy does not relate the two, and every row "
            f"would match. Say which rows you mean: .where({name}.owned_by(job)).execution_options(all_tokens=True)"
        )


def _event_source(target: Any, making: bool) -> Any:
    if isinstance(target, scoped_session):
        target = target.session_factory
    if isinstance(target, Session):
        return target
    if isinstance(target, sessionmaker):
        return target.class_
    # Whoever has an asynchronous one has imported the module. A program without asyncio may lack greenlet.
    if "sqlalchemy.ext.asyncio" in sys.modules:
        from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker

        if isinstance(target, async_scoped_session):
            target = target.session_factory
        if isinstance(target, AsyncSession):
            return target.sync_session
        if isinstance(target, async_sessionmaker):
            base = target.kw.get("sync_session_class") or target.class_.sync_session_class
            if making and base not in _own_classes:
                # The factory's sessions share the class Session with everyone else's: give them one of their own.
                base = type(base.__name__, (base,), {})
                _own_classes.add(base)
                target.configure(sync_session_class=base)
            return base
    raise ConfigurationError(
        f"{target!r} is no session: pass a Session, sessionmaker, scoped_session, AsyncSession, "
        "async_sessionmaker or async_scoped_session"
    )
