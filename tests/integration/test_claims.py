"""Claims: who gets one, what ends it, and what a completion is worth."""

from __future__ import annotations

import asyncio
import signal
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import URL, Engine, create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from jobsync_orm import (
    Claim,
    ClaimEnded,
    ClaimRefused,
    ConfigurationError,
    CoordinationConfig,
    Job,
    OwnershipLost,
    Task,
    UnstableTaskId,
)
from jobsync_orm.claim_book import ClaimBook
from jobsync_orm.coordinator.clock import now
from jobsync_orm.coordinator.statements import Statements
from jobsync_orm.naming import Names
from tests.integration.claiming import answer_lost, audit, claims, counted, give_away, nothing_answers, run
from tests.integration.cluster import QUICK, Cluster, wait_for
from tests.integration.coordinator.backstage import add_node, open_session
from tests.integration.relay import Relay


@pytest.fixture
def config(engine: Engine) -> CoordinationConfig:
    """The job's statements and the test's go through one engine, so that they can be counted and lost."""
    return CoordinationConfig(url=engine.url, **QUICK)


def claim(engine: Engine, task: str, token: int, node: str, incarnation: str) -> None:
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO sync_claim (task_id, token_id, node, incarnation, epoch, claimed_at)"
                " VALUES (:task, :token, :node, CAST(:incarnation AS uuid), 1, clock_timestamp())"
            ),
            {"task": task, "token": token, "node": node, "incarnation": incarnation},
        )


def test_claims_of_an_earlier_life_of_the_name_are_void(config: CoordinationConfig, engine: Engine) -> None:
    """Killed while it worked on a task, and started again before anybody evicted it."""
    with engine.begin() as connection:
        life = add_node(connection, "w1")
    job = Job("w1", config)
    claim(engine, "t", job.task_to_token("t"), "w1", life)
    with job:
        assert claims(engine) == []
        assert job.add_task("t")
        assert claims(engine) == [("t", "w1", job._coordinator.incarnation)]  # type: ignore[union-attr]


@pytest.mark.parametrize("node", ["w1", "ghost", "resting"])
def test_a_claim_that_arrives_after_its_node_has_gone_is_taken_over(
    config: CoordinationConfig, engine: Engine, node: str
) -> None:
    """The server goes on with a statement whose sender was killed and evicted meanwhile."""
    with Job("w1", config) as job:
        life = str(uuid.uuid4())
        if node == "resting":
            with engine.begin() as connection:
                life = add_node(connection, node, ordinal=99, state="away", rejoin_grace_sec=3600)
        for task in ("a", "b"):
            claim(engine, task, job.task_to_token(task), node, life)
        assert job.set_claim("a") == ["a"]
        assert job.add_task("b")
        mine = job._coordinator.incarnation  # type: ignore[union-attr]
        assert claims(engine) == [("a", "w1", mine), ("b", "w1", mine)]


def test_a_claim_of_a_live_node_is_respected(config: CoordinationConfig, engine: Engine) -> None:
    with Job("w1", config) as job:
        with engine.begin() as connection:
            life = add_node(connection, "w2", ordinal=99, heartbeat_timeout_sec=3600)
        claim(engine, "t", job.task_to_token("t"), "w2", life)
        assert job.set_claim("t") == []
        assert claims(engine) == [("t", "w2", life)]


# -- getting one -----------------------------------------------------------------------------------------------


def test_a_block_completes_its_claim_with_an_audit_row(job: Job, engine: Engine) -> None:
    with job.claim_task(Task("t", "a name")) as claim:
        assert (claim.task_id, claim.token) == ("t", job.task_to_token("t"))
        assert claims(engine) == [("t", "w1", job._coordinator.incarnation)]  # type: ignore[union-attr]
        with engine.connect() as connection:
            stored = connection.execute(text("SELECT fence, epoch FROM sync_claim")).one()
        assert stored == (claim.fence, claim.epoch)
        assert audit(engine) == []
    assert claims(engine) == []
    assert audit(engine) == [("w1", "t", claim.token, claim.epoch)]
    assert job.get_audit() == [{"node": "w1", "task_id": "t"}]


def test_an_error_in_the_block_releases_the_claim(job: Job, engine: Engine) -> None:
    with pytest.raises(ZeroDivisionError), job.claim_task("t"):
        raise ZeroDivisionError
    assert (claims(engine), audit(engine)) == ([], [])
    with job.claim_task("t"):
        pass


