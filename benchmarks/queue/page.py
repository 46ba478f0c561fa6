"""The page of a run: each row with every peer, and what ours must reach."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
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
    Row("enqueue, one per transaction, each in a new Session"),
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
others, on one server, in turns. `benchmarks/queue/steps.py` and `endurance.py` say how each number is made. Numbers are
medians of the passes; rates are jobs per second. Machines differ, and one differs from hour to hour, so only ratios
within a run mean something; what is compared is of one run.

The others enqueue without a transaction of the application's, on one connection: one round trip, that of the INSERT.
This one does so in transactions of one SQLAlchemy `Session`, or each in a new one, as a web server would; what
SQLAlchemy does for a transaction the bare INSERT shows. `submit()` has no transaction of the application's either.
"""


def read(files: Iterable[Path]) -> list[Line]:
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


class _Medians:
    """The median of each thing measured, by what and by pair."""

    def __init__(self, lines: Sequence[Line]) -> None:
        found: dict[tuple[str, Pair], list[float]] = {}
        for line in lines:
            if line.get("value") is not None:
                found.setdefault((line["what"], (line["peer"], line["config"])), []).append(line["value"])
        self._values = {key: statistics.median(values) for key, values in found.items()}
        self.pairs = sorted({pair for _, pair in found}, key=lambda pair: (pair[0] != "ours", pair != OURS, pair))

    def of(self, what: str, pair: Pair) -> float | None:
        return self._values.get((what, pair))

    def ours(self, row: Row) -> tuple[Pair, float] | None:
        """Ours, in the default configuration or in the best; None if it was not measured."""
        pairs = [pair for pair in self.pairs if pair[0] == "ours"] if row.best else [OURS]
        found = [(pair, value) for pair in pairs if (value := self.of(row.what, pair)) is not None]
        return max(found, key=lambda pair_and_value: pair_and_value[1], default=None)


def _name(pair: Pair) -> str:
    peer, config = pair
    return f"{'this library' if peer == 'ours' else peer}, {config}"


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def _required(medians: _Medians) -> Iterator[Sequence[str]]:
    for row in ROWS:
        if (mine := medians.ours(row)) is None:
            continue
        pair, value = mine
        what, is_ = row.what, _number(value)
        if row.times is not None:
            theirs = medians.of(row.of or row.what, row.peer)
            if theirs is None:
                continue
            what += f" ({pair[1]}) / {row.of or 'the same'} of {', '.join(row.peer)}"
            is_ = f"{value / theirs:.2f} = {_number(value)} / {_number(theirs)}"
            must, reached = f"≥ {row.times:g}", value >= row.times * theirs
        elif row.least is not None:
            must, reached = f"≥ {row.least:g}", value >= row.least
        elif row.most is not None:
            must, reached = f"≤ {row.most:g}", value <= row.most
        else:
            continue
        yield what, is_, must, "yes" if reached else "**no**"


def table(lines: Sequence[Line]) -> str:
    """Markdown: what must be reached, and all figures, of what was measured."""
    medians = _Medians(lines)
    figures = [
        [what, *(_number(medians.of(what, pair)) for pair in medians.pairs)]
        for what in dict.fromkeys(row.what for row in ROWS)
        if any(medians.of(what, pair) is not None for pair in medians.pairs)
    ]
    return "\n\n".join(
        [
            "## What must be reached",
            _markdown(["", "is", "must be", "reached"], _required(medians)),
            "## All figures",
            _markdown(["", *map(_name, medians.pairs)], figures),
        ]
    )


def write(files: Sequence[Path]) -> None:
    """The page of these results."""
    lines = read(files)
    runs = [line for line in lines if line["step"] == "run"]
    about = [
        f"- {time.strftime('%Y-%m-%d %H:%M', time.gmtime(run['at']))}: {run['cpus']} cores,"
        f" PostgreSQL {run['postgresql']}"
        f" (fsync {run['fsync']}), {', '.join(f'{name} {number}' for name, number in run['versions'].items())}"
        for run in runs
    ]
    failed = [f"- {line['step']}, {line['peer']}: {line['why']}" for line in lines if line.get("what") == "failed"]
    parts = [INTRODUCTION, *dict.fromkeys(about), "", table(lines), ""]
    PAGE.write_text(
        "\n".join([*parts, *(["## Without a result", "", *failed, ""] if failed else [])]), encoding="utf-8"
    )
