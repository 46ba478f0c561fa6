"""The story of the demo, from an empty database to the verdict.

What happens is triggered by the progress of the work, not by the clock: at 15 % the leader is killed, at 30 % a worker
joins, at 45 % one is paused in the middle of a file, and goes on after the others have taken over its tokens, at 75 %
one leaves; none of it before the cluster has recovered from what came before. A cluster has recovered when the live
workers own all tokens, in even shares, and none is on the move. How long that took is measured by the database's clock:
from the SIGKILL, from the moment the new worker registered, from the SIGSTOP, from the SIGTERM; until the last token
got its new owner.
"""

from __future__ import annotations

import datetime
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from psycopg.errors import DuplicateSchema
from sqlalchemy import URL, Engine, create_engine, insert, select, text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import Session
from sqlalchemy.schema import CreateSchema, DropSchema

from jobsync_orm import CoordinationConfig, embedded, migrate
from jobsync_orm.demo.cluster import Snapshot, clock, observe
from jobsync_orm.demo.counting import source_files, standard_library
from jobsync_orm.demo.fleet import Fleet, Member, WorkerError
from jobsync_orm.demo.model import SCHEMA, Base, RefusedCommit, SourceFile
from jobsync_orm.demo.proof import Recount, prove
from jobsync_orm.demo.view import View, make_view
from jobsync_orm.demo.worker import AT_WORK, HEARTBEAT_TIMEOUT
from jobsync_orm.exceptions import ConfigurationError

__all__ = ["Event", "run"]

# Seconds between two looks, and seconds without any progress after which the demo gives up.
LOOK = 0.2
PATIENCE = 90


@dataclass
class Event:
    """One change of the cluster.

    Attributes
    ----------
    what : str
        What happened, to whom.
    before : Snapshot
        The cluster just before.
    since : datetime, optional
        When it happened; None until a joining worker has registered.
    newcomer : str, optional
        The worker that joins.
    latecomer : str, optional
        The worker that goes on after its pause, and whose commit has to be refused.
    moved : int
        Tokens with another owner than before, once the cluster has recovered.
    seconds : float
        Until it had recovered.
    """

    what: str
    before: Snapshot
    since: datetime.datetime | None = None
    newcomer: str | None = None
    latecomer: str | None = None
    moved: int = 0
    seconds: float = 0.0


def run(url: str | URL | None = None, workers: int = 3, files: int | None = None, seconds: float = 20) -> int:
    """Play the demo and judge it.

    Parameters
    ----------
    url : str or URL, optional
        Database to play in, in a schema of its own that is removed afterwards. None starts an embedded PostgreSQL in a
        temporary folder.
    workers : int
        Workers at the start, at least 2.
    files : int, optional
        Number of files; None takes all of the standard library.
    seconds : float
        Least duration of the work with ``workers`` workers: they are slowed down to it, so that there is something to
        see on a fast machine.

    Returns
    -------
    int
        0 if the proof holds, else 1.

    Raises
    ------
    ConfigurationError
        There is nothing to work on, or the database holds the demo's schema already.
    EmbeddedUnavailable
        The embedded PostgreSQL does not start.
    """
    root = standard_library()
    paths = source_files(root, files)
    if not paths:
        raise ConfigurationError(f"{root} holds no source files: this Python's library is packed or was removed")
    with _signals() as ignore_signals, ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="jobsync-demo-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            view = make_view()
            engine = _database(url, folder, stack, view)
            _make_tables(engine, paths)
            view.say(f"{len(paths):,} source files of {root}, one row each in {SCHEMA}.source_file")
            usual = CoordinationConfig.heartbeat_timeout_sec
            view.say(f"here a worker that hangs is replaced after {HEARTBEAT_TIMEOUT} s; by default it is {usual} s")
            recount = stack.enter_context(Recount(root, paths, folder / "recount.json"))
            fleet = stack.enter_context(Fleet(engine.url, seconds * workers / len(paths), folder))
            session = stack.enter_context(Session(engine))
            try:
                with view:
                    events = _play(session, fleet, workers, view)
            except WorkerError as failure:
                view.say(f"FAILED: {failure}")
                return 1
            return _judge(session, recount, events, view)
        finally:
            # A second Ctrl-C must not keep the first from cleaning up.
            ignore_signals()


def _database(url: str | URL | None, folder: Path, stack: ExitStack, view: View) -> Engine:
    """An engine for a database in which the demo's schema is new, and is removed in the end."""
    started = time.monotonic()
    if url is None:
        stack.callback(embedded.stop, folder / "pg")
        url = embedded.server_url(folder / "pg")
        view.say(f"PostgreSQL started in {folder}/pg in {time.monotonic() - started:.1f} s")
    engine = create_engine(CoordinationConfig(url=url).sqlalchemy_url())
    stack.callback(engine.dispose)
    try:
        with engine.begin() as connection:
            connection.execute(CreateSchema(SCHEMA))
    except ProgrammingError as error:
        if not isinstance(error.orig, DuplicateSchema):
            raise
        raise ConfigurationError(
            f"schema {SCHEMA} is in {engine.url.render_as_string()} already: another demo runs there, or one was "
            f"killed; if none runs, DROP SCHEMA {SCHEMA} CASCADE"
        ) from error
    stack.callback(_drop_schema, engine)
    return engine


def _make_tables(engine: Engine, paths: list[str]) -> None:
    migrate.upgrade(engine, schema=SCHEMA)
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(insert(SourceFile), [{"path": path} for path in paths])


