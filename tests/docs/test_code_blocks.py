"""Every code block of the README and of the pages in ``docs/`` works as it stands.

``python`` blocks of one page run in order, in one namespace and one process, in an empty folder.
``JOBSYNC_DATABASE_URL`` names an empty database there. In shell blocks each ``make`` target must exist, each
``jobsync-orm`` command line must parse, and each file of this project that a command names must be there.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import URL
from typer.testing import CliRunner

from jobsync_orm.cli import application

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
SHELLS = ("sh", "bash", "shell", "console")

# The page's line numbers stay, so that a traceback names the line of the page.
RUNNER = """
def _run(page, *blocks):
    with open(page, encoding="utf-8") as file:
        lines = file.read().split("\\n")
    for block in blocks:
        first, last, indent = map(int, block.split(","))
        code = "\\n" * first + "\\n".join(line[indent:] for line in lines[first:last]) + "\\n"
        exec(compile(code, page, "exec"), globals())

import sys
_run(*sys.argv[1:])
"""


@dataclass(frozen=True)
class Block:
    """A fenced block: its info string, and the page's lines ``[first, last)``, counted from 0, inside the fences."""

    page: Path
    info: str
    first: int
    last: int
    indent: int

    @property
    def text(self) -> str:
        lines = self.page.read_text(encoding="utf-8").split("\n")[self.first : self.last]
        return "\n".join(line[self.indent :] for line in lines)

    @property
    def language(self) -> str:
        return self.info.split()[0] if self.info else ""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.first}"


def blocks(page: Path) -> Iterator[Block]:
    opened: tuple[str, str, int, int] | None = None
    for number, line in enumerate(page.read_text(encoding="utf-8").split("\n")):
        fence = re.match(r"( *)(`{3,}|~{3,})\s*(.*?)\s*$", line)
        if opened is None:
            if fence:
                opened = (fence[2], fence[3], number + 1, len(fence[1]))
        elif fence and fence[2].startswith(opened[0]) and not fence[3]:
            yield Block(page, opened[1], opened[2], number, opened[3])
            opened = None
    assert opened is None, f"{page.relative_to(ROOT)}:{opened[2] if opened else 0}: the block is never closed"


def commands(block: Block) -> Iterator[list[str]]:
    """The commands of a shell block. In ``console`` blocks only lines with a prompt are commands."""
    text = block.text.replace("\\\n", " ")
    for line in text.split("\n"):
        line = line.strip()
        if block.language == "console":
            if not line.startswith("$ "):
                continue
            line = line[2:]
        for command in re.split(r"&&|\|\||;|\|", line.split(" #")[0]):
            words = shlex.split(command, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words:
                yield words


def targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z0-9_-]*):", makefile, re.MULTILINE))


def complaint(words: list[str]) -> str | None:
    """What is wrong with a command line, or None."""
    program, arguments = Path(words[0]).name, words[1:]
    if program == "make":
        named = [word for word in arguments if not word.startswith("-") and "=" not in word]
        if unknown := sorted(set(named) - targets()):
            return f"the Makefile has no target {', '.join(unknown)}"
    elif program == "jobsync-orm":
        return does_not_parse(arguments)
    elif program in ("python", "python3", "alembic", ".ci/run"):
        # Not the program itself: an environment's is there only once the environment is made.
        files = [word for word in arguments if "/" in word and not word.startswith(("-", "/", "http"))]
        if absent := [file for file in files if "://" not in file and not (ROOT / file).exists()]:
            return f"{', '.join(absent)} is not in the project"
    return None


def does_not_parse(arguments: list[str]) -> str | None:
    """Let the real command line take ``arguments``; ``--help`` keeps it from running anything."""
    result = CliRunner().invoke(application(), [*arguments, "--help"])
    return None if result.exit_code == 0 else result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page: Path, empty_database: URL, tmp_path: Path) -> None:
    python = [block for block in blocks(page) if block.language in ("python", "py", "python3")]
    marked = [f"{block.place}: {block.info!r}" for block in python if block.info != "python"]
    assert not marked, f"write plain ```python, which is run: {marked}"
    if not python:
        return
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, str(page), *(f"{b.first},{b.last},{b.indent}" for b in python)],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JOBSYNC_DATABASE_URL": empty_database.render_as_string(hide_password=False),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{page.relative_to(ROOT)}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_shell_blocks_name_what_exists(page: Path) -> None:
    wrong = [
        f"{block.place}: {shlex.join(words)}: {problem}"
        for block in blocks(page)
        if block.language in SHELLS
        for words in commands(block)
        if (problem := complaint(words))
    ]
    assert not wrong, "\n".join(wrong)


class TestOfTheTest:
    """A check of pages that cannot fail would be worth nothing."""

    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            ("make test", None),
            ("make no-such-target", "no-such-target"),
            ("jobsync-orm db upgrade", None),
            ("jobsync-orm db upgrade --appname shop_ --total-tokens 100", None),
            ("jobsync-orm db upgrade --no-such-option", "no-such-option"),
            ("jobsync-orm no-such-command", "no-such-command"),
            ("jobsync-orm db no-such-command", "no-such-command"),
            ("jobsync-orm demo --workers 4 --seconds 30", None),
            ("jobsync-orm --version", None),
            ("jobsync-orm db --help", None),
            ("python examples/two_terminals.py worker-01", None),
            ("python examples/no_such_example.py", "no_such_example"),
        ],
    )
    def test_command_lines(self, line: str, problem: str | None) -> None:
        found = complaint(shlex.split(line))
        assert found is None if problem is None else found is not None and problem in found, found

    def test_blocks_of_a_page(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        page.write_text(
            "text\n```python\nx = 1\n```\n~~~ sh\nmake test\n~~~\n- list\n  ````console\n  $ make \\\n  demo\n  ```\n"
            "  out\n  ````\n"
        )
        found = list(blocks(page))
        assert [(block.info, block.text) for block in found] == [
            ("python", "x = 1"),
            ("sh", "make test"),
            ("console", "$ make \\\ndemo\n```\nout"),
        ]
        assert list(commands(found[2])) == [["make", "demo"]]

    def test_block_that_raises_names_its_line(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        page.write_text("```python\nx = 1\n```\n\n```python\ny = x\n1 / 0\n```\n")
        spans = [f"{block.first},{block.last},{block.indent}" for block in blocks(page)]
        done = subprocess.run(
            [sys.executable, "-c", RUNNER, str(page), *spans], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert f'"{page}", line 7' in done.stderr
