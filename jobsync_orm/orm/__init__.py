"""The ORM surface: rows that have a token, and queries for the rows a job owns.

- :class:`TokenOwned`: mixin that adds ``token_id`` to a model.
- :func:`owned_by`, ``Item.owned_by(job)``: the criterion, for ``where()``.
- :class:`ShardedQuery`, :class:`OwnedQuerySession`: ``session.query(Item).owned_by(job)``.
- :class:`OwnedSession`: commits only what is still this node's (``job.bind(session)`` for another session class).
- :func:`filter_session`, :func:`unfilter_session`: all that a session reads.
- :func:`enable_sqlite`: the models on SQLite, for unit tests.

``docs/filtering.md`` says what each filter does and does not filter, ``docs/fence.md`` what is fenced.
"""

from __future__ import annotations

from jobsync_orm.orm.criteria import Owner, owned_by
from jobsync_orm.orm.mixins import TokenOwned
from jobsync_orm.orm.owned_session import OwnedSession
from jobsync_orm.orm.query import OwnedQuerySession, ShardedQuery
from jobsync_orm.orm.session import filter_session, unfilter_session
from jobsync_orm.orm.sqlite import enable_sqlite

__all__ = [
    "OwnedQuerySession",
    "OwnedSession",
    "Owner",
    "ShardedQuery",
    "TokenOwned",
    "enable_sqlite",
    "filter_session",
    "owned_by",
    "unfilter_session",
]
