"""The page on dependencies names what ``pyproject.toml`` requires, each in its place, and nothing else."""

from __future__ import annotations

import re
import tomllib

from tests.docs.test_code_blocks import ROOT

PAGE = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

FOR_THE_PROJECT = ("test", "docs", "dev", "bench")

# What an extra asks of a package that is installed anyway is said by what comes with it, or in the text.
BROUGHT: dict[str, set[str]] = {"binary": set(), "async": {"greenlet"}}
NUMBERS = {"two": 2, "three": 3, "four": 4, "six": 6, "eight": 8}


def name_of(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return found[0].lower()


def required(extra: str) -> set[str]:
    """What the extra brings itself, without the library's other extras."""
    if extra in BROUGHT:
        return BROUGHT[extra]
    names = {name_of(one) for one in EXTRAS[extra]}
    return names - {"jobsync-orm", *map(name_of, PROJECT["dependencies"])}


def rows(title: str) -> list[list[str]]:
    section = re.search(rf"^## {title}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert section is not None, title
    lines = [line for line in section[1].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def packages(cell: str) -> list[str]:
    plain = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", cell)
    return [name_of(part.strip()) for part in plain.split(",")]


def test_what_is_installed_always() -> None:
    listed = [package for row in rows("Installed always") for package in packages(row[0])]
    assert listed == [name_of(one) for one in PROJECT["dependencies"]]


def test_each_extra() -> None:
    listed: dict[str, set[str]] = {}
    for row in rows("Extras"):
        extra = re.search(r"`([\w-]+)`", row[1])
        assert extra is not None, row
        listed.setdefault(extra[1], set()).update(packages(row[0]))
    expected = {extra: required(extra) for extra in EXTRAS if extra not in FOR_THE_PROJECT}
    assert listed == {extra: names for extra, names in expected.items() if names}


def test_what_the_project_needs() -> None:
    listed = [package for row in rows("For working on the project") for package in packages(row[0])]
    assert len(listed) == len(set(listed))
    extra = {"greenlet", "pip-audit"}  # the one comes with the extra "async", the other is installed by "make audit"
    assert "pip-audit" in MAKEFILE
    assert set(listed) == set().union(*map(required, FOR_THE_PROJECT)) | extra


def test_in_how_many_processes_the_tests_run() -> None:
    command = re.search(r"^test:.*\n\t.*pytest -n (\d+)", MAKEFILE, re.MULTILINE)
    said = re.search(r"runs the suite in (\w+) processes, for `make test`", PAGE)
    assert command is not None
    assert said is not None
    assert NUMBERS[said[1]] == int(command[1])


def test_the_oldest_sqlalchemy() -> None:
    (requirement,) = [one for one in PROJECT["dependencies"] if one.startswith("sqlalchemy")]
    oldest = re.search(r">=([\d.]+)", requirement)
    assert oldest is not None
    assert f"{oldest[1]} or newer" in PAGE
