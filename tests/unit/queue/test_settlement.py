"""The parameters of ``settle`` are the same whether all attempts have completed or not."""

from __future__ import annotations

from dataclasses import replace

from jobsync_orm.models import AttemptOutcome, JobState
from jobsync_orm.queue.jobs import Ending, settlement

DONE = Ending(7, 2, AttemptOutcome.COMPLETED, JobState.COMPLETED, 90.0, 95.5)
FAILED = replace(
    DONE,
    job_id=8,
    outcome=AttemptOutcome.FAILED,
    state=JobState.RETRYING,
    error='a "b"',
    traceback="line\nline",
    delay=1.5,
    counts=True,
)


def test_columns_that_are_known_are_those_that_would_have_been_written() -> None:
    with_result = replace(DONE, job_id=9, result='{"a": null}')
    plain = settlement([DONE, with_result], 100.0)
    mixed = settlement([DONE, with_result, FAILED], 100.0)
    assert len(plain) == len(mixed) == 12
    for short, long in zip(plain, mixed, strict=True):
        assert _unquoted(long).startswith(_unquoted(short)[:-1] + ",")


def test_one_that_failed() -> None:
    assert settlement([FAILED], 100.0) == [
        "{8}",
        "{2}",
        '{"failed"}',
        '{"retrying"}',
        "{NULL}",
        '{"a \\"b\\""}',
        '{"line\nline"}',
        '{"1.5"}',
        "{t}",
        "{10.000000}",
        "{4.500000}",
        "{NULL}",
    ]


def _unquoted(text: str) -> str:
    return text.replace('"', "")
