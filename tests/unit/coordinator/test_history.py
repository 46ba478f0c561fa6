"""What a node does about the history it finds."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from jobsync_orm.coordinator.history import History, Standing, decide
from jobsync_orm.coordinator.session import SessionLost, StatementFailed
from jobsync_orm.coordinator.statements import Statements
from jobsync_orm.naming import Names

SQL = Statements(Names())


@pytest.mark.parametrize(
    ("stored", "epoch", "server", "known", "action"),
    [
        pytest.param("1/1", 7, "1/1", 7, "keep", id="as it was"),
        pytest.param("1/1", 9, "1/1", 7, "keep", id="others have gone on"),
        pytest.param(None, 7, "1/1", 7, "adopt", id="never asked before"),
        pytest.param(None, 7, None, 7, "keep", id="the server does not say"),
        pytest.param("1/1", 7, None, 7, "keep", id="the server no longer says"),
        pytest.param("1/1", 7, "1/2", 7, "reform", id="promoted"),
        pytest.param("1/1", 7, "2/1", 0, "reform", id="restored into another server, by a new process"),
        pytest.param("1/1", 6, "1/1", 7, "reform", id="restored into the same server"),
        pytest.param(None, 6, None, 7, "reform", id="restored, and the server does not say"),
        pytest.param(None, 6, "1/1", 7, "reform", id="restored from before anybody asked"),
    ],
)
def test_decision(stored: str | None, epoch: int, server: str | None, known: int, action: str) -> None:
    assert decide(Standing("i", stored, epoch), server, known) == action


class Server:
    """Answers each statement as told, and remembers what was asked."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[tuple[Any, ...]] = []
        self.closed = False

    def execute(self, sql: str, *params: Any, timeout: float) -> Any:
        self.asked.append((sql, *params))
        answer = self.answers[sql]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closed = True


def settle(server: Server, known: int = 0) -> History:
    history = History(SQL, "w1", 15, 1)
    history.see(known)
    history.settle(server)  # type: ignore[arg-type]
    return history


def test_a_history_that_nobody_has_stored_is_stored_for_this_cluster_only() -> None:
    server = Server({SQL.identify: [("1/1",)], SQL.standing: [("i", None, "7")], SQL.adopt_history: []})
    settle(server)
    assert server.asked[-1] == (SQL.adopt_history, "i", "1/1")


def test_the_highest_epoch_seen_is_what_the_cluster_is_formed_anew_above() -> None:
    answers = {
        SQL.identify: [("1/1",)],
        SQL.standing: [("i", "1/1", "7")],
        SQL.reform: [("1000042", "15.0", "9", "", "0")],
    }
    server = Server(answers)
    history = settle(server, known=42)
    sql, seen, drawn, told, known, timeout, forced = server.asked[-1]
    assert (sql, seen, told, known, timeout, forced) == (SQL.reform, "i", "1/1", 42, 15, False)
    assert drawn != "i"
    assert history.known_epoch == 1000042


def test_one_that_comes_second_goes_on_with_what_the_first_has_made(caplog: pytest.LogCaptureFixture) -> None:
    server = Server({SQL.identify: [("1/2",)], SQL.standing: [("i", "1/1", "7")], SQL.reform: []})
    assert settle(server).known_epoch == 0
    assert "another node has formed the cluster anew" in caplog.text


@pytest.mark.parametrize("sqlstate", ["42501", "42883", "0A000"])
def test_a_server_that_does_not_tell_its_history_is_mentioned_once(
    sqlstate: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "jobsync_orm")
    refusal = StatementFailed("permission denied for function pg_control_system", sqlstate)
    server = Server({SQL.identify: refusal, SQL.standing: [("i", None, "7")]})
    history = History(SQL, "w1", 15, 1)
    for _ in range(3):
        history.settle(server)  # type: ignore[arg-type]
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert history.known_epoch == 7


def test_a_standby_is_no_server_to_work_on() -> None:
    server = Server({SQL.identify: StatementFailed("recovery is in progress", "55000")})
    with pytest.raises(SessionLost, match="standby"):
        settle(server)
    assert server.closed


def test_fencing_numbers_that_may_come_twice_are_an_error(caplog: pytest.LogCaptureFixture) -> None:
    answers = {
        SQL.identify: [("1/2",)],
        SQL.standing: [("i", "1/1", "7")],
        SQL.reform: [("1000007", "15.0", None, "", "0")],
    }
    settle(Server(answers))
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert "lacks UPDATE" in caplog.text