def refused(job: Job, task: object) -> tuple[str, str | None]:
    with pytest.raises(ClaimRefused, match=r".") as info:
        job.claim_task(task)
    return info.value.reason, info.value.holder


def test_a_refusal_names_its_reason(config: CoordinationConfig, engine: Engine) -> None:
    job = Job("w1", config)
    assert refused(job, "t") == ("not running", None)
    with job:
        token = job.task_to_token("t")
        with engine.begin() as connection:
            life = add_node(connection, "w2", ordinal=99, heartbeat_timeout_sec=3600)
        claim(engine, "t", token, "w2", life)
        run(engine, "UPDATE sync_claim SET epoch = 0")  # as set_claim writes it for another's token
        assert refused(job, "t") == ("claimed", "w2")
        run(engine, "DELETE FROM sync_claim")
        held = job.claim_task("t")
        assert refused(job, "t") == ("claimed here", "w1")
        assert held.release()
        assert job.add_task("t")
        assert refused(job, "t") == ("claimed here", "w1")
        job.write_audit()
        job.claim_task("t").release()
    assert refused(job, "t") == ("not running", None)


def test_a_refusal_names_the_owner_of_the_token(job: Job, engine: Engine) -> None:
    """This node has not heard of it yet; the database decides."""
    token = job.task_to_token("t")
    run(engine, "UPDATE sync_token SET next_node = 'w3', next_epoch = 99 WHERE token_id = :token", token=token)
    assert refused(job, "t") == ("moving", "w3")
    run(engine, "UPDATE sync_token SET next_node = '' WHERE token_id = :token", token=token)
    assert refused(job, "t") == ("moving", None)
    run(engine, "UPDATE sync_token SET next_node = NULL, node = 'w3' WHERE token_id = :token", token=token)
    assert refused(job, "t") == ("not owned", "w3")
    run(engine, "UPDATE sync_token SET node = NULL WHERE token_id = :token", token=token)
    assert refused(job, "t") == ("not owned", None)
    later = "UPDATE sync_token SET node = 'w1', epoch = 1000000 WHERE token_id = :token"
    run(engine, later, token=token)
    assert refused(job, "t") == ("moving", "w1")
    assert claims(engine) == []


def test_many_in_one_statement(job: Job, own_engine: Engine, engine: Engine) -> None:
    with counted(own_engine) as sent:
        got = job.claim_tasks([3, Task(1), 2, "1", 3])
        assert [claim.task_id for claim in got] == [3, 1, 2]
        assert len({claim.fence for claim in got}) == 3
        assert job.claim_tasks(n for n in range(5)) != []
        assert job.claim_tasks([]) == []
        job.complete_claims([*got, got[0]])
        job.complete_claims([])
    assert len(sent) == 3
    assert [row[1] for row in audit(engine)] == ["3", "1", "2"]
    with pytest.raises(ConfigurationError, match="is one task"):
        job.claim_tasks("abc")
    with pytest.raises(ConfigurationError, match="is no Claim"):
        job.complete_claims(["abc"])  # type: ignore[list-item]


def test_of_many_those_of_this_node(config: CoordinationConfig) -> None:
    with Job("w1", config) as one, Job("w2", config) as two:
        wait_for(lambda: len(one.my_tokens) == len(two.my_tokens) == 5000, "they share")
        first, second = one.claim_tasks(range(100)), two.claim_tasks(range(100))
        assert [c.task_id for c in first] == [n for n in range(100) if one.can_claim_task(n)]
        assert [c.task_id for c in second] == [n for n in range(100) if two.can_claim_task(n)]
        assert len(first) + len(second) == 100
        assert refused(one, second[0].task_id) == ("not owned", "w2")


def test_threads_of_one_process_exclude_each_other(job: Job) -> None:
    together = threading.Barrier(8)

    def attempt(_: int) -> Claim | str:
        together.wait(60)
        try:
            return job.claim_task("t")
        except ClaimRefused as refused:
            return refused.reason

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(attempt, range(8)))
    assert sorted(map(str, (r for r in results if isinstance(r, str)))) == ["claimed here"] * 7


@pytest.mark.parametrize("bulk", [False, True])
def test_a_claim_whose_answer_was_lost_is_asked_for_again(
    job: Job, own_engine: Engine, engine: Engine, bulk: bool
) -> None:
    with answer_lost(own_engine):
        claim = job.claim_tasks(["t"])[0] if bulk else job.claim_task("t")
    assert len(claims(engine)) == 1
    claim.complete()
    assert [row[1] for row in audit(engine)] == ["t"]


