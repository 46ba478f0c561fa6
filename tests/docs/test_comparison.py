"""Figures of the comparison that are said to be of a page of benchmarks are on that page."""

from __future__ import annotations

import re

import pytest

from tests.docs.test_code_blocks import ROOT

DOCS = ROOT / "docs"
PAGE = (DOCS / "comparison.md").read_text(encoding="utf-8")
SOURCES = {name: (DOCS / name).read_text(encoding="utf-8") for name in ("benchmarks.md", "benchmarks-queue.md")}

# A whole number with thousands or decimals, as the benchmarks write them.
NUMBER = r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?![\w])"


def figures() -> list[tuple[str, str]]:
    """Each figure in a row whose last cell is a link to a source, with that source."""
    found = []
    for row in re.findall(r"^\|.*\|$", PAGE, re.MULTILINE):
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        source = re.fullmatch(r"\[[CQ]\]\(([\w.-]+)\) ?", cells[-1])
        if source is not None:
            found += [(source[1], number) for cell in cells[1:-1] for number in re.findall(NUMBER, cell)]
    return found


def cells_of(page: str) -> set[str]:
    return {number for row in re.findall(r"^\|.*\|$", page, re.MULTILINE) for number in re.findall(NUMBER, row)}


@pytest.mark.parametrize("source", SOURCES)
def test_figures_are_those_of_their_source(source: str) -> None:
    named = {number for page, number in figures() if page == source}
    assert len(named) > 8
    assert named <= cells_of(SOURCES[source]), "a benchmark has been run again: write its figures here"


def test_figures_in_the_text() -> None:
    for number, source in re.findall(rf"({NUMBER}) on that machine \(\[[CQ]\]\(([\w.-]+)\)\)", PAGE):
        assert number in cells_of(SOURCES[source])


@pytest.mark.parametrize("what", ["jobsync 1.3.14", "pgqueuer 1.6.0", "procrastinate 3.10.0", "PostgreSQL 15.20"])
def test_what_was_measured(what: str) -> None:
    assert any(what in source for source in SOURCES.values())
    assert what.lower().replace("jobsync ", "") in PAGE.lower().replace("`", "")
