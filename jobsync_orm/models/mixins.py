"""The schema: one mixin per table, with what belongs to the table beyond its columns.

What each column is for stands in ``docs/architecture.md``. All timestamps are the database's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


def required(type_: TypeEngine[T], *args: Any, **options: Any) -> MappedColumn[T]:
    return mapped_column(type_, *args, nullable=False, **options)


def optional(type_: TypeEngine[T], **options: Any) -> MappedColumn[T | None]:
    return mapped_column(type_, nullable=True, **options)


@dataclass(frozen=True)
class NamedIndex:
    """An index that its columns do not name."""

    columns: tuple[str, ...]
    where: str | None = None
    unique: bool = False
    using: str = "btree"
    options: Mapping[str, str] | None = None


def table(
    checks: Mapping[str, str] | None = None,
    uniques: tuple[str, ...] = (),
    indexes: tuple[tuple[str, ...], ...] = (),
    named: Mapping[str, NamedIndex] | None = None,
) -> Callable[[type[T]], type[T]]:
    """Class decorator: what a table has beyond its columns, all given by column names.

    Attached once the class is mapped, because ``__table_args__`` of the class replaces that of its mixins.
    The names are those PostgreSQL would choose, and ``conv`` keeps them out of reach of a naming convention.
    """

    def attach(mapper: Mapper[Any], class_: type[Any]) -> None:
        local = mapper.local_table
        if mapper.inherits is not None or not isinstance(local, Table):
            return
        local.primary_key.name = conv(f"{local.name}_pkey")
        for column, condition in (checks or {}).items():
            local.append_constraint(CheckConstraint(condition, name=conv(f"{local.name}_{column}_check")))
        for column in uniques:
            local.append_constraint(UniqueConstraint(column, name=conv(f"{local.name}_{column}_key")))
        for columns in indexes:
            Index(conv(f"{local.name}_{'_'.join(columns)}_idx"), *(local.c[column] for column in columns))
        for name, index in (named or {}).items():
            Index(
                conv(f"{local.name}_{name}_idx"),
                *(local.c[column] for column in index.columns),
                unique=index.unique,
                postgresql_where=None if index.where is None else text(index.where),
                postgresql_using=index.using,
                postgresql_with=dict(index.options or {}),
            )

    def decorate(mixin: type[T]) -> type[T]:
        event.listen(mixin, "instrument_class", attach, propagate=True)
        return mixin

    return decorate


@table(checks={"id": "id = 1"})
class ClusterMixin:
    """The one row that says what the cluster is. Its row lock is the planning mutex."""

    id = required(Integer(), primary_key=True, autoincrement=False)
    total_tokens = required(Integer())
    hash_function = required(Text())
    epoch = required(BigInteger(), server_default=text("0"))
    revision = required(BigInteger(), server_default=text("0"))
    pins_revision = required(BigInteger(), server_default=text("0"))
    incarnation = required(UUID)
    protocol_version = required(Integer())
    history = optional(Text())
    rest_until = optional(TIMESTAMP)
    drained = required(ANYTHING, server_default=text("'{}'"))


@table(checks={"state": "state IN ('joining', 'active', 'away')"}, uniques=("ordinal",))
class NodeMixin:
    """One row per node that is a member, or is away and expected back."""

    name = required(Text(), primary_key=True)
    ordinal = required(BigInteger(), Identity())
    incarnation = required(UUID)
    registered_at = required(TIMESTAMP, server_default=NOW)
    join_epoch = required(BigInteger(), server_default=text("0"))
    last_heartbeat = required(TIMESTAMP, server_default=NOW)
    applied_epoch = required(BigInteger(), server_default=text("0"))
    state = required(Text(), server_default=text("'joining'"))
    weight = required(Integer(), server_default=text("1"))
    can_lead = required(Boolean(), server_default=text("true"))
    heartbeat_timeout_sec = required(FLOAT, server_default=text("15"))
    connection_grace_sec = required(FLOAT, server_default=text("0.5"))
    rejoin_grace_sec = required(FLOAT, server_default=text("0"))
    labels = required(STRINGS, server_default=text("'{}'"))
    host = required(Text(), server_default=text("''"))
    pid = required(Integer(), server_default=text("0"))
    backend_pid = optional(Integer())
    version = required(Text(), server_default=text("''"))
    expelled = required(Boolean(), server_default=text("false"))


@table()
class TokenMixin:
    """One row per token: who owns it since which epoch, and who is to get it next."""

    token_id = required(Integer(), primary_key=True, autoincrement=False)
    node = optional(Text())
    epoch = required(BigInteger(), server_default=text("0"))
    assigned_at = required(TIMESTAMP, server_default=NOW)
    next_node = optional(Text())
    next_epoch = optional(BigInteger())
    drain_deadline = optional(TIMESTAMP)


@table(indexes=(("token_id",),))
class LockMixin:
    """One row per pinned task."""

    task_id = required(Text(), primary_key=True)
    token_id = required(Integer())
    node_patterns = required(PATTERNS)
    reason = optional(Text())
    created_at = required(TIMESTAMP, server_default=NOW)
    created_by = required(Text())
    expires_at = optional(TIMESTAMP)
    ephemeral = required(Boolean(), server_default=text("false"))


@table(indexes=(("token_id",), ("node",)))
class ClaimMixin:
    """One row per task that is being processed now. ``epoch`` is 0 where the claimer did not own the token."""

    task_id = required(Text(), primary_key=True)
    token_id = required(Integer())
    node = required(Text())
    incarnation = required(UUID)
    epoch = required(BigInteger())
    claimed_at = required(TIMESTAMP, server_default=NOW)
    fence = required(BigInteger(), Identity())


@table()
class CheckpointMixin:
    """Where a long-running task resumes after a hand-off."""

    task_id = required(Text(), primary_key=True)
    epoch = required(BigInteger())
    position = required(ANYTHING)
    updated_at = required(TIMESTAMP, server_default=NOW)


@table(indexes=(("date", "node"),))
class AuditMixin:
    """What was processed, by whom, in which epoch."""

    id = required(BigInteger(), Identity(), primary_key=True)
    date = required(Date(), server_default=func.current_date())
    node = required(Text())
    task_id = optional(Text())
    token_id = optional(Integer())
    epoch = optional(BigInteger())
    created_on = required(TIMESTAMP, server_default=NOW)


@table()
class RebalanceMixin:
    """One row per plan that was published."""

    id = required(BigInteger(), Identity(), primary_key=True)
    triggered_at = required(TIMESTAMP, server_default=NOW)
    trigger_reason = required(Text())
    leader_node = required(Text())
    nodes_before = required(Integer())
    nodes_after = required(Integer())
    tokens_moved = required(Integer())
    duration_ms = required(Integer())
    epoch = required(BigInteger())