# -- ending it -------------------------------------------------------------------------------------------------


def test_a_completion_whose_answer_was_lost_counts_once(job: Job, own_engine: Engine, engine: Engine) -> None:
    claim = job.claim_task("t")
    with answer_lost(own_engine):
        claim.complete()
    assert [row[1] for row in audit(engine)] == ["t"]
    with pytest.raises(ClaimEnded):
        claim.complete()
    assert claim.release() is False


@pytest.mark.parametrize("how", ["moved", "came back", "released", "evicted", "joined anew"])
def test_a_claim_that_was_lost_is_not_completed(job: Job, engine: Engine, how: str) -> None:
    claim, kept = job.claim_task("t"), job.claim_task("u")
    owner, lost = "w1", [claim]
    if how == "moved":
        give_away(engine, claim.token, "w9")
        owner = "w9"
    elif how == "came back":
        give_away(engine, claim.token, "w9")
        give_away(engine, claim.token, "w1")
    elif how == "released":
        assert job.release_claim("t") == ["t"]
    else:
        dead = "state = 'away'" if how == "evicted" else f"incarnation = '{uuid.uuid4()}'"
        run(engine, f"UPDATE sync_node SET {dead} WHERE name = 'w1'")
        lost = [claim, kept]
    with pytest.raises(OwnershipLost) as info:
        job.complete_claims([kept, claim])
    assert info.value.tokens == tuple(sorted(c.token for c in lost))
    assert info.value.owners == {c.token: owner for c in lost}
    assert [row[1] for row in audit(engine)] == ([] if kept in lost else ["u"]), "those still held are completed"
    assert [row[0] for row in claims(engine)] == [], "nothing is left in the way of the next owner"
    with pytest.raises(ClaimEnded):
        claim.complete()


def test_an_ended_claim_does_not_end_the_next_one(job: Job, engine: Engine) -> None:
    first = job.claim_task("t")
    assert job.release_claim("t") == ["t"]
    second = job.claim_task("t")
    with pytest.raises(OwnershipLost):
        first.complete()
    third = job.claim_task("u")
    job.release_claim("u")
    fourth = job.claim_task("u")
    assert third.release() is False
    assert sorted(row[0] for row in claims(engine)) == ["t", "u"]
    assert refused(job, "t") == refused(job, "u") == ("claimed here", "w1")
    job.complete_claims([second, fourth])
    assert [row[1] for row in audit(engine)] == ["t", "u"]


@pytest.mark.parametrize("ending", ["success", "error", "in a transaction"])
def test_a_block_that_ends_while_the_database_is_away(
    job: Job, own_engine: Engine, engine: Engine, ending: str
) -> None:
    """The task is not this process's for good: it is claimed anew, under a greater number."""
    first = job.claim_task("t")

    def block() -> None:
        with first:
            if ending == "error":
                raise KeyError("its own")
            if ending == "in a transaction":
                with Session(own_engine) as session:
                    first.complete(session)

    with nothing_answers(own_engine), pytest.raises(KeyError if ending == "error" else OperationalError):
        block()
    with job.claim_task("t") as second:
        assert second.fence > first.fence
    with pytest.raises((ClaimEnded, OwnershipLost)):
        first.complete()
    assert [row[1] for row in audit(engine)] == ["t"]
    assert claims(engine) == []


def test_a_block_whose_claim_was_lost_raises(job: Job, engine: Engine) -> None:
    with pytest.raises(OwnershipLost), job.claim_task("t") as claim:
        give_away(engine, claim.token, "w9")
    assert audit(engine) == []


def test_a_completion_waits_for_nobody_but_a_move_under_way(job: Job, engine: Engine) -> None:
    """The row of the token is locked by the statement that moves it: the completion sees what comes of it."""
    claim = job.claim_task("t")
    with ThreadPoolExecutor(1) as pool, engine.connect() as mover:
        mover.execute(text("SELECT 1 FROM sync_token WHERE token_id = :t FOR UPDATE"), {"t": claim.token})
        completing = pool.submit(claim.complete)
        with engine.connect() as looking:
            wait_for(lambda: looking.execute(WAITING).scalar(), "it waits")
        mover.execute(text("UPDATE sync_token SET node = 'w9' WHERE token_id = :t"), {"t": claim.token})
        mover.commit()
        with pytest.raises(OwnershipLost) as info:
            completing.result(10)
    assert info.value.owners == {claim.token: "w9"}
    assert audit(engine) == []


