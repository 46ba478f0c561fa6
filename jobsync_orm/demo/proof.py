"""The proof: count everything again in one process, without the library, and compare with what the workers stored."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from sqlalchemy import select
from sqlalchemy.orm import Session

from jobsync_orm.demo import counting
from jobsync_orm.demo.counting import Counts
from jobsync_orm.demo.model import SourceFile

__all__ = ["Proof", "Recount", "prove"]

# So many examples of each kind of fault are named.
SHOWN = 5


@dataclass
class Proof:
    """What was found.

    Attributes
    ----------
    findings : list of str
        What was compared, with the numbers.
    faults : list of str
        What is wrong; empty if the proof holds.
    """

    findings: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def fault(self, what: str, examples: Iterable[str]) -> None:
        """Note a fault, if there are ``examples`` of it."""
        if found := list(examples):
            more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            self.faults.append(f"{len(found)} {what}: {', '.join(found[:SHOWN])}{more}")


class Recount:
    """One process that counts all files by itself, in the background.

    Parameters
    ----------
    root : Path
        Folder of the files.
    paths : iterable of str
        The files, relative to ``root``.
    results : Path
        File for the process to write to.
    """

    def __init__(self, root: Path, paths: Iterable[str], results: Path) -> None:
        self._results = results
        questions = results.with_suffix(".paths")
        questions.write_text(json.dumps(list(paths)))
        with questions.open("rb") as stdin, results.open("wb") as stdout:
            self._process = subprocess.Popen([sys.executable, counting.__file__, str(root)], stdin=stdin, stdout=stdout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def counts(self) -> dict[str, Counts]:
        """The counts of each file, once the process has them all."""
        if code := self._process.wait():
            raise RuntimeError(f"the process that counts again ended with code {code}")
        return {path: Counts(*counts) for path, counts in json.loads(self._results.read_bytes()).items()}


def prove(session: Session, truth: Mapping[str, Counts]) -> Proof:
    """Compare the table with the truth.

    Parameters
    ----------
    session : Session
        The database the workers wrote to.
    truth : mapping of str to Counts
        Each file that was to be done, and what is in it.
    """
    rows = {row.path: row for row in session.scalars(select(SourceFile))}
    proof = Proof()

    proof.fault("files missing from the table", sorted(truth.keys() - rows.keys()))
    proof.fault("rows without a file", sorted(rows.keys() - truth.keys()))
    proof.fault("files not done", (path for path, row in sorted(rows.items()) if row.times_done == 0))
    proof.fault(
        "files done more than once",
        (f"{path} ({row.times_done} times)" for path, row in sorted(rows.items()) if row.times_done > 1),
    )
    once = sum(row.times_done == 1 for row in rows.values())
    proof.findings.append(f"{len(truth)} files, {len(rows)} rows, {once} done exactly once")

    stored = {
        path: Counts(row.lines or 0, row.functions or 0, row.classes or 0, row.error)
        for path, row in rows.items()
        if row.times_done > 0
    }
    proof.fault(
        "files counted wrongly",
        (
            f"{path} (stored {tuple(stored[path])}, is {tuple(truth[path])})"
            for path in sorted(stored.keys() & truth.keys())
            if stored[path] != truth[path]
        ),
    )
    for name in ("lines", "functions", "classes"):
        counted, expected = (sum(getattr(c, name) for c in all_.values()) for all_ in (stored, truth))
        proof.findings.append(f"{expected:,} {name} counted in one process, {counted:,} by the workers")
        if counted != expected:
            proof.faults.append(f"{counted:,} {name} stored instead of {expected:,}")
    if broken := sorted(path for path, counts in truth.items() if counts.error):
        proof.findings.append(
            f"{len(broken)} of the files do not parse (test data) and are recorded so: {', '.join(broken)}"
        )
    return proof
