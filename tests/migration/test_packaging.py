"""The wheel holds the migrations and the dashboard's files, and finds them where there is no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from sqlalchemy import URL, Engine

from jobsync_orm import migrate

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the checkout."""
    pytest.importorskip("build", reason="needs the package 'build'")
    pytest.importorskip("hatchling", reason="needs the package 'hatchling'")
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("needs the checkout")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("jobsync_orm", "migrations"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(source)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(program: str, unpacked: Path, *arguments: str) -> str:
    """Output of a program that sees the wheel and no checkout."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        cwd=unpacked.parent,
        env={**os.environ, "PYTHONPATH": str(unpacked), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_wheel_holds_migrations_and_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    versions = {path.name for path in (ROOT / "migrations" / "versions").glob("*.py")}
    assert "0001_tables.py" in versions
    assert {f"jobsync_orm/_migrations/versions/{name}" for name in versions} <= names
    assert {
        "jobsync_orm/_migrations/env.py",
        "jobsync_orm/_migrations/script.py.mako",
        "jobsync_orm/py.typed",
    } <= names
    static = {path.name for path in (ROOT / "jobsync_orm" / "web" / "static").iterdir()}
    assert {"index.html", "main.js", "dashboard.css"} <= static
    assert {f"jobsync_orm/web/static/{name}" for name in static} <= names
    assert not {name for name in names if name.startswith(("tests/", "migrations/"))}


def test_the_wheels_migrations_are_found(unpacked: Path) -> None:
    program = "import jobsync_orm.migrate as m; print(m.migrations_path(), m.head(), sep='\\n')"
    assert run(program, unpacked).splitlines() == [
        str(unpacked / "jobsync_orm" / "_migrations"),
        migrate.head(),
    ]


def test_the_wheel_upgrades_a_database(unpacked: Path, empty_database: URL, empty: Engine) -> None:
    program = (
        "import sys, sqlalchemy, jobsync_orm.migrate as m\n"
        "engine = sqlalchemy.create_engine(sys.argv[1])\n"
        "m.upgrade(engine, total_tokens=4)\n"
        "print(m.check(engine, total_tokens=4))\n"
        "engine.dispose()"
    )
    assert run(program, unpacked, empty_database.render_as_string(hide_password=False)) == "[]"
    assert migrate.check(empty, total_tokens=4) == []


def test_the_checkouts_migrations_are_found() -> None:
    # The same way an editable install finds them.
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("needs the checkout")
    assert migrate.migrations_path() == ROOT / "migrations"
