"""What may be said of a job that is put in."""

from __future__ import annotations

import datetime
from datetime import UTC, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

from jobsync_orm import ConfigurationError
from jobsync_orm.exceptions import InvalidJob
from jobsync_orm.queue import JobQueue

# Nobody is there: whoever connects gets another error.
NOWHERE = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
QUEUE = JobQueue(engine=NOWHERE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": ""}, "type='' has 0 characters"),
        ({"type": 3}, "type=3 must be text"),
        ({"payload": {"at": datetime.datetime(2026, 1, 1)}}, r"payload\['at'\]"),
        ({"priority": "high"}, "priority='high'"),
        ({"priority": 2**31}, "priority=2147483648"),
        ({"priority": False}, "priority=False"),
        ({"key": 1.5}, r"key: 1.5 is of type builtins.float"),
        ({"key": "a\0"}, "key: .*NUL"),
        ({"key": "é" * 501}, "key=.* has 1,002 bytes; at most 1,000"),
        ({"idempotency_key": b"x"}, "idempotency_key: b'x'"),
        ({"run_at": datetime.datetime(2026, 1, 1)}, "run_at=.*has no time zone"),
        ({"run_at": 5}, "run_at=5 must be a datetime"),
        ({"run_at": datetime.datetime(2026, 1, 1, tzinfo=UTC), "delay": 5}, "contradict"),
        ({"run_at": datetime.datetime.max.replace(tzinfo=timezone(timedelta(hours=-5)))}, "out of range"),
        ({"delay": -1}, "delay=-1"),
        ({"delay": float("nan")}, "delay=nan"),
        ({"delay": timedelta(days=100_000)}, "delay="),
        ({"timeout": 0}, "timeout=0"),
        ({"max_retries": -1}, "max_retries=-1"),
        ({"max_retries": True}, "max_retries=True"),
        ({"after": "7"}, "after='7'"),
        ({"after": [7, "8"]}, "'8' is no id"),
        ({"after": 0}, "0 is no id"),
    ],
    ids=range(23),
)
def test_what_cannot_be_is_refused_before_anything_is_sent(options: dict[str, Any], message: str) -> None:
    with Session(NOWHERE) as session:
        with pytest.raises(InvalidJob, match=message):
            QUEUE.enqueue(session, **{"type": "a", **options})
        assert not session.in_transaction()
    with pytest.raises(InvalidJob, match=message):
        QUEUE.submit(**{"type": "a", **options})


@pytest.mark.parametrize("where", [None, "session", sessionmaker()], ids=range(3))
def test_no_place_for_a_job(where: Any) -> None:
    with pytest.raises(ConfigurationError, match="give the Session or Connection"):
        QUEUE.enqueue(where, "a")


def test_who_leaves_out_the_session_is_told_so() -> None:
    with pytest.raises(ConfigurationError, match=r"where='mail': give the Session .* use submit"):
        QUEUE.enqueue("mail", {"to": "ann@example.com"})  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match=r"where='mail': give the Session"):
        QUEUE.enqueue_many("mail", [{"to": "ann@example.com"}])  # type: ignore[call-overload]