# -- in the transaction of the work ----------------------------------------------------------------------------


@pytest.fixture
def work(engine: Engine) -> Callable[[], list[str]]:
    """A table of the application, and what is in it."""
    run(engine, "CREATE TABLE work (name text)")

    def done() -> list[str]:
        with engine.connect() as connection:
            return list(connection.execute(text("SELECT name FROM work ORDER BY 1")).scalars())

    return done


ADD = text("INSERT INTO work VALUES ('t')")

# Backends that wait for a lock in this database; a row's lock does not say itself where it is.
WAITING = text("""
    SELECT count(*) FROM pg_locks w WHERE NOT granted AND EXISTS (SELECT 1 FROM pg_locks h WHERE h.pid = w.pid
        AND h.database = (SELECT oid FROM pg_database WHERE datname = current_database()))""")


@pytest.mark.parametrize("scoped", [False, True])
@pytest.mark.parametrize("bound", [False, True])
def test_work_and_completion_are_committed_together(
    job: Job, own_engine: Engine, engine: Engine, work: Callable[[], list[str]], scoped: bool, bound: bool
) -> None:
    make = sessionmaker(engine)
    with job.claim_task("t") as claim:
        session: Any = scoped_session(make) if scoped else make()
        if bound:
            job.bind(session)
        with session.begin():
            session.execute(ADD)
            claim.complete(session)
            assert (work(), audit(engine), len(claims(engine))) == ([], [], 1)
        assert (work(), [row[1] for row in audit(engine)], claims(engine)) == (["t"], ["t"], [])
        session.close()
        with counted(own_engine) as sent:
            claim.__exit__(None, None, None)
        assert sent == [], "it has ended"
        with pytest.raises(ClaimEnded):
            claim.complete()


def test_a_rollback_takes_the_completion_back(job: Job, engine: Engine, work: Callable[[], list[str]]) -> None:
    claim = job.claim_task("t")
    with Session(engine) as session:
        session.execute(ADD)
        claim.complete(session)
        session.rollback()
        assert (work(), audit(engine), len(claims(engine))) == ([], [], 1)
        session.execute(ADD)
        claim.complete(session)
        session.commit()
    assert (work(), [row[1] for row in audit(engine)], claims(engine)) == (["t"], ["t"], [])


@pytest.mark.parametrize("how", ["rollback", "savepoint", "close"])
def test_a_block_ends_what_a_rollback_has_left(job: Job, engine: Engine, how: str) -> None:
    with job.claim_task("t") as claim, Session(engine) as session:
        if how == "savepoint":
            savepoint = session.begin_nested()
            claim.complete(session)
            savepoint.rollback()
            session.commit()
        else:
            claim.complete(session)
            (session.rollback if how == "rollback" else session.close)()
        session.execute(text("SELECT 1"))
        session.commit()  # a later transaction has nothing to do with it
        assert len(claims(engine)) == 1
    assert (claims(engine), audit(engine)) == ([], [])


@pytest.mark.parametrize("outcome", ["commit", "rollback"])
@pytest.mark.parametrize("mode", ["rollback_only", "create_savepoint"])
def test_a_session_in_a_transaction_of_someone_else(job: Job, engine: Engine, mode: Any, outcome: str) -> None:
    """Its commit commits nothing: what becomes of the claim is known when that transaction has ended."""
    with job.claim_task("t") as claim, engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode=mode) as session:
            claim.complete(session)
            session.commit()
        getattr(outer, outcome)()
    assert claims(engine) == []
    assert len(audit(engine)) == (outcome == "commit")


def test_a_released_savepoint_is_kept(job: Job, own_engine: Engine, engine: Engine) -> None:
    with job.claim_task("t") as claim, Session(engine) as session, session.begin(), session.begin_nested():
        claim.complete(session)
    assert ([row[1] for row in audit(engine)], claims(engine)) == (["t"], [])
    assert "completed>" in repr(claim)


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_lost_in_a_transaction(
    job: Job, engine: Engine, work: Callable[[], list[str]], level: str, bound: bool
) -> None:
    """At the latest as it commits: under the stricter levels it sees the state of its snapshot until then."""
    claim = job.claim_task("t")

    def finish() -> None:
        claim.complete(session)
        session.commit()

    with Session(engine.execution_options(isolation_level=level)) as session:
        if bound:
            job.bind(session)
        session.execute(ADD)
        give_away(engine, claim.token, "w9")
        with pytest.raises(OwnershipLost) as info:
            finish()
    assert (info.value.tokens, info.value.owners) == ((claim.token,), {claim.token: "w9"})
    assert (work(), audit(engine)) == ([], [])
    assert claim.release()


