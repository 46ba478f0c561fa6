"""The page of the queue's benchmark says what was not reached, and compares within the results it is given only."""

from benchmarks.queue.page import OURS, PGQUEUER, PGQUEUER_BEST, Line, Pair, table


def line(what: str, pair: Pair, value: float | None) -> Line:
    return {"step": "s", "what": what, "peer": pair[0], "config": pair[1], "value": value}


def row(part: str, beginning: str) -> list[str]:
    (found,) = [text for text in part.splitlines() if text.startswith(f"| {beginning}")]
    return [cell.strip() for cell in found.strip("|").split("|")][1:]


def parts(lines: list[Line]) -> tuple[str, str]:
    """What must be reached, and all figures."""
    required, _, figures = table(lines).partition("## All figures")
    return required, figures


def test_a_ratio_is_of_medians_and_of_the_best_of_ours() -> None:
    ours = [line("drain, 1 worker", OURS, value) for value in (100, 300, 200)]
    best = line("drain, 1 worker", ("ours", "one thread"), 240)
    peers = [line("drain, 1 worker", PGQUEUER_BEST, 100), line("drain, 1 worker", PGQUEUER, 110)]
    required, figures = parts([*ours, best, *peers])
    assert row(required, "drain, 1 worker (one thread)") == ["2.40 = 240 / 100", "≥ 1.2", "yes"]
    assert row(required, "drain, 1 worker (default)") == ["1.82 = 200 / 110", "≥ 2", "**no**"]
    assert row(figures, "drain, 1 worker") == ["200", "240", "100", "110"]


def test_what_is_bounded_by_itself() -> None:
    required, figures = parts([line("stats() with 1,000,000 rows, ms", OURS, 51.0)])
    assert row(required, "stats()") == ["51", "≤ 50", "**no**"]
    assert row(figures, "stats()") == ["51"]


def test_what_has_no_result_is_not_compared() -> None:
    required, figures = parts([line("drain, 1 worker", OURS, 100), line("drain, 1 worker", PGQUEUER, None)])
    assert "drain" not in required
    assert row(figures, "drain, 1 worker") == ["100"]
