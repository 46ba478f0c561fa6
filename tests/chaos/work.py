"""What a worker works: tasks of lanes its node owns, a few in each transaction, in each way the library offers.

* ``select``: rows of owned lanes, read without locks. Only the fence stands between two workers.
* ``rows``: rows taken by ``job.claim``, locked.
* ``task``: a lane taken by ``job.claim_task``; the claim is completed, and a checkpoint written, in the transaction.

Writes go by flush, by bulk statements, after a savepoint that is rolled back, and, where the tables have the trigger of
``create_ownership_fence``, by SQL text that the fence cannot see.
"""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from sqlalchemy import Engine, insert, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from jobsync_orm import Claim, ClaimRefused, Job, OwnedSession, OwnershipLost
from tests.chaos.control import Point
from tests.chaos.inside import LIFE, NODE, reach, stopping, tell
from tests.chaos.model import Counter, Effect, Todo

__all__ = ["Work"]

IDLE_SEC = 0.1

# Tasks that are looked at, to pick some of.
WINDOW = 12


class _NothingToDo(Exception):
    """There is no task, or no right to one."""


class Work:
    """The application's loop."""

    def __init__(self, job: Job, engine: Engine) -> None:
        self.job = job
        self.engine = engine
        self.fenced = os.environ["FENCE"] == "on"
        self.mixed = os.environ["WORK"] == "mixed"
        self.triggers = os.environ["TRIGGERS"] == "on"
        self.random = random.Random(f"{os.environ['SEED']}/{NODE}/{LIFE}")
        self.ghost: tuple[int, int, str] | None = None  # backend, transaction, attempt of an unknown outcome

    def run(self) -> None:
        """Work until the worker is to leave."""
        while not stopping.is_set():
            try:
                if self.ghost is not None:
                    self.lay()
                else:
                    ways = ("select", "select", "rows", "task") if self.mixed else ("select",)
                    self.attempt(self.random.choice(ways))
            except _NothingToDo:
                stopping.wait(IDLE_SEC)
            except DBAPIError as error:
                tell("database", why=str(error.orig).strip().splitlines()[:1])
                stopping.wait(IDLE_SEC)

    def attempt(self, way: str) -> None:
        """One transaction."""
        name = uuid.uuid4().hex
        xid = backend = 0
        asked = False  # for the commit
        try:
            with ExitStack() as stack:
                claim = stack.enter_context(self.claim()) if way == "task" else None
                session = stack.enter_context(self.session())
                known = self.job.token_version, self.incarnation
                isolation = self.random.choice((*["READ COMMITTED"] * 4, *["REPEATABLE READ"] * self.mixed))
                connection = session.connection(execution_options={"isolation_level": isolation})
                if known != (self.job.token_version, self.incarnation):
                    raise _NothingToDo  # which of the two the fence has taken is not known
                backend = connection.connection.dbapi_connection.info.backend_pid
                todos = self.find(session, way, claim)
                self.pass_by(Point.READ)
                self.think()
                version = self.write(session, todos, name, *known, claim)
                if self.random.random() < 0.2:
                    self.think()
                if claim is not None:
                    self.job.checkpoint(claim.task_id, {"version": version}, session)
                    claim.complete(session)
                xid = session.execute(text("SELECT pg_current_xact_id()::text::bigint")).scalar_one()
                self.pass_by(Point.WRITTEN)
                tell("try", attempt=name, todos=[todo.id for todo in todos], epoch=known[0])
                asked = True
                session.commit()
                tell("done", attempt=name)
        except OwnershipLost as lost:
            tell("refused", attempt=name, tokens=list(lost.tokens))
        except DBAPIError as error:
            if asked and error.connection_invalidated:
                self.ghost = backend, xid, name
            elif asked:
                tell("failed", attempt=name)
            raise

    @property
    def incarnation(self) -> str:
        coordinator = self.job._coordinator
        return coordinator.incarnation if coordinator else ""

    # -- finding -----------------------------------------------------------------------------------------------

    def claim(self) -> Claim:
        """A claim on a lane with something to do."""
        with self.session() as session:
            found = session.scalars(self.pending()).all()
        if not found:
            raise _NothingToDo
        try:
            return self.job.claim_task(self.random.choice(found).lane)
        except ClaimRefused as refused:
            tell("claim refused", reason=refused.reason)
            raise _NothingToDo from refused

    def session(self) -> Session:
        """Made in one of the two ways to make a fenced one; or not fenced."""
        if not self.fenced:
            return Session(self.engine)
        if self.random.random() < 0.3:
            return self.job.bind(Session(self.engine))
        return OwnedSession(self.engine, job=self.job)

    def pending(self) -> Any:
        return select(Todo).where(Todo.owned_by(self.job), ~Todo.done).order_by(Todo.id).limit(WINDOW)

    def find(self, session: Session, way: str, claim: Claim | None) -> Sequence[Todo]:
        most = self.random.choice((1, 1, 2, 3))
        if claim is not None:
            mine = select(Todo).where(Todo.lane == claim.task_id, ~Todo.done).order_by(Todo.id).limit(most)
            todos = session.scalars(mine).all()
        elif way == "rows":
            todos = self.job.claim(session, select(Todo).where(~Todo.done).order_by(Todo.id), limit=most)
        else:
            found = session.scalars(self.pending()).all()
            todos = self.random.sample(found, min(len(found), most))
        if not todos:
            raise _NothingToDo
        return todos

    # -- working -----------------------------------------------------------------------------------------------

    def pass_by(self, point: Point) -> None:
        """Often, whoever was stopped works on for a while: its node may be back by then, and have the token again."""
        if reach(point):
            time.sleep(self.random.choice((0, 1, 2)))

    def think(self) -> None:
        time.sleep(self.random.choice((0, 0.01, 0.03, 0.1, 0.3)))

    def write(
        self, session: Session, todos: Sequence[Todo], attempt: str, epoch: int, incarnation: str, claim: Claim | None
    ) -> int:
        """The effects of the tasks; returns the last version of a counter."""
        effects = []
        for todo in sorted(todos, key=lambda todo: todo.token_id):
            counter = session.get_one(Counter, todo.lane)
            counter.version += 1
            effects.append(
                {
                    "todo": todo.id,
                    "lane": todo.lane,
                    "version": counter.version,
                    "node": NODE,
                    "incarnation": incarnation,
                    "epoch": epoch,
                    "attempt": attempt,
                    "fence": claim.fence if claim is not None else None,
                }
            )
        ids = [todo.id for todo in todos]
        way = self.random.choice(("flush", "flush", "bulk", "savepoint", *(["text"] if self.triggers else [])))
        if way == "savepoint":
            # Writes that are taken back, before those that stand.
            with session.begin_nested() as savepoint:
                session.execute(update(Todo).where(Todo.id == ids[0]).values(done=True))
                savepoint.rollback()
        if way == "bulk":
            session.execute(update(Todo).where(Todo.id.in_(ids)).values(done=True))
            session.execute(insert(Effect), effects)
        elif way == "text":
            # All of it: what the fence does see it checks by itself.
            for effect in effects:
                session.execute(text("UPDATE todo SET done = true WHERE id = :todo"), effect)
                session.execute(text("UPDATE counter SET version = :version WHERE lane = :lane"), effect)
                session.execute(_INSERT, effect)
            session.expunge_all()
        else:
            for todo in todos:
                todo.done = True
            session.add_all(Effect(**effect) for effect in effects)
        session.flush()
        return effects[-1]["version"]

    # -- a commit whose answer was lost ------------------------------------------------------------------------

    def lay(self) -> None:
        """Find out what became of a commit whose answer was lost; until then nothing is done again.

        First its session must be gone, so that it cannot commit any more; then its effect is there or not. To ask for
        the transaction's number would not do: after a crash numbers are given again that were not yet written down.
        """
        backend, xid, name = self.ghost
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            there = connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE pid = :pid AND backend_xid::text = :xid"
                ),
                {"pid": backend, "xid": str(xid)},
            ).all()
            if there:
                stopping.wait(IDLE_SEC)
                return
            committed = connection.execute(select(Effect.id).where(Effect.attempt == name)).all()
        tell("found", attempt=name, status="committed" if committed else "aborted")
        self.ghost = None


_COLUMNS = ("todo", "lane", "version", "node", "incarnation", "epoch", "attempt", "fence")
_INSERT = text(f"INSERT INTO effect ({', '.join(_COLUMNS)}) VALUES ({', '.join(f':{name}' for name in _COLUMNS)})")