def test_lost_between_the_completion_and_the_commit(job: Job, engine: Engine, work: Callable[[], list[str]]) -> None:
    """Without a fence the token is held until the transaction ends; with one, the commit is refused."""
    claim = job.claim_task("t")
    move = text("SELECT token_id FROM sync_token WHERE token_id = :token FOR UPDATE SKIP LOCKED")
    with Session(engine) as session, session.begin(), engine.connect() as mover:
        claim.complete(session)
        assert mover.execute(move, {"token": claim.token}).all() == []
    claim = job.claim_task("t")
    with Session(engine) as session:
        job.bind(session)
        session.execute(ADD)
        claim.complete(session)
        with engine.connect() as mover:
            assert len(mover.execute(move, {"token": claim.token}).all()) == 1
            mover.rollback()
        give_away(engine, claim.token, "w9")
        with pytest.raises(OwnershipLost):
            session.commit()
    assert (work(), len(audit(engine))) == ([], 1)


def test_of_many_none_if_one_is_lost_in_a_transaction(job: Job, engine: Engine) -> None:
    got = job.claim_tasks(["t", "u", "v"])
    give_away(engine, got[1].token, "w9")
    with Session(engine) as session:
        with pytest.raises(OwnershipLost) as info:
            job.complete_claims(got, session)
        session.commit()  # even so
    assert info.value.tokens == (got[1].token,)
    assert (audit(engine), len(claims(engine))) == ([], 3)
    with Session(engine) as session:
        job.complete_claims([got[0], got[2]], session)
        session.commit()
    assert [row[1] for row in audit(engine)] == ["t", "v"]


def test_a_commit_whose_answer_was_lost_is_recognised(job: Job, engine: Engine) -> None:
    claim = job.claim_task("t")
    with Session(engine) as session:
        claim.complete(session)
        session.connection().connection.commit()  # type: ignore[union-attr]
        session.rollback()  # as after a broken connection
    with Session(engine) as session, pytest.raises(ClaimEnded, match="a transaction before this one"):
        claim.complete(session)
    assert len(audit(engine)) == 1


def test_a_claim_held_by_an_open_transaction_is_refused_at_once(job: Job, engine: Engine) -> None:
    """A worker that is paused in the middle of its transaction stops nobody, itself included."""
    claim = job.claim_task("t")
    with Session(engine) as session:
        claim.complete(session)
        assert refused(job, "t") == ("claimed", "w1")
        assert job.set_claim("t") == []
        assert job.release_claim("t") == []
        assert claim.release() is False
        session.commit()
    assert [row[1] for row in audit(engine)] == ["t"]
    job.claim_task("t").release()


def test_what_is_no_session(job: Job) -> None:
    claim = job.claim_task("t")
    with pytest.raises(ConfigurationError, match="give a Session"):
        claim.complete("session")  # type: ignore[arg-type]
    claim.complete()


# -- asynchronous ----------------------------------------------------------------------------------------------


def test_whether_a_task_may_be_claimed_is_waited_for_beside_the_event_loop(database: URL) -> None:
    relay = Relay(database)
    job = Job("w1", CoordinationConfig(url=relay.url, **{**QUICK, "certainty_wait_sec": 20}))  # type: ignore[arg-type]

    async def main() -> None:
        assert await job.can_claim_task_async(Task("t"))
        relay.cut()  # refused, so it cannot know
        while now() < job._coordinator.ownership.view.valid_until:  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
        asking = asyncio.create_task(job.can_claim_task_async("t"))
        while not job._coordinator.ownership._waiting:  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
        relay.heal()  # by the very loop that waits for the answer
        assert await asking

    try:
        with job:
            asyncio.run(asyncio.wait_for(main(), 60))
            job._coordinator.ownership.clear()  # type: ignore[union-attr]
            assert not asyncio.run(job.can_claim_task_async("t"))
        assert not asyncio.run(job.can_claim_task_async("t"))
        assert asyncio.run(Job("standalone").can_claim_task_async("t"))
        with pytest.raises(UnstableTaskId):
            asyncio.run(Job("standalone").can_claim_task_async(object()))
    finally:
        relay.close()


