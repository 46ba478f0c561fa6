"""Render result lines as a page.

    python -m benchmarks.report [RESULTS.jsonl ...]

Without arguments the newest file in ``benchmarks/results`` is taken; several files are taken together.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import ROWS, Line, Row

__all__ = ["PAGE", "failures", "read", "render", "table", "write"]

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs") / "benchmarks.md"

INTRODUCTION = """# Benchmarks

Written by `make bench`; do not edit. This library and the original, `jobsync`, in the same scenarios, on one machine,
in one run, in turn or (where a scenario mostly waits) at the same time on databases of their own. Each scenario is a
module of `benchmarks/coordination`, and says in its docstring what it measures.

The first number is the median of the trials, or their worst where the row says so; the range follows where there is
more than one. "never" is longer than the scenario watches. Workers ask for 2,000 tasks with `can_claim_task` every
0.1 s, so times have that grain, and an overlap is a lower bound.
"""


def read(files: Iterable[Path]) -> list[Line]:
    lines: list[Line] = []
    for file in files:
        with file.open(encoding="utf-8") as source:
            lines += [json.loads(line) for line in source]
    return lines


def number(value: float) -> str:
    if value == math.inf:
        return "never"
    if value >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def middle(row: Row, values: Sequence[float]) -> float | None:
    if not values:
        return None
    return max(values) if row.worst else statistics.median(values)


def cell(row: Row, values: Sequence[float]) -> str:
    if not values:
        return "–"
    chosen = middle(row, values)
    assert chosen is not None
    text = number(chosen) + (f" {row.unit}" if row.unit and chosen != math.inf else "")
    if len(values) > 1 and not row.worst and min(values) != max(values):
        text += f" ({number(min(values))} – {number(max(values))})"
    return text


def ratio(ours: float | None, original: float | None) -> str:
    if ours is None or original is None or math.inf in (ours, original) or not original:
        return "–"
    return f"{ours / original:.3g}"


def render_row(row: Row, lines: Sequence[Line]) -> str:
    originals, ours = row.values(lines, "original"), row.values(lines, "ours")
    theirs, mine = middle(row, originals), middle(row, ours)
    reached = None if mine is None else row.reached(mine, theirs)
    verdict = {True: "yes", False: "**no**", None: "–"}[reached]
    cells = (
        row.title, cell(row, originals), cell(row, ours), ratio(mine, theirs), row.target, verdict,
        f"{len(originals)} / {len(ours)}", f"`{row.command}`",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def table(lines: Sequence[Line], only: Sequence[str] = ()) -> str:
    """The rows for which there are results; with ``only``, those whose sole source these steps are."""
    # A row beside another mode of the original makes sense only where that has been measured.
    rows = [
        row
        for row in ROWS
        if (row.values(lines, "ours") or row.values(lines, "original"))
        and (row.original_steps is None or row.values(lines, "original"))
        and (not only or set(row.steps) <= set(only))
    ]
    head = [
        "| scenario | original | ours | ours / original | must reach | reached | trials | command |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *(render_row(row, lines) for row in rows)])


def render(lines: Sequence[Line]) -> str:
    """The page."""
    parts = [INTRODUCTION, *_circumstances(lines), "", table(lines), "", *failures(lines), *_remarks(lines)]
    return "\n".join(parts)


def _circumstances(lines: Sequence[Line]) -> list[str]:
    out = []
    for run in (line for line in lines if line["scenario"] == "run"):
        day = time.strftime("%Y-%m-%d", time.gmtime(run["at"]))
        counted = "" if run["statements_counted"] else ", without pg_stat_statements: no statements, no WAL"
        out.append(
            f"- {day}, a {run['mode']} run: {run['cpus']} × {run['cpu']}, {run['memory_gib']} GiB, {run['system']}, "
            f"Python {run['python']}, PostgreSQL {run['postgresql']} (fsync {run['fsync']}){counted}; load before the "
            f"run {run['load_before']}"
        )
    versions = sorted({(line["package"], line["version"]) for line in lines if "package" in line})
    if versions:
        out.append("- " + ", ".join(f"{package} {version}" for package, version in versions))
    return out


def failures(lines: Sequence[Line]) -> list[str]:
    failed = Counter((f["step"], f["library"], f["why"]) for f in lines if f["scenario"] == "failed")
    if not failed:
        return []
    rows = [f"- {step}, {library}, {count} ×: {why}" for (step, library, why), count in sorted(failed.items())]
    return ["## Trials without a result", "", *rows, ""]


def _remarks(lines: Sequence[Line]) -> list[str]:
    """What the numbers alone do not say."""
    out: list[str] = []

    def latest(library: str, **where: Any) -> Line | None:
        found = [e for e in lines if e.get("library") == library and all(e.get(k) == v for k, v in where.items())]
        return found[-1] if found else None

    if load := latest("ours", step="load"):
        each = ", ".join(f"{node} {rate:g}" for node, rate in load["per_min"].items())
        out.append(
            f"- Statements per minute, ours, by worker: {each}. The leader asks more often than a follower, and so "
            "does the next in line; all others cost as little as the least."
        )
    if planning := latest("ours", step="planning", nodes="2->3"):
        around = ", ".join(f"{name} {ms:g} ms" for name, ms in planning["around_cpu_ms"].items())
        out.append(f"- Around the plan for 1,000,000 tokens, ours, CPU: {around}.")
    if query := latest("ours", step="owned-by"):
        ways = ", ".join(f"{name} {ms:g}" for name, ms in query["median_ms"].items())
        out.append(f"- `owned_by`, milliseconds by way of fetching: {ways}.")
    if startup := latest("original", step="startup"):
        errors = startup["errors"] or "none"
        out.append(f"- 30 at once, the original: {startup['live_at_end']} alive at the end; errors: {errors}.")
    return ["## Remarks", "", *out, ""] if out else []


def write(files: Iterable[Path]) -> None:
    (ROOT / PAGE).write_text(render(read(files)), encoding="utf-8")


def main() -> None:
    files = [Path(name) for name in sys.argv[1:]]
    if not files:
        files = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))[-1:]
    if not files:
        raise SystemExit("no results yet: run `make bench`")
    write(files)


if __name__ == "__main__":
    main()