def _play(session: Session, fleet: Fleet, workers: int, view: View) -> list[Event]:
    """Let the workers do all files, and let things happen meanwhile."""
    acts = [(0.15, _kill), (0.3, _join), (0.45, _pause), (0.45, _resume), (0.75, _leave)]
    events: list[Event] = []
    happening: Event | None = Event(f"{workers} workers start", observe(session), clock(session))
    view.say(f"{workers} workers start: {', '.join(fleet.start().name for _ in range(workers))}")
    moved_on, last = time.monotonic(), -1
    while True:
        fleet.check()
        now = observe(session)
        view.show(now, fleet.members)
        if happening is not None and _recovered(happening, now, fleet) and _refused(session, happening):
            events.append(happening)
            view.say(
                f"        all owned, in even shares, after {happening.seconds:.2f} s; {happening.moved:,} tokens moved"
            )
            for refused in session.scalars(select(RefusedCommit).where(RefusedCommit.worker == happening.latecomer)):
                view.say(
                    f"        what {refused.worker} had begun before, {refused.path}, was refused when it was "
                    f"committed: {refused.owner or 'nobody'} had the file by then"
                )
            session.rollback()
            happening = None
        if happening is None and acts and now.files_done >= acts[0][0] * now.files:
            _, act = acts.pop(0)
            happening = act(session, fleet, now)
            view.say(f"{100 * now.files_done // now.files:4} %  {happening.what}")
        elif happening is None and now.files_done == now.files:
            break
        if now.files_done != last:
            moved_on, last = time.monotonic(), now.files_done
        if time.monotonic() - moved_on > PATIENCE:
            raise WorkerError(f"no file was finished for {PATIENCE} s; tokens: {dict(now.tokens)}")
        time.sleep(LOOK)
    fleet.finish()
    view.show(observe(session), fleet.members)
    return events


def _kill(session: Session, fleet: Fleet, now: Snapshot) -> Event:
    leader = next(iter(now.registered))
    member = next(member for member in fleet.working if member.name == leader)
    since = clock(session)
    fleet.kill(member)
    return Event(f"{member.name}, the leader, is killed (SIGKILL)", now, since)


def _join(session: Session, fleet: Fleet, now: Snapshot) -> Event:
    member = fleet.start()
    return Event(f"{member.name} joins", now, newcomer=member.name)


def _pause(session: Session, fleet: Fleet, now: Snapshot) -> Event:
    """Stop a worker that has begun a file and not stored it."""
    member = fleet.working[0]
    while True:
        since = clock(session)
        fleet.pause(member)
        if _is_at_work(session, member) or observe(session).files_done == now.files:
            return Event(f"{member.name} is paused in the middle of a file (SIGSTOP)", now, since)
        fleet.resume(member)
        time.sleep(LOOK / 4)


def _is_at_work(session: Session, member: Member) -> bool:
    """Whether a paused worker has read its file's row, and not sent anything since."""
    ask = text("SELECT state FROM pg_stat_activity WHERE application_name = :name AND datname = current_database()")
    with session.begin():
        return session.scalars(ask, {"name": AT_WORK.format(member.name)}).all() == ["idle in transaction"]


def _resume(session: Session, fleet: Fleet, now: Snapshot) -> Event:
    member = next(member for member in fleet.members if member.state == "paused")
    latecomer = member.name if _is_at_work(session, member) else None
    what = f"{member.name} goes on after {fleet.resume(member, at_least=HEARTBEAT_TIMEOUT):.1f} s (SIGCONT)"
    return Event(what, now, newcomer=member.name, latecomer=latecomer)


def _refused(session: Session, event: Event) -> bool:
    """Whether the commit that must not succeed has been refused, if ``event`` is about one."""
    if event.latecomer is None:
        return True
    with session.begin():
        found = session.scalars(select(RefusedCommit.id).where(RefusedCommit.worker == event.latecomer))
        return found.first() is not None


def _leave(session: Session, fleet: Fleet, now: Snapshot) -> Event:
    member = fleet.working[0]
    since = clock(session)
    fleet.ask_to_leave(member)
    return Event(f"{member.name} leaves (SIGTERM)", now, since)


def _recovered(event: Event, now: Snapshot, fleet: Fleet) -> bool:
    """Note when, and how many tokens moved, if the cluster has recovered from ``event``."""
    if event.newcomer is not None:
        event.since = now.registered.get(event.newcomer)
    if event.since is None or not now.is_settled(member.name for member in fleet.working):
        return False
    event.moved = now.moved_since(event.before)
    event.seconds = (now.last_move - event.since).total_seconds()
    return True


def _judge(session: Session, recount: Recount, events: list[Event], view: View) -> int:
    view.say("proof, against one process that has counted everything by itself, without the library:")
    proof = prove(session, recount.counts())
    for finding in proof.findings:
        view.say(f"  {finding}")
    for event in events[1:]:
        share = f"with {event.before.files_done} of {event.before.files} files done"
        view.say(f"  {event.what} {share}: {event.moved:,} tokens moved, recovered in {event.seconds:.2f} s")
        if event.before.files_done == event.before.files:
            proof.faults.append(f"{event.what} only after all files were done: use more files or seconds")
    for fault in proof.faults:
        view.say(f"  FAULT: {fault}")
    view.say("FAILED" if proof.faults else "PROVED: every file done exactly once, none missing, totals equal")
    return 1 if proof.faults else 0


def _drop_schema(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(DropSchema(SCHEMA, cascade=True))


@contextmanager
def _signals() -> Iterator[Callable[[], None]]:
    """SIGTERM and a closed terminal end the demo as Ctrl-C does; gives a function that has all three ignored."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def ignore() -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)

    try:
        yield ignore
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