def test_async(job: Job, engine: Engine, database: URL, work: Callable[[], list[str]]) -> None:
    async def main() -> None:
        pool = create_async_engine(database)
        async with await job.claim_task_async("plain"):
            pass
        with pytest.raises(ZeroDivisionError):
            async with await job.claim_task_async("error"):
                raise ZeroDivisionError
        async with await job.claim_task_async("t") as claim, AsyncSession(pool) as session:
            with pytest.raises(ConfigurationError, match=r"await complete_async\(session\)"):
                claim.complete(session)  # type: ignore[arg-type]
            await session.execute(ADD)
            await claim.complete_async(session)
            await session.commit()
        got = await job.claim_tasks_async(["u", "v", "w"])
        async with AsyncSession(pool) as session:
            job.bind(session)
            await job.complete_claims_async(got[:1], session)
            await session.commit()
        await got[1].complete_async()
        assert await got[2].release_async()
        with pytest.raises(ClaimRefused):
            async with await job.claim_task_async("x"):
                await job.claim_task_async("x")
        await pool.dispose()

    asyncio.run(main())
    assert [row[1] for row in audit(engine)] == ["plain", "t", "u", "v"]
    assert (work(), claims(engine)) == (["t"], [])


def test_cancelled_while_it_claims(job: Job, engine: Engine) -> None:
    token = job.task_to_token("t")

    async def main() -> None:
        with engine.connect() as mover, engine.connect() as looking:
            mover.execute(text("SELECT 1 FROM sync_token WHERE token_id = :token FOR UPDATE"), {"token": token})
            claiming = asyncio.create_task(job.claim_task_async("t"))
            while not looking.execute(WAITING).scalar():
                await asyncio.sleep(0.01)
            claiming.cancel()
            await asyncio.sleep(0)
            mover.rollback()
            with pytest.raises(asyncio.CancelledError):
                await claiming

    asyncio.run(asyncio.wait_for(main(), 20))
    assert claims(engine) == []
    job.claim_task("t").release()


# -- fencing numbers -------------------------------------------------------------------------------------------


def test_the_number_is_drawn_after_the_token_is_locked(job: Job, engine: Engine) -> None:
    """Drawn before, it would be less than that of an owner in between."""
    token = job.task_to_token("t")
    with ThreadPoolExecutor(1) as pool, engine.connect() as mover, engine.connect() as looking:
        mover.execute(text("SELECT 1 FROM sync_token WHERE token_id = :token FOR UPDATE"), {"token": token})
        claiming = pool.submit(job.claim_task, "t")
        wait_for(lambda: looking.execute(WAITING).scalar(), "it waits for the token")
        meanwhile = looking.execute(text("SELECT nextval(pg_get_serial_sequence('sync_claim', 'fence'))")).scalar_one()
        mover.rollback()
        assert claiming.result(10).fence > meanwhile


def test_numbers_only_grow_while_a_token_changes_hands(engine: Engine, database: URL) -> None:
    """Two owners, two connections each, and a mover: a claim asked for after another was given is greater."""
    with engine.begin() as connection:
        lives = {node: add_node(connection, node, heartbeat_timeout_sec=3600, ordinal=n) for n, node in enumerate("ab")}
    token, most, guard = 7, [0], threading.Lock()
    run(engine, "UPDATE sync_token SET node = 'a', epoch = 1 WHERE token_id = :token", token=token)
    given: dict[str, int] = dict.fromkeys("ab", 0)
    over = threading.Event()

    def claimer(node: str, completes: bool) -> None:
        mine = create_engine(database)
        book = ClaimBook(mine, Names(), node)
        try:
            while not over.is_set():
                with guard:
                    before = most[0]
                for claimed in book.claim({"t": token}, lives[node], 10**9):
                    with guard:
                        assert claimed.fence > before
                        most[0] = max(most[0], claimed.fence)
                        given[node] += 1
                    (book.complete if completes else book.release)([claimed])
        finally:
            mine.dispose()

    def mover() -> None:
        moved = text(
            "UPDATE sync_token t SET node = CASE t.node WHEN 'a' THEN 'b' ELSE 'a' END, epoch = t.epoch + 1 FROM"
            " (SELECT ctid FROM sync_token WHERE token_id = :token FOR UPDATE SKIP LOCKED) f WHERE t.ctid = f.ctid"
        )
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            while not over.is_set():
                connection.execute(moved, {"token": token})
                over.wait(0.005)

    with ThreadPoolExecutor(5) as pool:
        running = [pool.submit(claimer, node, completes) for node in "ab" for completes in (True, False)]
        running.append(pool.submit(mover))
        try:
            wait_for(lambda: min(given.values()) >= 100 or any(f.done() for f in running), "both have had it often")
        finally:
            over.set()
        for future in running:
            future.result(30)


