"""``token_id`` for a table that exists, is large, and is being written to.

The generated column that a model with ``TokenOwned`` has by itself is made by an ``ALTER TABLE`` that rewrites the
whole table while nobody may read or write it: right for small tables and for those that are new. For a large one a
migration of the application says instead::

    from alembic import op

    import jobsync_orm.migrate.online  # makes op.add_token_column known


    def upgrade():
        op.add_token_column("item", key="sku")
        op.create_online_index("item_by_token", "item", ["token_id", "created_at"])


    def downgrade():
        op.drop_token_column("item", key="sku")

The import may stand in the migration, or once in ``env.py``. Without Alembic: :func:`add_token_column`,
:func:`drop_token_column` and :func:`create_online_index` with an engine.

The model stays as it is. In place of the generated column there is an ordinary one that a trigger fills, so the
value is the database's affair as before: every INSERT and UPDATE gets the token of its key, whatever it says about
``token_id``, and a CHECK refuses any other value. Autogenerate sees no difference (with
:func:`jobsync_orm.migrate.hooks`).

What is done
------------
| step | lock on the table | if the process stops there |
|---|---|---|
| column, function, trigger, CHECK (not validated) | ACCESS EXCLUSIVE, some milliseconds | all is there, or nothing |
| rows get their tokens, in batches | rows of one batch | a batch is stored or not; the next run goes on |
| ``VALIDATE CONSTRAINT`` reads the table | SHARE UPDATE EXCLUSIVE: writers go on | done or not |
| ``SET NOT NULL``, which the CHECK proves | ACCESS EXCLUSIVE, some milliseconds | done or not |
| ``ANALYZE`` of the column | SHARE UPDATE EXCLUSIVE | |
| each index, ``CONCURRENTLY`` | SHARE UPDATE EXCLUSIVE | an invalid index, which the next run replaces |

Each step looks at what is there already, so the whole can be run again after an interruption. Rows are locked by
batches in the order of the primary key and with ``SKIP LOCKED``: no batch waits for anybody. Two runs at once share
the work.

Triggers of the application that fire before UPDATE of any column fire for the batches too, and the batches write a new
version of each row: leave room for a second copy of the table, and give autovacuum the time to follow (``rest``).

It needs PostgreSQL itself behind the connection, or a pooler in session mode; and it commits as it goes, so give each
such migration a revision of its own and set ``transaction_per_migration=True`` in ``env.py``.
"""

from __future__ import annotations

from sqlalchemy import Index

from jobsync_orm.migrate.binding import Bind, autocommit, target
from jobsync_orm.migrate.online import steps
from jobsync_orm.migrate.online.backfill import Pace
from jobsync_orm.migrate.online.column import Wanted
from jobsync_orm.migrate.online.locks import Patience
from jobsync_orm.migrate.online.operations import (
    BATCH_ROWS,
    LOCK_TIMEOUT,
    PATIENCE,
    REST,
    AddTokenColumnOp,
    CreateOnlineIndexOp,
    DropTokenColumnOp,
    write_online_operations,
)

__all__ = [
    "AddTokenColumnOp",
    "CreateOnlineIndexOp",
    "DropTokenColumnOp",
    "add_token_column",
    "create_online_index",
    "drop_token_column",
    "write_online_operations",
]


def add_token_column(
    bind: Bind,
    table: str,
    schema: str | None = None,
    *,
    key: str | None = None,
    key_sql: str | None = None,
    appname: str | None = None,
    token_schema: str | None = None,
    batch_rows: int = BATCH_ROWS,
    rest: float = REST,
    lock_timeout: float = LOCK_TIMEOUT,
    patience: float = PATIENCE,
) -> None:
    """Give a table that is in use its column ``token_id``. What was interrupted is taken up where it stood.

    Parameters
    ----------
    bind : Engine, AsyncEngine or CoordinationConfig
        The database. One connection is used, and each step is committed by itself.
    table, schema : str, str
        The table, with a primary key; partitioned or not. Without schema it is looked for on ``search_path``.
    key : str, optional
        The **column** whose value is hashed (``__token_key__`` of the model names its attribute): NOT NULL, of
        an integer, text or uuid type.
    key_sql : str, optional
        In its place, SQL that yields the text to hash: ``__token_key_sql__`` of the model.
    appname, token_schema : str, optional
        ``appname`` and ``schema`` of the cluster; see :func:`jobsync_orm.migrate.upgrade`.
    batch_rows : int
        Rows that get their token with one statement. Who wants one of them waits for that statement.
    rest : float
        How long to rest after each batch, in multiples of the time it took; 0 for as fast as can be.
    lock_timeout : float
        Seconds for which others may have to wait behind one attempt to have the table for a moment. Choose it above the
        duration of the transactions that write the table.
    patience : float
        Seconds after which attempts at one lock end.

    Raises
    ------
    ConfigurationError
        The table, its key or a parameter does not fit; nothing has been changed.
    LockNotAcquired
        Others held the table, or some of its rows, all the time. Run it again: it goes on where it stood.
    sqlalchemy.exc.DBAPIError
        PostgreSQL refuses a step; the role may not alter the table, for example.
    """
    wanted = Wanted(target(bind, appname, token_schema).names, table, schema, key, key_sql)
    wanted.check_key()
    pace, waits = Pace(batch_rows, rest), Patience(lock_timeout, patience)
    with autocommit(bind) as connection:
        steps.add(connection, wanted, pace, waits)


def drop_token_column(
    bind: Bind,
    table: str,
    schema: str | None = None,
    *,
    appname: str | None = None,
    token_schema: str | None = None,
    lock_timeout: float = LOCK_TIMEOUT,
    patience: float = PATIENCE,
) -> None:
    """Remove ``token_id``, generated or kept by the trigger, with its indexes. Takes ACCESS EXCLUSIVE for a moment.

    Parameters
    ----------
    bind, table, schema, appname, token_schema, lock_timeout, patience
        As for :func:`add_token_column`.

    Raises
    ------
    ConfigurationError
        There is no such column, or an ownership fence still reads it.
    LockNotAcquired
        Others held the table all the time.
    """
    wanted = Wanted(target(bind, appname, token_schema).names, table, schema)
    waits = Patience(lock_timeout, patience)
    with autocommit(bind) as connection:
        steps.drop(connection, wanted, waits)


def create_online_index(bind: Bind, index: Index) -> None:
    """Make an index while the table is written to (``CREATE INDEX CONCURRENTLY``).

    An index of this name that an interrupted attempt has left invalid is dropped first; a valid one is left as it is.

    Parameters
    ----------
    bind : Engine, AsyncEngine or CoordinationConfig
        The database.
    index : sqlalchemy.Index
        The index, of a Table: one of ``Item.__table__.indexes``, for example.
    """
    with autocommit(bind) as connection:
        steps.create_index(connection, index)
