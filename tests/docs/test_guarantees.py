"""Each test that a page of the documentation names as evidence is there."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.test_code_blocks import PAGES, ROOT

NAMED = sorted(
    {
        (str(page.relative_to(ROOT)), file, name)
        for page in PAGES
        for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8"))
    }
)


@pytest.mark.parametrize(("page", "file", "name"), NAMED, ids=lambda value: value)
def test_the_named_test_exists(page: str, file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert name.startswith("test_")
    assert name in functions, f"{page} names {file}::{name}"


def test_guarantees_have_evidence() -> None:
    """Each row of a table of promises names at least one test."""
    page = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    tables = re.findall(r"\| promise \|.*?\n\n", page, re.DOTALL)
    rows = [row for table in tables for row in table.strip().splitlines()[2:]]
    assert len(rows) > 15
    assert [row for row in rows if "::test_" not in row] == []