def test_the_number_outlives_a_crash_of_the_server(database: URL, engine: Engine) -> None:
    """Where commits do not wait for the disk, this one does."""
    run(engine, "CREATE TABLE seen (setting text)")
    run(
        engine,
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN INSERT INTO seen VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$",
    )
    run(
        engine,
        "CREATE CONSTRAINT TRIGGER note AFTER INSERT ON sync_claim DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION note()",
    )
    for setting in ("off", "remote_apply"):
        hasty = create_engine(database, connect_args={"options": f"-c synchronous_commit={setting}"})
        with Job("w1", CoordinationConfig(engine=hasty, **QUICK)) as job:
            job.claim_task(setting).release()
            with hasty.connect() as connection:
                assert connection.execute(text("SHOW synchronous_commit")).scalar() == setting
        hasty.dispose()
    with engine.connect() as connection:
        assert connection.execute(text("SELECT setting FROM seen")).scalars().all() == ["local", "remote_apply"]


# -- whose claims stand ----------------------------------------------------------------------------------------


def test_a_claim_of_a_node_that_joined_meanwhile_stands(job: Job, engine: Engine) -> None:
    """The claiming statement began before the other node was a member, and waits for its claim."""
    with ThreadPoolExecutor(1) as pool, engine.connect() as other, engine.connect() as looking:
        life = add_node(other, "w2", ordinal=99, heartbeat_timeout_sec=3600)
        insert = (
            "INSERT INTO sync_claim (task_id, token_id, node, incarnation, epoch) VALUES ('t', :token, 'w2', :life, 0)"
        )
        other.execute(text(insert), {"token": job.task_to_token("t"), "life": uuid.UUID(life)})
        setting = pool.submit(job.set_claim, "t")
        wait_for(lambda: looking.execute(WAITING).scalar(), "it waits for the row")
        other.commit()
        assert setting.result(10) == []
    assert claims(engine) == [("t", "w2", life)]


def test_the_next_owner_takes_over_what_the_one_before_cannot_complete(job: Job, engine: Engine) -> None:
    """It lives, but the token was taken from it, because it did not drain in time."""
    with engine.begin() as connection:
        life = add_node(connection, "w2", ordinal=99, heartbeat_timeout_sec=3600)
    claim(engine, "t", job.task_to_token("t"), "w2", life)
    with engine.connect() as connection:
        before = connection.execute(text("SELECT fence FROM sync_claim")).scalar_one()
    run(engine, "UPDATE sync_token SET epoch = 2 WHERE token_id = :token", token=job.task_to_token("t"))
    assert job.claim_task("t").fence > before


def test_set_claim_and_an_open_claim(job: Job, engine: Engine) -> None:
    claim = job.claim_task("t")
    assert job.set_claim(["t", "u"]) == ["t", "u"], "claims it already had included"
    assert job.add_task("t") is False, "it is being worked on"
    claim.complete()
    assert [row[0] for row in claims(engine)] == ["u"]
    job.claim_task("u").complete()
    assert [row[1] for row in audit(engine)] == ["t", "u"]


def test_claims_end_with_the_job(config: CoordinationConfig, engine: Engine) -> None:
    with Job("w1", config) as job:
        claim = job.claim_task("t")
    assert claims(engine) == []
    with pytest.raises(OwnershipLost):
        claim.complete()
    assert audit(engine) == []


def test_claims_of_a_killed_worker_end_with_it(cluster: Cluster, config: CoordinationConfig, engine: Engine) -> None:
    """Those on tokens of others too."""
    with Job("w1", config) as job:
        worker = cluster.add("w2", CLAIM="300", SET_CLAIM="300")
        wait_for(lambda: worker.seen("ready"), "the worker has claims")
        ready = worker.seen("ready") or {}
        assert len(ready["claims"]) > 100
        assert len(ready["marked"]) == 300
        task = ready["claims"][0]
        mine = next(n for n in range(300) if n not in ready["claims"])
        assert refused(job, task) == ("not owned", "w2")
        assert refused(job, mine) == ("claimed", "w2")
        worker.signal(signal.SIGKILL)
        wait_for(lambda: len(job.my_tokens) == 10_000, "its tokens are taken over")
        assert claims(engine) == []
        assert len(job.claim_tasks(range(300))) == 300


