"""What ``jobsync-orm top`` draws: one frame, for any size of the terminal.   (pure)"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass

from rich.text import Text

from jobsync_orm.cli.output import age
from jobsync_orm.cli.plot import bar, columns
from jobsync_orm.models.states import JobState
from jobsync_orm.operate.happenings import Happenings
from jobsync_orm.operate.picture import NodeStatus
from jobsync_orm.operate.watching import Look
from jobsync_orm.terminal import one_line
from jobsync_orm.wording import counted

__all__ = ["Frame", "lines"]

# From this width on the queue stands beside the nodes.
WIDE = 130

STYLES = {"live": "green", "joining": "yellow", "cut off": "bold red", "silent": "bold red", "away": "dim"}
ALERT, HEAD, DIM = "bold red", "bold", "dim"
SHOWN_STATES = (JobState.PENDING, JobState.PROCESSING, JobState.SCHEDULED, JobState.RETRYING, JobState.BLOCKED)
ALWAYS_SHOWN = (JobState.PENDING, JobState.PROCESSING)
PLOT_LINES = 4
NAME_MOST = 24


@dataclass(frozen=True, slots=True)
class Frame:
    """All that is drawn at one moment.

    Attributes
    ----------
    look : Look
    happenings : Happenings
        What was seen until then.
    stale_sec : float
        How old the look is.
    error : str or None
        Why there is no newer one.
    paused : bool
        Whether the reader has stopped the picture.
    keys : str
        The last line.
    """

    look: Look
    happenings: Happenings
    stale_sec: float = 0.0
    error: str | None = None
    paused: bool = False
    keys: str = ""


def lines(frame: Frame, width: int, height: int) -> list[Text]:
    """The frame as ``height`` lines, none wider than ``width``."""
    head = list(_head(frame, width))
    foot = [Text(frame.keys, DIM)] if frame.keys else []
    room = max(0, height - len(head) - len(foot))
    body = _wide(frame, width, room) if width >= WIDE else _narrow(frame, width, room)
    body = body[:room] + [Text()] * (room - len(body))
    drawn = [*head, *body, *foot][:height]
    for line in drawn:
        line.truncate(width, overflow="ellipsis")
    return drawn


def _head(frame: Frame, width: int) -> Iterator[Text]:
    cluster, tokens = frame.look.cluster, frame.look.cluster.tokens
    name = cluster.appname if cluster.schema is None else f"{cluster.schema}.{cluster.appname}"
    first = Text(f"jobsync-orm  {one_line(name)}  ", HEAD)
    first.append(f"{cluster.at.astimezone():%H:%M:%S}  ", "not bold")
    first.append("healthy" if cluster.healthy else "NOT HEALTHY", "bold green" if cluster.healthy else ALERT)
    if frame.paused:
        first.append("  PAUSED", "bold yellow")
    yield first
    if frame.error is not None:
        yield Text(f"no answer for {age(frame.stale_sec)}: {one_line(frame.error)}", ALERT)
    yield Text(
        f"leader {one_line(cluster.leader or '-')}  epoch {cluster.epoch}  nodes {len(cluster.nodes)}  tokens "
        f"{tokens.owned}/{tokens.total} owned, {tokens.draining} moving, {tokens.parked} parked"
    )
    shown = cluster.problems[:3] if len(cluster.problems) <= 3 else cluster.problems[:2]
    for problem in shown:
        yield Text(f"! {one_line(problem)}", ALERT)
    if len(cluster.problems) > len(shown):
        yield Text(
            f"! and {counted(len(cluster.problems) - len(shown), 'problem', 'problems')} more: jobsync-orm status",
            ALERT,
        )
    yield Text("─" * width, DIM)


def _narrow(frame: Frame, width: int, room: int) -> list[Text]:
    queue = _queue(frame, width)
    events = min(6, max(2, room // 4))
    nodes = _nodes(frame, width, max(3, room - len(queue) - events - 2))
    rest = max(0, room - len(nodes) - len(queue) - 2)
    rule = [Text("─" * width, DIM)]
    return [*nodes, *rule, *queue, *rule, *_events(frame, width, rest)]


def _wide(frame: Frame, width: int, room: int) -> list[Text]:
    left = width * 11 // 20
    right = width - left - 3
    queue = _queue(frame, right)
    beside = [*queue, Text("─" * right, DIM), *_events(frame, right, max(0, room - len(queue) - 1))]
    nodes = _nodes(frame, left, room)
    both = []
    for place in range(min(room, max(len(nodes), len(beside)))):
        line = nodes[place] if place < len(nodes) else Text()
        line.truncate(left, overflow="ellipsis", pad=True)
        line.append(" │ ", DIM)
        both.append(line + (beside[place] if place < len(beside) else Text()))
    return both


def _nodes(frame: Frame, width: int, room: int) -> list[Text]:
    cluster, gone = frame.look.cluster, frame.happenings.gone
    order = sorted(cluster.nodes, key=lambda node: node.condition not in ("cut off", "silent"))
    names = [node.name for node in order] + list(gone)
    name_width = min(NAME_MOST, max([len("node"), *(len(name) + 2 for name in names)]))
    bars = max(0, min(24, width - name_width - 44))
    most = max((node.tokens.owned for node in cluster.nodes), default=0)
    drawn = [Text(f"{'node':<{name_width}} {'condition':<9} {'lease':>13} {'tokens':>7} {'moving':>11}", HEAD)]
    rows = [_node(node, name_width, bars, most) for node in order]
    rows += [
        Text(
            f"{_cut(one.name, name_width)} {'dead' if one.dead else 'left':<9} "
            f"{age((cluster.at - one.at).total_seconds()) + ' ago':>13}",
            "red" if one.dead else DIM,
        )
        for one in gone.values()
        if one.name not in {node.name for node in cluster.nodes}
    ]
    space = max(1, room - 1)
    if len(rows) > space:
        rows = [*rows[: space - 1], Text(f"... and {len(rows) - space + 1} more", DIM)]
    return drawn + (rows or [Text("no nodes", DIM)])


def _node(node: NodeStatus, name_width: int, bars: int, most: int) -> Text:
    style = STYLES[node.condition]
    line = Text(_cut(node.name + (" *" if node.leader else ""), name_width), style)
    condition = "drained" if node.drained and node.condition == "live" else node.condition
    line.append(f" {condition:<9}")
    left = bar(node.lease_left_sec / node.heartbeat_timeout_sec if node.heartbeat_timeout_sec else 0, 5)
    line.append(f" {left} {age(node.lease_left_sec):>7}")
    moving = (f"-{node.tokens.leaving} " if node.tokens.leaving else "") + (
        f"+{node.tokens.coming}" if node.tokens.coming else ""
    )
    line.append(f" {node.tokens.owned:>7} {moving.strip():>11} ")
    line.append(bar(node.tokens.owned / most if most else 0, bars), "cyan")
    return line


def _queue(frame: Frame, width: int) -> list[Text]:
    queue, paused = frame.look.queue, frame.look.paused
    first = Text("queue  ", HEAD)
    for state in SHOWN_STATES:
        number = queue.counts.get(state, 0)
        if not number and state not in ALWAYS_SHOWN:
            continue
        about = "~" if state in queue.estimated else ""
        style = "yellow" if state is JobState.RETRYING and number else "not bold" if number else "not bold dim"
        first.append(f"{state} {about}{number}  ", style)
    second = Text(f"oldest ready {age(queue.oldest_pending_sec)}")
    for pause in paused:
        second.append(f"  {'ALL' if pause.type is None else one_line(pause.type)} paused", "yellow")
    space = max(1, width - 9)
    seconds = frame.happenings.per_second(frame.look.cluster.at, space)
    done = [completed for completed, _ in seconds]
    lately = seconds[-10:]
    most = max(done, default=0)
    now, failed = (sum(pair[which] for pair in lately) / max(1, len(lately)) for which in (0, 1))
    second.append(f"  completed {now:.1f}/s  ")
    second.append(f"failed {failed:.1f}/s", "red" if failed else DIM)
    second.append(f"  (10 s; plot {age(float(space))})", DIM)
    plot = columns(done, space, PLOT_LINES, float(max(most, 1)))
    labels = [f"{most:>6}/s"] + [""] * (PLOT_LINES - 2) + [f"{0:>6}/s"]
    return [
        first,
        second,
        *(Text(f"{label:<8} ") + Text(line, "cyan") for label, line in zip(labels, plot, strict=True)),
    ]


def _events(frame: Frame, width: int, room: int) -> list[Text]:
    """What has happened: what was seen, and the plans of the leader, newest first."""
    told: list[tuple[datetime.datetime, str, str]] = [
        (event.at, event.what, "red" if event.grave else "") for event in frame.happenings.events
    ]
    told += [
        (
            plan.triggered_at,
            f"rebalance ({plan.reason}): {counted(plan.tokens_moved, 'token', 'tokens')}, {plan.nodes_before} -> "
            f"{counted(plan.nodes_after, 'node', 'nodes')}",
            DIM,
        )
        for plan in frame.look.rebalances
    ]
    told.sort(key=lambda one: one[0], reverse=True)
    drawn = [Text(f"{at.astimezone():%H:%M:%S}  {one_line(what)}", style) for at, what, style in told]
    return (drawn or [Text("nothing has happened yet", DIM)])[:room]


def _cut(text: str, width: int) -> str:
    shown = one_line(text)
    return f"{shown[: width - 1]}\N{HORIZONTAL ELLIPSIS}" if len(shown) > width else f"{shown:<{width}}"
