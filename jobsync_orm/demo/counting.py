"""The demo's work: parse a source file and count what is in it.

It needs nothing but the standard library, and neither does the process that counts all files for the proof: it runs
this file as a script, ``python counting.py FOLDER``, with the paths as JSON on stdin and the counts as JSON on stdout.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import sys
import sysconfig
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Counts", "count", "count_all", "source_files", "standard_library"]

_NOT_ITS_OWN = {"site-packages", "dist-packages"}


class Counts(NamedTuple):
    """What is known of a file. ``error`` names why it could not be parsed; functions and classes are then 0."""

    lines: int
    functions: int
    classes: int
    error: str | None


def count(source: bytes) -> Counts:
    """Parse a source file and count its lines, functions (methods too) and classes."""
    lines = len(source.splitlines())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        return Counts(lines, 0, 0, type(error).__name__)
    nodes = [type(node) for node in ast.walk(tree)]
    functions = nodes.count(ast.FunctionDef) + nodes.count(ast.AsyncFunctionDef)
    return Counts(lines, functions, nodes.count(ast.ClassDef), None)


def standard_library() -> Path:
    """Folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def source_files(root: Path, limit: int | None = None) -> list[str]:
    """Paths of the source files below ``root``, relative to it, ascending; ``limit`` of them, evenly spread."""
    files = (path.relative_to(root) for path in root.rglob("*.py") if path.is_file())
    paths = sorted(path.as_posix() for path in files if not _NOT_ITS_OWN.intersection(path.parts))
    if limit is None or limit >= len(paths):
        return paths
    return [paths[i * len(paths) // limit] for i in range(limit)]


def count_all(root: Path, paths: Iterable[str]) -> dict[str, Counts]:
    """Counts of each of the files ``paths`` below ``root``."""
    return {path: count(Path(root, path).read_bytes()) for path in paths}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the demo, which ends this process
    os.nice(10)  # beside the workers, not before them
    json.dump(count_all(Path(sys.argv[1]), json.load(sys.stdin)), sys.stdout)
