"""``jobsync-orm doctor``: what is not as it should be, why that matters, and what to do."""

from __future__ import annotations

from typing import Annotated

import typer

from jobsync_orm.cli.connection import Cluster, on_cluster
from jobsync_orm.cli.durations import duration
from jobsync_orm.cli.output import NO, Marked, Part
from jobsync_orm.operate.doctor import Diagnosis, Limits, Severity, Subject, examine
from jobsync_orm.operate.doctor.findings import TRANSACTION_SEC

__all__ = ["doctor"]

COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


@on_cluster
def doctor(
    cluster: Cluster,
    role: Annotated[
        str | None, typer.Option(help="The workers' role, whose rights to check; this one if not given.")
    ] = (None),
    total_tokens: Annotated[int | None, typer.Option(help="What the workers' configuration says.")] = None,
    hash_function: Annotated[str | None, typer.Option(help="What the workers' configuration says.")] = None,
    transactions: Annotated[
        float,
        typer.Option("--transactions-older-than", parser=duration, metavar="AGE", help="Name such ones: 10m, 1h."),
    ] = TRANSACTION_SEC,
) -> None:
    """Look for what is wrong, and say what to do; exit with 1 if there is anything worse than a note."""
    subject = Subject(
        cluster.engine, cluster.names, role, total_tokens, hash_function, Limits(transaction_sec=transactions)
    )
    found = examine(subject)
    cluster.output.show(found, *_lines(found))
    if not found.healthy:
        raise typer.Exit(NO)


def _lines(found: Diagnosis) -> list[Part]:
    lines: list[Part] = []
    for finding in found.findings:
        what = f" {finding.check}: {finding.what}"
        lines += [Marked(f"{finding.severity:<8}", COLOURS[finding.severity], what), f"         why  {finding.why}"]
        lines += [f"         do   {finding.remedy}", ""]
    if found.skipped:
        lines.append(f"not checked, until the tables are right: {', '.join(found.skipped)}")
    counts = ", ".join(
        f"{number} {severity}{'s' if number > 1 else ''}"
        for severity in Severity
        if (number := sum(finding.severity is severity for finding in found.findings))
    )
    return [*lines, f"{len(found.checks)} checks: {counts or 'nothing found'}"]
