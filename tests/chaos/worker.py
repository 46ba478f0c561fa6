"""One worker process under chaos: does tasks of the lanes it owns, and writes down all it does and says.

Environment: URL (through the worker's own link), NODE, LIFE (a number of its own for each process), CONTROL (file, see
control.py), LOG (file of JSON lines), SEED, FENCE ("on" or "off"), LEASE ("kept" or "ignored").

The work reads without locks, thinks, and writes. With FENCE=off or LEASE=ignored the library's safeguards are switched
off, so that the checker can be shown to find what they prevent.
"""

from __future__ import annotations

import datetime
import json
import os
import random
import signal
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from tests.chaos.control import Control, Point

control = Control(Path(os.environ["CONTROL"]))
real_time, real_datetime = time.time, datetime.datetime


class SteppedDatetime(real_datetime):
    """A wall clock that somebody sets."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
        return real_datetime.now(tz) + datetime.timedelta(seconds=control.clock_ahead)

    @classmethod
    def utcnow(cls) -> datetime.datetime:  # type: ignore[override]
        return real_datetime.now(datetime.UTC).replace(tzinfo=None) + datetime.timedelta(seconds=control.clock_ahead)


# Before anything else is imported that may keep a reference to the real ones.
datetime.datetime = SteppedDatetime  # type: ignore[misc]
time.time = lambda: real_time() + control.clock_ahead
time.time_ns = lambda: int(time.time() * 1e9)

from sqlalchemy import Engine, create_engine, insert, select, text, update  # noqa: E402
from sqlalchemy.exc import DBAPIError  # noqa: E402
from sqlalchemy.orm import Session  # noqa: E402

from jobsync_orm import CoordinationConfig, Job, OwnedSession, OwnershipLost  # noqa: E402
from jobsync_orm.coordinator.service import Coordinator  # noqa: E402
from jobsync_orm.coordinator.view import Ownership  # noqa: E402
from tests.chaos.model import Counter, Effect, Todo, lanes  # noqa: E402
from tests.chaos.settings import COORDINATION, IDLE_IN_TRANSACTION_SEC, LOCK_TIMEOUT_SEC  # noqa: E402

NODE, LIFE = os.environ["NODE"], int(os.environ["LIFE"])
SAMPLE_SEC = 1 / 15
IDLE_SEC = 0.1

log = os.open(os.environ["LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
stopping = threading.Event()


def tell(event: str, **more: object) -> None:
    """One line, in one write: a kill loses nothing that was said before."""
    os.write(log, (json.dumps({"e": event, "t": time.monotonic(), **more}) + "\n").encode())


def reach(point: Point) -> bool:
    """Stop here, if the nemesis asked for it, and say so."""
    if control.stop_at != point:
        return False
    control.stop_at = Point.NOWHERE
    tell("stop", point=point.name)
    os.kill(os.getpid(), signal.SIGSTOP)
    return True


def sample(job: Job) -> None:
    """Ask for every lane, again and again; each answer falls between the two times of its line."""
    while not stopping.wait(SAMPLE_SEC):
        begun = time.monotonic()
        bits = 0
        for token, lane in enumerate(lanes()):
            if job.can_claim_task(lane):
                bits |= 1 << token
        tell("yes", begun=begun, held=f"{bits:x}")


class Work:
    """The application: tasks of lanes this node owns, a few in each transaction."""

    def __init__(self, job: Job, engine: Engine) -> None:
        self.job = job
        self.engine = engine
        self.fenced = os.environ["FENCE"] == "on"
        self.random = random.Random(f"{os.environ['SEED']}/{NODE}/{LIFE}")
        self.ghost: tuple[int, int, str] | None = None  # backend, transaction, attempt of an unknown outcome

    def run(self) -> None:
        while not stopping.is_set():
            try:
                if self.ghost is not None:
                    self.lay()
                elif not self.attempt():
                    stopping.wait(IDLE_SEC)
            except DBAPIError as error:
                tell("database", why=str(error.orig).strip().splitlines()[:1])
                stopping.wait(IDLE_SEC)

    def attempt(self) -> bool:
        """One transaction; False if there was nothing to do."""
        name = uuid.uuid4().hex
        xid = backend = 0
        asked = False  # for the commit
        try:
            with self.session() as session:
                known = self.job.token_version, self.incarnation
                isolation = self.random.choice((*["READ COMMITTED"] * 4, "REPEATABLE READ"))
                connection = session.connection(execution_options={"isolation_level": isolation})
                if known != (self.job.token_version, self.incarnation):
                    return True  # which of the two the fence has taken is not known
                backend = connection.connection.dbapi_connection.info.backend_pid
                pending = select(Todo).where(Todo.owned_by(self.job), ~Todo.done).order_by(Todo.id).limit(12)
                found = session.scalars(pending).all()
                if not found:
                    return False
                todos = self.random.sample(found, min(len(found), self.random.choice((1, 1, 2, 3))))
                self.pass_by(Point.READ)
                self.think()
                xid = self.write(session, todos, name, *known)
                if self.random.random() < 0.2:
                    self.think()
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
        return True

    def session(self) -> Session:
        """Made in one of the two ways to make a fenced one; or not fenced."""
        if not self.fenced:
            return Session(self.engine)
        if self.random.random() < 0.3:
            return self.job.bind(Session(self.engine))
        return OwnedSession(self.engine, job=self.job)

    @property
    def incarnation(self) -> str:
        coordinator = self.job._coordinator
        return coordinator.incarnation if coordinator else ""

    def pass_by(self, point: Point) -> None:
        """Often, whoever was stopped works on for a while: its node may be back by then, and have the token again."""
        if reach(point):
            time.sleep(self.random.choice((0, 1, 2)))

    def think(self) -> None:
        time.sleep(self.random.choice((0, 0.01, 0.03, 0.1, 0.3)))

    def write(self, session: Session, todos: list[Todo], attempt: str, epoch: int, incarnation: str) -> int:
        """The effects of the tasks; returns the transaction's number."""
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
                }
            )
        way = self.random.choice(("flush", "flush", "bulk", "savepoint"))
        if way == "savepoint":
            # Writes that are taken back, before those that stand.
            with session.begin_nested() as savepoint:
                session.execute(update(Todo).where(Todo.id == todos[0].id).values(done=True))
                savepoint.rollback()
        if way == "bulk":
            session.execute(update(Todo).where(Todo.id.in_([todo.id for todo in todos])).values(done=True))
            session.execute(insert(Effect), effects)
        else:
            for todo in todos:
                todo.done = True
            session.add_all(Effect(**effect) for effect in effects)
        session.flush()
        return session.execute(text("SELECT pg_current_xact_id()::text::bigint")).scalar_one()

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


