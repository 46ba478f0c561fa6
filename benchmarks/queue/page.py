"""The page of a run: each row with every peer, and what ours must reach."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["read", "table", "write"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks-queue.md"

Line = dict[str, Any]
Pair = tuple[str, str]

OURS: Pair = ("ours", "default")
PGQUEUER: Pair = ("pgqueuer", "default")
PGQUEUER_BEST: Pair = ("pgqueuer", "batch 1000, pool of 4")


@dataclass(frozen=True)
class Row:
    """What must be reached: at least ``times`` a peer's number (``of`` another row), or ``least``, or ``most``."""

    what: str
    times: float | None = None
    of: str | None = None
    peer: Pair = PGQUEUER
    best: bool = False
    least: float | None = None
    most: float | None = None


ROWS = (
    Row("drain, 1 worker", times=1.2, peer=PGQUEUER_BEST, best=True),
    Row("drain, 2 workers", times=1.2, peer=PGQUEUER_BEST, best=True),
    Row("drain, 1 worker", times=2.0),
    Row("enqueue, one per transaction", times=1.0),
    Row("enqueue, one per transaction, on a Connection"),
    Row("enqueue, one per submit()", times=1.0, of="enqueue, one per transaction"),
    Row("one bare INSERT per Session, without this library"),
    Row("enqueue, 1,000 at a time", times=1.0),
    Row("pick-up when idle, p50, ms"),
    Row("pick-up when idle, p95, ms", most=5),
    Row("pick-up when idle, p99, ms", most=10),
    Row("drain beside 1,000,000 finished rows, against none", least=0.9),
    Row("drain beside 1,000,000 future rows, against none", least=0.9),
    Row("drain under a held snapshot, last tenth of 100,000, against the first tenth", least=0.8),
    Row("drain under a held snapshot, last tenth of 100,000, against none held", least=0.8),
    Row("stats() with 1,000,000 rows, ms", most=50),
    Row("job of a killed worker runs again after, s", most=4),
    Row("64 producers' commits with wake-ups, against without", least=0.9),
    Row("worker's memory after 1,000,000 jobs, against after 100,000", most=1.1),
)

INTRODUCTION = """# Benchmarks of the queue

Written by `make bench-queue`; do not edit. The same jobs (about 100 bytes of JSON, no work) through this library and
others, on one server, in turns. `benchmarks/queue/steps.py` says how each number is made. Numbers are medians of the
passes; rates are jobs per second. Machines differ, so only ratios within a run mean something. The other libraries
enqueue without a transaction of the application's, on one connection: one round trip, that of the INSERT. This one does
so through a SQLAlchemy `Session`: two round trips, as the id is known before COMMIT, and what SQLAlchemy does for a
transaction, which the bare INSERT shows. What compares with theirs is `submit()`.
"""


def read(files: Iterable[Path]) -> list[Line]:
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(lines: Sequence[Line]) -> str:
    """Markdown: a row for each of ROWS that was measured."""

    def median(what: str, pair: Pair) -> float | None:
        values = [
            line["value"]
            for line in lines
            if line.get("what") == what and (line["peer"], line["config"]) == pair and line["value"] is not None
        ]
        return statistics.median(values) if values else None

    pairs = sorted({(line["peer"], line["config"]) for line in lines if line["step"] != "run"}, key=lambda p: p != OURS)
    ours = [pair for pair in pairs if pair[0] == "ours"]
    head = ["", *(f"{peer}, {config}" for peer, config in pairs), "must reach", "is", "reached"]
    out = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in ROWS:
        mine = [value for pair in (ours if row.best else [OURS]) if (value := median(row.what, pair)) is not None]
        if not mine:
            continue
        best = max(mine)
        theirs = median(row.of or row.what, row.peer)
        target, value, reached = "–", "–", "–"
        if row.times is not None and theirs is not None:
            target = f"{row.times:g} × {', '.join(row.peer)}"
            value, ok = f"{best / theirs:.3g} ×", best >= row.times * theirs
            reached = "yes" if ok else "**no**"
        elif row.least is not None or row.most is not None:
            bound = row.least if row.least is not None else row.most
            assert bound is not None
            target = f"{'≥' if row.least is not None else '≤'} {bound:g}"
            ok = best >= bound if row.least is not None else best <= bound
            value, reached = _number(best), "yes" if ok else "**no**"
        cells = [row.what, *(_number(median(row.what, pair)) for pair in pairs), target, value, reached]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def write(files: Sequence[Path]) -> None:
    """The page of these results."""
    lines = read(files)
    runs = [line for line in lines if line["step"] == "run"]
    about = [
        f"- {time.strftime('%Y-%m-%d', time.gmtime(run['at']))}: {run['cpus']} cores, PostgreSQL {run['postgresql']}"
        f" (fsync {run['fsync']}), {', '.join(f'{name} {number}' for name, number in run['versions'].items())}"
        for run in runs
    ]
    failed = [f"- {line['step']}, {line['peer']}: {line['why']}" for line in lines if line.get("what") == "failed"]
    parts = [INTRODUCTION, *dict.fromkeys(about), "", table(lines), ""]
    PAGE.write_text(
        "\n".join([*parts, *(["## Without a result", "", *failed, ""] if failed else [])]), encoding="utf-8"
    )
