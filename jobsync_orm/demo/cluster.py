"""Who owns what, read from the library's own tables."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from jobsync_orm.demo.model import SCHEMA, SourceFile
from jobsync_orm.models import for_app

__all__ = ["Snapshot", "clock", "observe"]

_models = for_app(schema=SCHEMA)
Node, Token = _models.Node, _models.Token


@dataclass(frozen=True)
class Snapshot:
    """The cluster at one moment.

    Attributes
    ----------
    registered : mapping of str to datetime
        The nodes, oldest (the leader) first, and when they registered.
    owners : mapping of int to str or None
        Owner of each token; None where it has none.
    moving : int
        Tokens that are being handed over.
    last_move : datetime
        When a token last got its owner, by the database's clock.
    done : mapping of str to int
        Files done, by worker.
    files : int
        Files in all.
    """

    registered: Mapping[str, datetime.datetime]
    owners: Mapping[int, str | None]
    moving: int
    last_move: datetime.datetime
    done: Mapping[str, int]
    files: int

    @property
    def tokens(self) -> Counter[str | None]:
        """Number of tokens by owner."""
        return Counter(self.owners.values())

    @property
    def files_done(self) -> int:
        """Files done by all workers."""
        return sum(self.done.values())

    def is_settled(self, workers: Iterable[str]) -> bool:
        """Whether just these workers share all tokens evenly, and nothing is on the move."""
        names, tokens = set(workers), self.tokens
        return (
            set(self.registered) == names == set(tokens)
            and self.moving == 0
            and max(tokens.values()) - min(tokens.values()) <= 1
        )

    def moved_since(self, earlier: Snapshot) -> int:
        """Number of tokens that have another owner than in ``earlier``."""
        return sum(earlier.owners[token] != owner for token, owner in self.owners.items())


def observe(session: Session) -> Snapshot:
    """Read the cluster's state, in one transaction that sees one moment."""
    with session.begin():
        session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
        nodes = session.execute(select(Node.name, Node.registered_at).order_by(Node.ordinal))
        tokens = session.execute(select(Token.token_id, Token.node, Token.next_node, Token.assigned_at)).all()
        done = session.execute(
            select(SourceFile.done_by, func.count()).where(SourceFile.times_done > 0).group_by(SourceFile.done_by)
        )
        return Snapshot(
            registered={row.name: row.registered_at for row in nodes},
            owners={row.token_id: row.node for row in tokens},
            moving=sum(row.next_node is not None for row in tokens),
            last_move=max(row.assigned_at for row in tokens),
            done={row.done_by or "": row.count for row in done},
            files=session.scalars(select(func.count()).select_from(SourceFile)).one(),
        )


def clock(session: Session) -> datetime.datetime:
    """The database's time."""
    with session.begin():
        return session.scalars(select(func.clock_timestamp())).one()
