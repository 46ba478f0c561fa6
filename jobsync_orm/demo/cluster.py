"""Who owns what, read from the library's own tables."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy import DateTime, func, select
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
        shares = session.execute(
            select(
                Token.node,
                func.array_agg(Token.token_id).label("tokens"),
                func.count(Token.next_node).label("moving"),
                func.max(Token.assigned_at).label("last_move"),
            ).group_by(Token.node)
        ).all()
        done = session.execute(
            select(SourceFile.done_by, func.count().label("files"))
            .where(SourceFile.times_done > 0)
            .group_by(SourceFile.done_by)
        )
        return Snapshot(
            registered={row.name: row.registered_at for row in nodes},
            owners={token: share.node for share in shares for token in share.tokens},
            moving=sum(share.moving for share in shares),
            last_move=max(share.last_move for share in shares),
            done={row.done_by or "": row.files for row in done},
            files=session.scalars(select(func.count()).select_from(SourceFile)).one(),
        )


def clock(session: Session) -> datetime.datetime:
    """The database's time."""
    with session.begin():
        return session.scalars(select(func.clock_timestamp(type_=DateTime(timezone=True)))).one()