def switch_off_the_lease() -> None:
    """What this node once held it goes on saying yes to, whatever its clock and its connection say."""
    Coordinator._valid_until = lambda self: float("inf")  # type: ignore[method-assign]
    Ownership.doubt = Ownership.deny = lambda self: None  # type: ignore[method-assign]


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    url = os.environ["URL"]
    if os.environ["LEASE"] == "ignored":
        switch_off_the_lease()
    options = f"-c lock_timeout={LOCK_TIMEOUT_SEC}s -c idle_in_transaction_session_timeout={IDLE_IN_TRANSACTION_SEC}s"
    engine = create_engine(
        url,
        pool_size=1,
        max_overflow=1,
        connect_args={"application_name": f"chaos {NODE}", "options": options, "connect_timeout": 3},
    )
    send_commit = engine.dialect.do_commit

    def do_commit(connection: Any) -> None:
        reach(Point.FENCED)
        send_commit(connection)

    engine.dialect.do_commit = do_commit  # type: ignore[method-assign]
    tell("start", pid=os.getpid())
    while not stopping.is_set():
        job = Job(NODE, CoordinationConfig(url=url, **COORDINATION), wait_on_enter=30)
        try:
            job.start()
        except Exception as error:
            tell("no start", why=f"{type(error).__name__}: {error}")
            job.stop()
            stopping.wait(0.5)
            continue
        tell("ready")
        sampler = threading.Thread(target=sample, args=(job,), daemon=True)
        sampler.start()
        try:
            Work(job, engine).run()
        finally:
            stopping.set()
            sampler.join(5)
            job.stop()
    engine.dispose()
    tell("end")


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:
        tell("broken", why=f"{type(error).__name__}: {error}")
        raise
