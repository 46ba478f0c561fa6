"""What of a span is stored with a job."""

from __future__ import annotations

import pytest

from jobsync_orm.tracing import LONGEST_TRACE, UNTRACED, trace_column


class Span:
    def __init__(self, carrier: str | None) -> None:
        self.carrier = carrier

    def written(self, ids: list[int]) -> None: ...


@pytest.mark.parametrize("carrier", ["x", "00-4bf9-00f0-01 a=b c", "~" * LONGEST_TRACE])
def test_what_is_printable_is_stored(carrier: str) -> None:
    assert trace_column(Span(carrier)) == {"trace": carrier}


@pytest.mark.parametrize("carrier", [None, "", "a\0b", "a\nb", "\x7f", "ü", "\ud800", "~" * (LONGEST_TRACE + 1)])
def test_anything_else_is_left_out_rather_than_a_job_not_written(carrier: str | None) -> None:
    assert trace_column(Span(carrier)) == {}


def test_who_makes_no_spans_stores_nothing() -> None:
    for _ in range(2):
        with UNTRACED as span:
            span.written([1])
            assert trace_column(span) == {}