# -- and the hand-over -----------------------------------------------------------------------------------------


def test_a_token_waits_for_its_claims_and_their_completion_counts(
    make_cluster: Callable[..., Cluster], database: URL, engine: Engine
) -> None:
    patient = {"drain_timeout_sec": 60}
    cluster = make_cluster(**patient)
    with Job("w1", CoordinationConfig(url=database, **{**QUICK, **patient})) as job:
        got = job.claim_tasks(range(300))
        worker = cluster.add("w2", JOB='{"wait_on_enter": 60}')
        marked = text("SELECT count(*) FROM sync_token WHERE next_node IS NOT NULL")
        with engine.connect() as looking:
            looking = looking.execution_options(isolation_level="AUTOCOMMIT")
            wait_for(lambda: worker.held(), "tokens without claims have moved")
            wait_for(lambda: 0 < looking.execute(marked).scalar_one() <= 300, "only the claimed ones are left")
            held = {c.token for c in got}
            owned = text("SELECT count(*) FROM sync_token WHERE node = 'w2' AND token_id = ANY(:held)")
            assert looking.execute(owned, {"held": list(held)}).scalar() == 0
            asked = [c for c in got if c.token not in job.my_tokens]
            assert len(asked) > 50, "this node has been asked for them"
            with Session(engine) as session:
                job.complete_claims(got[:150], session)
                session.commit()
            job.complete_claims(got[150:])
            assert [int(row[1]) for row in audit(engine)] == list(range(300))
            wait_for(lambda: looking.execute(marked).scalar_one() == 0, "the rest follows")
            assert len(job.my_tokens) == 5000


@pytest.mark.parametrize("bound", [False, True])
def test_a_claim_is_completed_in_a_transaction_that_begins_after_its_token_was_asked_for(
    job: Job, engine: Engine, bound: bool
) -> None:
    claim = job.claim_task("t")
    asking = "UPDATE sync_token SET next_node = 'w9', next_epoch = 99 WHERE token_id = :token"
    run(engine, asking, token=claim.token)
    run(engine, "UPDATE sync_cluster SET epoch = epoch + 1")
    wait_for(lambda: not job.can_claim_task("t"), "this node has been asked for it")
    with Session(engine) as session:
        if bound:
            job.bind(session)
        job.checkpoint("t", 1, session)
        claim.complete(session)
        session.commit()
    assert [row[1] for row in audit(engine)] == ["t"]


def test_a_token_does_not_wait_longer_than_the_drain_timeout(config: CoordinationConfig, engine: Engine) -> None:
    with Job("w1", config) as one:
        got = {claim.task_id: claim for claim in one.claim_tasks(range(300))}
        with Job("w2", config) as two:
            wait_for(lambda: len(two.my_tokens) == 5000, "the leader has forced the move")
            task = next(n for n in got if two.can_claim_task(n))
            next_claim = two.claim_task(task)
            assert next_claim.fence > got[task].fence
            next_claim.complete()
            with pytest.raises(OwnershipLost) as info:
                got[task].complete()
            assert info.value.owners == {got[task].token: "w2"}
            assert audit(engine) == [("w2", str(task), next_claim.token, next_claim.epoch)]


@pytest.mark.parametrize("how", ["evict", "leave"])
@pytest.mark.parametrize("lock", ["UPDATE", "SHARE"])
def test_nobody_waits_for_an_applications_lock_on_a_claim(engine: Engine, database: URL, how: str, lock: str) -> None:
    statements = Statements(Names())
    with engine.begin() as connection:
        life = add_node(connection, "w1", silent_sec=3600)
        beat = connection.execute(text("SELECT last_heartbeat::text FROM sync_node")).scalar_one()
    claim(engine, "held", 1, "w1", life)
    claim(engine, "free", 2, "w1", life)
    with engine.connect() as application, open_session(database) as session:
        application.execute(text(f"SELECT 1 FROM sync_claim WHERE task_id = 'held' FOR {lock}"))
        if how == "evict":
            values = ["{w1}", f"{{{life}}}", f'{{"{beat}"}}', "{f}"]
            rows = session.execute(statements.evict, *values, timeout=60)
        else:
            rows = session.execute(statements.leave, "w1", life, timeout=60)
        assert len(rows) == 1
        assert [row[0] for row in claims(engine)] == ["held"], "it stops nobody; see above"
