"""The schema: one mixin per table, with what belongs to the table beyond its columns.

What each column is for stands in ``docs/architecture.md``. All timestamps are the database's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Date,
    DateTime,
    Double,
    Identity,
    Index,
    Integer,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    event,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import MappedColumn, mapped_column
from sqlalchemy.sql.elements import conv

if TYPE_CHECKING:
    from sqlalchemy.orm import Mapper
    from sqlalchemy.types import TypeEngine

__all__ = [
    "AuditMixin",
    "CheckpointMixin",
    "ClaimMixin",
    "ClusterMixin",
    "LockMixin",
    "NodeMixin",
    "RebalanceMixin",
    "TokenMixin",
]

T = TypeVar("T")

TIMESTAMP = DateTime(timezone=True)
UUID = Uuid()
FLOAT: TypeEngine[float] = Double(53)
STRINGS: TypeEngine[dict[str, str]] = JSONB()
PATTERNS: TypeEngine[list[str]] = JSONB()
ANYTHING: TypeEngine[Any] = JSONB()
NOW = func.now()


# An annotated attribute of a plain mixin is refused by a MappedAsDataclass base, and an unannotated one has
# no type for mypy. These two give it one without an annotation.


def _required(type_: TypeEngine[T], *args: Any, **options: Any) -> MappedColumn[T]:
    return mapped_column(type_, *args, nullable=False, **options)


def _optional(type_: TypeEngine[T], **options: Any) -> MappedColumn[T | None]:
    return mapped_column(type_, nullable=True, **options)


def _table(
    checks: Mapping[str, str] | None = None,
    uniques: tuple[str, ...] = (),
    indexes: tuple[tuple[str, ...], ...] = (),
) -> Callable[[type[T]], type[T]]:
    """Class decorator: what a table has beyond its columns, all given by column names.

    Attached once the class is mapped, because ``__table_args__`` of the class replaces that of its mixins.
    The names are those PostgreSQL would choose, and ``conv`` keeps them out of reach of a naming convention.
    """

    def attach(mapper: Mapper[Any], class_: type[Any]) -> None:
        table = mapper.local_table
        if mapper.inherits is not None or not isinstance(table, Table):
            return
        table.primary_key.name = conv(f"{table.name}_pkey")
        for column, condition in (checks or {}).items():
            table.append_constraint(CheckConstraint(condition, name=conv(f"{table.name}_{column}_check")))
        for column in uniques:
            table.append_constraint(UniqueConstraint(column, name=conv(f"{table.name}_{column}_key")))
        for columns in indexes:
            Index(conv(f"{table.name}_{'_'.join(columns)}_idx"), *(table.c[column] for column in columns))

    def decorate(mixin: type[T]) -> type[T]:
        event.listen(mixin, "instrument_class", attach, propagate=True)
        return mixin

    return decorate


@_table(checks={"id": "id = 1"})
class ClusterMixin:
    """The one row that says what the cluster is. Its row lock is the planning mutex."""

    id = _required(Integer(), primary_key=True, autoincrement=False)
    total_tokens = _required(Integer())
    hash_function = _required(Text())
    epoch = _required(BigInteger(), server_default=text("0"))
    revision = _required(BigInteger(), server_default=text("0"))
    pins_revision = _required(BigInteger(), server_default=text("0"))
    incarnation = _required(UUID)
    protocol_version = _required(Integer())
    history = _optional(Text())
    rest_until = _optional(TIMESTAMP)


@_table(checks={"state": "state IN ('joining', 'active', 'away')"}, uniques=("ordinal",))
class NodeMixin:
    """One row per node that is a member, or is away and expected back."""

    name = _required(Text(), primary_key=True)
    ordinal = _required(BigInteger(), Identity())
    incarnation = _required(UUID)
    registered_at = _required(TIMESTAMP, server_default=NOW)
    join_epoch = _required(BigInteger(), server_default=text("0"))
    last_heartbeat = _required(TIMESTAMP, server_default=NOW)
    applied_epoch = _required(BigInteger(), server_default=text("0"))
    state = _required(Text(), server_default=text("'joining'"))
    weight = _required(Integer(), server_default=text("1"))
    can_lead = _required(Boolean(), server_default=text("true"))
    heartbeat_timeout_sec = _required(FLOAT, server_default=text("15"))
    connection_grace_sec = _required(FLOAT, server_default=text("0.5"))
    rejoin_grace_sec = _required(FLOAT, server_default=text("0"))
    labels = _required(STRINGS, server_default=text("'{}'"))
    host = _required(Text(), server_default=text("''"))
    pid = _required(Integer(), server_default=text("0"))
    backend_pid = _optional(Integer())
    version = _required(Text(), server_default=text("''"))


@_table()
class TokenMixin:
    """One row per token: who owns it since which epoch, and who is to get it next."""

    token_id = _required(Integer(), primary_key=True, autoincrement=False)
    node = _optional(Text())
    epoch = _required(BigInteger(), server_default=text("0"))
    assigned_at = _required(TIMESTAMP, server_default=NOW)
    next_node = _optional(Text())
    next_epoch = _optional(BigInteger())
    drain_deadline = _optional(TIMESTAMP)


@_table(indexes=(("token_id",),))
class LockMixin:
    """One row per pinned task."""

    task_id = _required(Text(), primary_key=True)
    token_id = _required(Integer())
    node_patterns = _required(PATTERNS)
    reason = _optional(Text())
    created_at = _required(TIMESTAMP, server_default=NOW)
    created_by = _required(Text())
    expires_at = _optional(TIMESTAMP)
    ephemeral = _required(Boolean(), server_default=text("false"))


@_table(indexes=(("token_id",), ("node",)))
class ClaimMixin:
    """One row per task that is being processed now. ``epoch`` is 0 where the claimer did not own the token."""

    task_id = _required(Text(), primary_key=True)
    token_id = _required(Integer())
    node = _required(Text())
    incarnation = _required(UUID)
    epoch = _required(BigInteger())
    claimed_at = _required(TIMESTAMP, server_default=NOW)
    fence = _required(BigInteger(), Identity())


@_table()
class CheckpointMixin:
    """Where a long-running task resumes after a hand-off."""

    task_id = _required(Text(), primary_key=True)
    epoch = _required(BigInteger())
    position = _required(ANYTHING)
    updated_at = _required(TIMESTAMP, server_default=NOW)


@_table(indexes=(("date", "node"),))
class AuditMixin:
    """What was processed, by whom, in which epoch."""

    id = _required(BigInteger(), Identity(), primary_key=True)
    date = _required(Date(), server_default=func.current_date())
    node = _required(Text())
    task_id = _optional(Text())
    token_id = _optional(Integer())
    epoch = _optional(BigInteger())
    created_on = _required(TIMESTAMP, server_default=NOW)


@_table()
class RebalanceMixin:
    """One row per plan that was published."""

    id = _required(BigInteger(), Identity(), primary_key=True)
    triggered_at = _required(TIMESTAMP, server_default=NOW)
    trigger_reason = _required(Text())
    leader_node = _required(Text())
    nodes_before = _required(Integer())
    nodes_after = _required(Integer())
    tokens_moved = _required(Integer())
    duration_ms = _required(Integer())
    epoch = _required(BigInteger())
