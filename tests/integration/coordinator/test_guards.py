"""Each statement asks the database again: sent late, or by a stale sender, it changes nothing."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import URL, Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

from jobsync_orm import CoordinationConfig, Job
from jobsync_orm.claim_book import ClaimBook, Claimed
from jobsync_orm.coordinator.callbacks import Callback
from jobsync_orm.coordinator.clock import now
from jobsync_orm.coordinator.handoff import Handoff
from jobsync_orm.coordinator.leadership import Leadership
from jobsync_orm.coordinator.membership import Membership
from jobsync_orm.coordinator.session import Session, array, parse_array
from jobsync_orm.coordinator.statements import Statements
from jobsync_orm.coordinator.steps import GRANT
from jobsync_orm.coordinator.view import Ownership
from jobsync_orm.naming import Names
from jobsync_orm.pins import Pin, PinBoard
from tests.integration.cluster import QUICK, wait_for
from tests.integration.coordinator.backstage import add_node, open_session

SQL = Statements(Names())
TOKEN, EPOCH, OTHER_LIFE = 7, 5, "00000000-0000-0000-0000-000000000001"


@pytest.fixture
def session(database: URL) -> Iterator[Session]:
    with open_session(database) as session:
        yield session


@pytest.fixture
def life(engine: Engine) -> str:
    """The incarnation of the node ``a``, the oldest; ``b`` is there too."""
    with engine.begin() as connection:
        life = add_node(connection, "a", ordinal=1, applied_epoch=EPOCH)
        add_node(connection, "b", ordinal=2)
        connection.execute(text("UPDATE sync_cluster SET epoch = 20, revision = 3"))
    return life


def run(engine: Engine, sql: str, **values: object) -> None:
    with engine.begin() as connection:
        connection.execute(text(sql), values)


def put(engine: Engine, node: str | None, next_node: str | None = None, *, token: int = TOKEN) -> None:
    run(
        engine,
        "UPDATE sync_token SET node = :node, epoch = :epoch, next_node = CAST(:next AS text),"
        " next_epoch = CASE WHEN CAST(:next AS text) IS NOT NULL THEN CAST(:mark AS bigint) END,"
        " drain_deadline = CASE WHEN CAST(:next AS text) IS NOT NULL THEN clock_timestamp() + interval '1 hour' END"
        " WHERE token_id = :token",
        node=node,
        next=next_node,
        epoch=3,
        mark=EPOCH,
        token=token,
    )


def put_claim(engine: Engine, node: str, incarnation: str) -> None:
    run(
        engine,
        "INSERT INTO sync_claim (task_id, token_id, node, incarnation, epoch, claimed_at)"
        " VALUES ('t', :token, :node, CAST(:incarnation AS uuid), 1, clock_timestamp())",
        token=TOKEN,
        node=node,
        incarnation=incarnation,
    )


def stored(engine: Engine) -> tuple[Any, ...]:
    with engine.connect() as connection:
        row = connection.execute(
            text("SELECT node, epoch, next_node FROM sync_token WHERE token_id = :token"), {"token": TOKEN}
        )
        return tuple(row.one())


def beat_of(connection: Connection, name: str) -> str:
    return str(
        connection.execute(
            text("SELECT last_heartbeat::text FROM sync_node WHERE name = :name"), {"name": name}
        ).scalar_one()
    )


# -- release -------------------------------------------------------------------------------------------------


def release(session: Session, life: str, *, marks: tuple[int, ...] = (EPOCH,), busy: tuple[int, ...] = ()) -> int:
    rows = session.execute(SQL.release, "a", life, array(marks), array(busy), timeout=60)
    return sum(int(row[1] or 0) for row in rows)


def test_release_gives_the_token_at_the_epoch_of_the_mark(engine: Engine, session: Session, life: str) -> None:
    put(engine, "a", "b")
    assert release(session, life) == 1
    assert stored(engine) == ("b", EPOCH, None)


def test_release_of_another_mark_changes_nothing(engine: Engine, session: Session, life: str) -> None:
    """The mark was withdrawn and made anew; the node has not yet said no under the new one."""
    put(engine, "a", "b")
    assert release(session, life, marks=(EPOCH - 1,)) == 0
    assert stored(engine) == ("a", 3, "b")


def test_release_of_another_life_changes_nothing(engine: Engine, session: Session, life: str) -> None:
    put(engine, "a", "b")
    assert release(session, OTHER_LIFE) == 0
    assert stored(engine) == ("a", 3, "b")


def test_release_leaves_tokens_that_on_revoke_works_on(engine: Engine, session: Session, life: str) -> None:
    put(engine, "a", "b")
    assert release(session, life, busy=(TOKEN,)) == 0
    assert stored(engine) == ("a", 3, "b")


def test_release_leaves_claimed_tokens(engine: Engine, session: Session, life: str) -> None:
    put(engine, "a", "b")
    put_claim(engine, "a", life)
    assert release(session, life) == 0
    assert stored(engine) == ("a", 3, "b")


@pytest.mark.parametrize("target", ["away", "nobody"])
def test_release_to_a_node_that_is_not_there_changes_nothing(
    engine: Engine, session: Session, life: str, target: str
) -> None:
    with engine.begin() as connection:
        add_node(connection, "away", ordinal=3, state="away", rejoin_grace_sec=3600)
    put(engine, "a", target)
    assert release(session, life) == 0
    assert stored(engine) == ("a", 3, target)


def test_release_waits_for_no_application(engine: Engine, session: Session, life: str) -> None:
    put(engine, "a", "b")
    with engine.connect() as application:
        application.execute(text("SELECT 1 FROM sync_token WHERE token_id = :token FOR SHARE"), {"token": TOKEN})
        assert release(session, life) == 0
    assert release(session, life) == 1


@pytest.mark.parametrize("others", [False, True])
def test_nothing_is_released_before_on_revoke_has_returned(
    engine: Engine, session: Session, life: str, others: bool
) -> None:
    """Not along with tokens of the same mark that may go already, either."""
    let_go = threading.Event()
    config = CoordinationConfig(url=engine.url)
    membership = Membership(config, "a", SQL)
    membership.incarnation = life
    ownership = Ownership(config.total_tokens, 0)
    callback = Callback("on_revoke", lambda: let_go.wait(60), lambda: None)
    handoff = Handoff(SQL, membership, ownership, 60, None, callback)
    try:
        put(engine, "a")
        if others:  # never said yes to, so on_revoke is not asked
            put(engine, "a", "b", token=TOKEN + 1)
        handoff.refresh(session, lambda: float("inf"))
        assert ownership.decide(TOKEN)
        put(engine, "a", "b")
        handoff.refresh(session, lambda: float("inf"))
        assert not ownership.decide(TOKEN)
        handoff.release(session)
        assert stored(engine) == ("a", 3, "b")
        let_go.set()
        wait_for(lambda: handoff.revoked, "on_revoke returns")
        handoff.release(session)
        assert stored(engine) == ("b", EPOCH, None)
    finally:
        let_go.set()
        callback.finish(10)


# -- publish -------------------------------------------------------------------------------------------------


def grant(session: Session, life: str, *, leader: str = "a", revision: int = 3) -> int:
    """Send the leader's grant of the token, read as nobody's, to ``b``. Returns how many tokens moved."""
    steps = (array([TOKEN]), array([TOKEN]), "{NULL}", "{NULL}", array(["b"]), array([GRANT]), "{1}")
    note = (datetime.now(UTC).isoformat(), "pins or repair", 2, 2)
    rows = session.execute(SQL.publish, leader, life, revision, "{}", *steps, 3, *note, "{}", 0, timeout=60)
    return int(rows[0][2] or 0) if rows else 0


def test_publish_by_the_leader_on_what_it_read(engine: Engine, session: Session, life: str) -> None:
    put(engine, None)
    assert grant(session, life) == 1
    assert stored(engine) == ("b", 21, None)


def test_publish_after_a_change_of_members_changes_nothing(engine: Engine, session: Session, life: str) -> None:
    put(engine, None)
    assert grant(session, life, revision=2) == 0
    assert stored(engine) == (None, 3, None)


@pytest.mark.parametrize("change", ["older", "another life", "evicted", "must not lead"])
def test_publish_by_one_that_does_not_lead_changes_nothing(
    engine: Engine, session: Session, life: str, change: str
) -> None:
    put(engine, None)
    with engine.begin() as connection:
        if change == "older":
            add_node(connection, "c", ordinal=0)
        elif change == "evicted":
            connection.execute(text("DELETE FROM sync_node WHERE name = 'a'"))
        elif change == "must not lead":
            connection.execute(text("UPDATE sync_node SET can_lead = false WHERE name = 'a'"))
    assert grant(session, OTHER_LIFE if change == "another life" else life) == 0
    assert stored(engine) == (None, 3, None)


@pytest.mark.parametrize(("node", "next_node"), [("a", None), ("b", "a")])
def test_publish_leaves_a_token_that_has_changed_hands(
    engine: Engine, session: Session, life: str, node: str, next_node: str | None
) -> None:
    put(engine, node, next_node)
    assert grant(session, life) == 0
    assert stored(engine) == (node, 3, next_node)


def test_publish_leaves_a_token_that_was_marked_meanwhile(engine: Engine, session: Session, life: str) -> None:
    put(engine, None, "a")
    assert grant(session, life) == 0
    assert stored(engine) == (None, 3, "a")


def test_publish_waits_for_no_application(engine: Engine, session: Session, life: str) -> None:
    put(engine, None)
    with engine.connect() as application:
        application.execute(text("SELECT 1 FROM sync_token WHERE token_id = :token FOR SHARE"), {"token": TOKEN})
        assert grant(session, life) == 0
    assert grant(session, life) == 1


# -- an overdue mark, as read --------------------------------------------------------------------------------


@pytest.mark.parametrize(("applied", "overdue"), [(EPOCH, "t"), (EPOCH - 1, "f")])
def test_a_mark_is_overdue_only_once_its_owner_has_applied_it(
    engine: Engine, session: Session, life: str, applied: int, overdue: str
) -> None:
    put(engine, "a", "b")
    run(engine, "UPDATE sync_token SET drain_deadline = clock_timestamp() - interval '1 s' WHERE node = 'a'")
    run(engine, "UPDATE sync_node SET applied_epoch = :applied WHERE name = 'a'", applied=applied)
    rows = session.execute(SQL.tokens, timeout=60)
    assert [row[2] for row in rows if row[0] == "a"] == [overdue]


# -- refresh -------------------------------------------------------------------------------------------------


def refreshed(session: Session, life: str) -> tuple[list[int], list[int], str | None]:
    """Tokens owned, tokens to give up, and how many are of an earlier life."""
    ((_, _, owned, draining, _, _, earlier, _),) = session.execute(SQL.refresh, "a", life, timeout=60)
    return parse_array(owned), parse_array(draining), earlier


def test_a_marked_token_is_not_owned(engine: Engine, session: Session, life: str) -> None:
    put(engine, "a")
    assert refreshed(session, life) == ([TOKEN], [], "0")
    put(engine, "a", "b")
    assert refreshed(session, life) == ([], [TOKEN], "0")


def test_a_token_of_an_earlier_life_is_not_owned_before_it_is_taken_up(
    engine: Engine, session: Session, life: str
) -> None:
    put(engine, "a")
    run(engine, "UPDATE sync_node SET join_epoch = 4 WHERE name = 'a'")
    assert refreshed(session, life) == ([], [], "1")
    session.execute(SQL.regain, "a", OTHER_LIFE, timeout=60)
    assert stored(engine) == ("a", 3, None), "not by another life"
    session.execute(SQL.regain, "a", life, timeout=60)
    assert stored(engine) == ("a", 21, None), "under a new epoch"
    assert refreshed(session, life) == ([TOKEN], [], "0")


# -- heartbeat and eviction ----------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["none", "another life", "away", "evicted"])
def test_a_heartbeat_prolongs_only_a_life_that_is_not_over(
    engine: Engine, session: Session, life: str, change: str
) -> None:
    if change == "away":
        run(engine, "UPDATE sync_node SET state = 'away' WHERE name = 'a'")
    elif change == "evicted":
        run(engine, "DELETE FROM sync_node WHERE name = 'a'")
    mine = OTHER_LIFE if change == "another life" else life
    ((state, *_),) = session.execute(SQL.beat, "a", mine, 0, False, False, timeout=60)
    assert state == ("active" if change == "none" else None)


@pytest.mark.parametrize("evidence", ["sound", "it has beaten since", "another life", "young by the server's clock"])
def test_eviction_for_silence(engine: Engine, session: Session, life: str, evidence: str) -> None:
    with engine.begin() as connection:
        silent = 1 if evidence.startswith("young") else 3600
        victim = add_node(connection, "c", ordinal=3, silent_sec=silent)
        beat = beat_of(connection, "c")
        if evidence == "it has beaten since":
            connection.execute(
                text("UPDATE sync_node SET last_heartbeat = last_heartbeat + interval '1 s' WHERE name = 'c'")
            )
    named = OTHER_LIFE if evidence == "another life" else victim
    rows = session.execute(SQL.evict, "{c}", f"{{{named}}}", f'{{"{beat}"}}', "{f}", timeout=60)
    assert [row[0] for row in rows] == (["c"] if evidence == "sound" else [])


@pytest.mark.parametrize("held", [True, False])
def test_eviction_for_a_freed_lock_asks_the_server_again(
    engine: Engine, database: URL, session: Session, life: str, held: bool
) -> None:
    with open_session(database) as victim:
        victim.execute(SQL.lock_node, "c", timeout=60)
        with engine.begin() as connection:
            incarnation = add_node(connection, "c", ordinal=3)
            connection.execute(text("UPDATE sync_node SET backend_pid = :pid WHERE name = 'c'"), {"pid": victim.pid})
            beat = beat_of(connection, "c")
        if not held:
            victim.execute("SELECT pg_catalog.pg_advisory_unlock_all()", timeout=60)
        rows = session.execute(SQL.evict, "{c}", f"{{{incarnation}}}", f'{{"{beat}"}}', "{t}", timeout=60)
        assert [row[0] for row in rows] == ([] if held else ["c"])


@pytest.mark.parametrize("alive", [True, False])
def test_a_name_is_taken_over_only_from_a_row_that_stands_still(
    engine: Engine, session: Session, life: str, alive: bool
) -> None:
    with engine.begin() as connection:
        beat = beat_of(connection, "a")
        if alive:
            connection.execute(text("UPDATE sync_node SET last_heartbeat = clock_timestamp() WHERE name = 'a'"))
    new = str(uuid.uuid4())
    values: list[Any] = ["a", new, life, beat, 1, True, 4.0, 0.3, 0.0, "{}", "h", 1, "0", 10_000]
    assert len(session.execute(SQL.register, *values, timeout=60)) == (0 if alive else 1)


def test_a_name_that_is_taken_over_takes_its_tokens_up_under_a_new_epoch(
    engine: Engine, session: Session, life: str
) -> None:
    put(engine, "a", "b")
    with engine.begin() as connection:
        beat = beat_of(connection, "a")
    values: list[Any] = ["a", str(uuid.uuid4()), life, beat, 1, True, 4.0, 0.3, 0.0, "{}", "h", 1, "0", 10_000]
    session.execute(SQL.register, *values, timeout=60)
    assert stored(engine) == ("a", 21, None)


# -- claims and audit ----------------------------------------------------------------------------------------


@pytest.fixture
def book(engine: Engine) -> ClaimBook:
    return ClaimBook(engine, Names(), "a")


def test_a_claim_of_an_owned_task(engine: Engine, book: ClaimBook, life: str) -> None:
    put(engine, "a")
    (claimed,) = book.claim({"t": TOKEN}, life, known=3)
    assert (claimed.key, claimed.token, claimed.epoch, claimed.life) == ("t", TOKEN, 3, life)


@pytest.mark.parametrize("change", ["another's", "marked", "earlier", "later", "another life"])
def test_a_task_that_is_not_owned_in_the_database_is_not_claimed(
    engine: Engine, book: ClaimBook, life: str, change: str
) -> None:
    """What the process believes may be a moment old."""
    put(engine, "b" if change == "another's" else "a", "b" if change == "marked" else None)
    if change == "earlier":
        run(engine, "UPDATE sync_node SET join_epoch = 4 WHERE name = 'a'")
    known = 2 if change == "later" else 9
    assert book.claim({"t": TOKEN}, OTHER_LIFE if change == "another life" else life, known) == []


def test_a_claim_is_not_decided_while_the_token_is_changing_hands(engine: Engine, life: str) -> None:
    put(engine, "a")
    impatient = create_engine(engine.url, connect_args={"options": "-c lock_timeout=100"})
    try:
        with engine.connect() as leader:
            leader.execute(text("UPDATE sync_token SET node = 'b' WHERE token_id = :token"), {"token": TOKEN})
            with pytest.raises(DBAPIError, match="lock timeout"):
                ClaimBook(impatient, Names(), "a").claim({"t": TOKEN}, life, known=3)
    finally:
        impatient.dispose()


@pytest.mark.parametrize("owner", ["b", "a"])
def test_nobody_ends_the_claim_of_another_node_or_life(engine: Engine, book: ClaimBook, life: str, owner: str) -> None:
    put(engine, "a")
    put_claim(engine, owner, OTHER_LIFE)
    with engine.connect() as connection:
        fence = connection.execute(text("SELECT fence FROM sync_claim")).scalar_one()
    claimed = Claimed("t", TOKEN, 3, fence, 0, life)
    assert book.unset(["t"], life) == []
    assert book.release([claimed]) == set()
    assert book.complete([claimed]) == set()
    with engine.connect() as connection:
        assert connection.execute(text("SELECT node FROM sync_claim")).scalars().all() == [owner]
        assert connection.execute(text("SELECT count(*) FROM sync_audit")).scalar() == 0


# -- leaving --------------------------------------------------------------------------------------------------


def test_a_node_leaves_only_after_on_revoke_has_returned(engine: Engine) -> None:
    entered, let_go = threading.Event(), threading.Event()
    there: list[str] = []

    def on_revoke() -> None:
        entered.set()
        let_go.wait(60)
        with engine.connect() as connection:
            there.extend(connection.execute(text("SELECT name FROM sync_node")).scalars())

    settings: Any = {**QUICK, "callback_timeout_sec": 30}
    job = Job("w1", CoordinationConfig(url=engine.url, **settings), on_revoke=on_revoke).start()
    stopping = threading.Thread(target=job.stop, daemon=True)
    stopping.start()
    try:
        assert entered.wait(60)
        stopping.join(0.5)  # time enough to leave too early
    finally:
        let_go.set()
        stopping.join(60)
    assert there == ["w1"]


# -- pins -----------------------------------------------------------------------------------------------------


def test_each_change_of_the_pins_is_announced_to_the_leader(engine: Engine) -> None:
    board, pin = PinBoard(engine, Names(), "a"), Pin("t", TOKEN, ("b",), None)

    def revision() -> int:
        with engine.connect() as connection:
            return int(connection.execute(text("SELECT pins_revision FROM sync_cluster")).scalar_one())

    first = revision()
    clears: list[Callable[[], int]] = [
        lambda: board.clear_task("t"),
        lambda: board.clear_by_creator("a"),
        board.clear_all,
    ]
    for clear in clears:
        board.register([pin], 10_000, expires_in_days=None, ephemeral=False)
        assert revision() == first + 1
        assert clear() == 1
        assert revision() == first + 2
        first += 2


def test_the_next_plan_is_due_when_a_pin_expires(engine: Engine, session: Session, life: str) -> None:
    pin = Pin("t", TOKEN, ("b",), None)
    PinBoard(engine, Names(), "a").register([pin], 10_000, expires_in_days=10 / 86400, ephemeral=False)
    leader = Leadership(Names(), SQL, "a", 3)
    leader.heard(["a", "b"], (0, 0))
    assert leader.plan(session, life) is not None
    assert 0 < leader.plan_at - now() < 11
