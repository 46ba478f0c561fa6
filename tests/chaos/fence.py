"""Stand-in for the library's commit fence."""

from __future__ import annotations

import os

from sqlalchemy import event, text
from sqlalchemy.orm import Session

OFF = os.environ.get("FENCE") == "off"


class OwnershipLost(Exception):
    def __init__(self, tokens):
        super().__init__(tokens)
        self.tokens = tokens


class FencedSession(Session):
    def __init__(self, engine, job):
        super().__init__(engine)
        self.job = job
        self.touched = set()
        self.held = None


@event.listens_for(FencedSession, "after_begin")
def _begin(session, transaction, connection):
    if session.held is None:
        session.held = session.job._coordinator.ownership.held


@event.listens_for(FencedSession, "before_commit")
def _fence(session):
    if OFF or session.in_nested_transaction():
        return
    session.flush()
    touched = sorted({o.token_id for o in session.identity_map.values() if hasattr(o, "version") or o.done})
    rows = (
        session.execute(
            text(
                "SELECT token_id FROM sync_token WHERE token_id = ANY(:t) AND node = :me AND epoch <= :e"
                " ORDER BY token_id FOR SHARE"
            ),
            {"t": touched, "me": session.job.node_name, "e": session.held.epoch},
        )
        .scalars()
        .all()
    )
    if list(rows) != touched or not all(session.held.owned[t] for t in touched):
        raise OwnershipLost(touched)
