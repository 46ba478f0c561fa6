"""Who said yes to what, and when: overlaps and gaps per task."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.coordination.cluster import Intervals, Worker

__all__ = ["overlap_and_gap", "yes_until"]

# Sampling leaves a hole of up to two sweeps at each hand-over; only longer ones count as gaps.
GAP_SEC = 0.8


def yes_until(worker: Worker, tasks: int, until: float) -> float | None:
    """When ``worker`` last said yes to anything."""
    return max((end for parts in worker.intervals(tasks, until).values() for _, end in parts), default=None)


def overlap_and_gap(workers: Iterable[Worker], tasks: int, since: float, until: float) -> dict[str, float]:
    """Per task the time within [since, until] with two or more workers, and with none, that said yes.

    Overlap is a lower bound: both have been seen to say yes.
    """
    views = [worker.intervals(tasks, until) for worker in workers]
    spans = [_spans(task, views, since, until) for task in range(tasks)]
    over = [overlap for overlap, _ in spans if overlap > 0]
    gaps = [gap for _, gap in spans if gap > GAP_SEC]
    return {
        "overlap_tasks": len(over),
        "overlap_max_s": round(max(over, default=0.0), 3),
        "gap_tasks": len(gaps),
        "gap_max_s": round(max(gaps, default=0.0), 2),
    }


def _spans(task: int, views: list[Intervals], since: float, until: float) -> tuple[float, float]:
    edges: list[tuple[float, int]] = []
    for view in views:
        for start, end in view[task]:
            a, b = max(start, since), min(end, until)
            if b > a:
                edges += [(a, 1), (b, -1)]
    edges.sort()
    depth, previous, overlap, gap = 0, since, 0.0, 0.0
    for t, step in [*edges, (until, 0)]:
        if depth == 0:
            gap += t - previous
        elif depth > 1:
            overlap += t - previous
        depth, previous = depth + step, t
    return overlap, gap
