"""The demo: it runs, it proves, its proof can fail, and it leaves nothing behind."""

from __future__ import annotations

import ast
import datetime
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from sqlalchemy import URL, Engine, create_engine, delete, insert, inspect, update
from sqlalchemy.orm import Session

from jobsync_orm import migrate
from jobsync_orm.demo.cluster import Snapshot
from jobsync_orm.demo.counting import Counts, count, count_all, source_files, standard_library
from jobsync_orm.demo.fleet import Fleet, Member, WorkerError
from jobsync_orm.demo.model import SCHEMA, Base, SourceFile
from jobsync_orm.demo.proof import Recount, prove
from jobsync_orm.demo.view import PlainView, TerminalView
from jobsync_orm.demo.worker import HEARTBEAT_TIMEOUT

COMMAND = [str(Path(sys.executable).with_name("jobsync-orm")), "demo"]


def play(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=280, check=False)


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def text_url(url: URL) -> str:
    return url.render_as_string(hide_password=False)


class TestCommand:
    @pytest.mark.slow
    def test_proves_that_every_file_was_done_once(self, empty_database: URL) -> None:
        url = text_url(empty_database)
        done = play("--workers", "3", "--files", "150", "--seconds", "16", "--url", url)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = done.stdout.splitlines()
        truth = count_all(standard_library(), source_files(standard_library(), 150))
        functions = sum(counts.functions for counts in truth.values())
        assert "  150 files, 150 rows, 150 done exactly once" in lines
        assert f"  {functions:,} functions counted in one process, {functions:,} by the workers" in lines
        assert lines[-1] == "PROVED: every file done exactly once, none missing, totals equal"
        for what, moved in (
            (r"worker-\d, the leader, is killed \(SIGKILL\)", r"3,33[34]"),
            (r"worker-4 joins", r"3,33[34]"),
            (r"worker-\d is paused in the middle of a file \(SIGSTOP\)", r"3,33[34]"),
            (r"worker-\d goes on after \d+\.\d s \(SIGCONT\)", r"3,33[34]"),
            (r"worker-\d leaves \(SIGTERM\)", r"3,33[34]"),
        ):
            wanted = rf"  {what} with (\d+) of 150 files done: {moved} tokens moved, recovered in \d+\.\d\d s"
            found = [match for line in lines if (match := re.fullmatch(wanted, line))]
            assert len(found) == 1, (what, done.stdout)
            assert 0 < int(found[0][1]) < 150
        paused = next(re.search(r"after (\d+\.\d) s \(SIGCONT\)", line) for line in lines if "SIGCONT" in line)
        assert paused is not None
        assert float(paused[1]) >= HEARTBEAT_TIMEOUT
        late = [line for line in lines if re.search(r"worker-\d had begun before, .*\.py, was refused", line)]
        assert len(late) == 1, done.stdout
        engine = create_engine(empty_database)
        assert SCHEMA not in inspect(engine).get_schema_names()
        engine.dispose()

    @pytest.mark.slow
    def test_fails_if_nothing_happened_while_there_was_work(self, empty_database: URL) -> None:
        done = play("--workers", "2", "--files", "2", "--seconds", "0", "--url", text_url(empty_database))
        assert done.returncode == 1, done.stdout + done.stderr
        assert "joins only after all files were done" in done.stdout
        assert done.stdout.splitlines()[-1] == "FAILED"

    def test_ctrl_c_leaves_no_process_and_no_server(self) -> None:
        with subprocess.Popen(
            [*COMMAND, "--files", "150"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            folder = Path(first.removeprefix("PostgreSQL started in ").split("/pg in ")[0])
            server = int((folder / "pg" / "postmaster.pid").read_text().splitlines()[0])
            while not process.stdout.readline().startswith("3 workers start"):
                pass
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            _, errors = process.communicate(timeout=120)
        assert process.returncode == 130, errors
        assert "nothing is left behind" in errors
        assert not folder.exists()
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
        # pg_ctl returns when the server has removed its pid file, which is the last it does before it ends.
        deadline = time.monotonic() + 60
        while exists(server):
            assert time.monotonic() < deadline, "the server runs on"
            time.sleep(0.02)

    def test_refuses_a_database_in_which_another_demo_runs(self, empty_database: URL) -> None:
        engine = create_engine(empty_database)
        with engine.begin() as connection:
            connection.exec_driver_sql(f"CREATE SCHEMA {SCHEMA}")
        done = play("--files", "2", "--url", text_url(empty_database))
        assert done.returncode == 2
        assert f"DROP SCHEMA {SCHEMA} CASCADE" in done.stderr
        assert SCHEMA in inspect(engine).get_schema_names()
        engine.dispose()

    def test_unreachable_database_is_one_line(self) -> None:
        done = play("--url", "postgresql://nobody@127.0.0.1:1/none")
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr


class TestFleet:
    def test_worker_that_fails_shows_its_error(self, empty_database: URL, tmp_path: Path) -> None:
        with Fleet(empty_database, 0.01, tmp_path) as fleet:
            member = fleet.start()
            member.process.wait(120)
            with pytest.raises(WorkerError, match=r"(?s)worker-1 ended with code 1 while working:.*SchemaNotReady"):
                fleet.check()

    def test_ends_what_still_runs(self, empty_database: URL, tmp_path: Path) -> None:
        with Fleet(empty_database, 0.01, tmp_path) as fleet:
            member = fleet.start()
        assert member.process.poll() is not None


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with two source files and one that is none."""
    (tmp_path / "a.py").write_text("def f():\n    pass\n")
    (tmp_path / "b.py").write_text("class C:\n    async def g(self): ...\n    def h(self): ...\n")
    (tmp_path / "bad.py").write_text("print 'two'\n")
    return tmp_path


@pytest.fixture
def played(empty_database: URL, root: Path) -> Iterator[Engine]:
    """A database as it is after a demo on ``root`` that went well."""
    engine = create_engine(empty_database)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {SCHEMA}")
    migrate.upgrade(engine, schema=SCHEMA, total_tokens=100)
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(
            insert(SourceFile),
            [
                {"path": path, "done_by": "worker-1", "times_done": 1, **counts._asdict()}
                for path, counts in count_all(root, source_files(root)).items()
            ],
        )
    yield engine
    engine.dispose()


class TestProof:
    def test_holds(self, played: Engine, root: Path) -> None:
        with Session(played) as session:
            proof = prove(session, count_all(root, source_files(root)))
        assert proof.faults == []
        assert proof.findings == [
            "3 files, 3 rows, 3 done exactly once",
            "6 lines counted in one process, 6 by the workers",
            "3 functions counted in one process, 3 by the workers",
            "1 classes counted in one process, 1 by the workers",
            "1 of the files do not parse (test data) and are recorded so: bad.py",
        ]

    @pytest.mark.parametrize(
        ("change", "faults"),
        [
            (
                update(SourceFile).where(SourceFile.path == "a.py").values(functions=2),
                [
                    "1 files counted wrongly: a.py (stored (2, 2, 0, None), is (2, 1, 0, None))",
                    "4 functions stored instead of 3",
                ],
            ),
            (
                update(SourceFile).where(SourceFile.path == "b.py").values(times_done=2),
                ["1 files done more than once: b.py (2 times)"],
            ),
            (
                update(SourceFile).where(SourceFile.path == "bad.py").values(error=None),
                ["1 files counted wrongly: bad.py (stored (1, 0, 0, None), is (1, 0, 0, 'SyntaxError'))"],
            ),
            (
                update(SourceFile).where(SourceFile.path == "bad.py").values(times_done=0),
                ["1 files not done: bad.py", "5 lines stored instead of 6"],
            ),
            (
                delete(SourceFile).where(SourceFile.path == "bad.py"),
                ["1 files missing from the table: bad.py", "5 lines stored instead of 6"],
            ),
            (
                insert(SourceFile).values(path="new.py", times_done=1, lines=0, functions=0, classes=0),
                ["1 rows without a file: new.py"],
            ),
        ],
        ids=["count", "twice", "error", "undone", "missing", "extra"],
    )
    def test_fails_after_tampering(self, played: Engine, root: Path, change: object, faults: list[str]) -> None:
        with Session(played) as session:
            session.execute(change)  # type: ignore[call-overload]
            assert prove(session, count_all(root, source_files(root))).faults == faults

    def test_recount_is_a_process_without_the_library(self, root: Path, tmp_path: Path) -> None:
        from jobsync_orm.demo import counting

        imported = {
            name.name
            for node in ast.walk(ast.parse(Path(counting.__file__).read_text()))
            if isinstance(node, ast.Import)
            for name in node.names
        } | {
            node.module
            for node in ast.walk(ast.parse(Path(counting.__file__).read_text()))
            if isinstance(node, ast.ImportFrom)
        }
        assert {str(name).split(".")[0] for name in imported} <= sys.stdlib_module_names
        with Recount(root, ["a.py", "bad.py"], tmp_path / "recount.json") as recount:
            assert recount.counts() == {"a.py": Counts(2, 1, 0, None), "bad.py": Counts(1, 0, 0, "SyntaxError")}


class TestCounting:
    def test_counts(self) -> None:
        source = b"import x\n\nclass A:\n    class B:\n        def f(self):\n            def g(): ...\nlambda: 0\n"
        assert count(source) == Counts(7, 2, 2, None)

    def test_null_bytes_are_recorded(self) -> None:
        assert count(b"a = 1\0\n").error in ("ValueError", "SyntaxError")

    def test_files_are_those_of_the_library_itself(self, tmp_path: Path) -> None:
        for name in ("x.py", "site-packages/y.py", "p/z.py", "p/data.txt", "p/q/w.py"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        assert source_files(tmp_path) == ["p/q/w.py", "p/z.py", "x.py"]
        assert source_files(tmp_path, 2) == ["p/q/w.py", "p/z.py"]
        assert source_files(tmp_path, 9) == source_files(tmp_path)

    def test_standard_library_is_found(self) -> None:
        assert "json/__init__.py" in source_files(standard_library())


class TestView:
    @pytest.fixture
    def member(self) -> Iterator[Member]:
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            yield Member("worker-1", process)

    @staticmethod
    def snapshot(done: int) -> Snapshot:
        noon = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
        return Snapshot({"worker-1": noon}, {0: "worker-1", 1: "worker-1"}, 0, noon, {"worker-1": done}, 20)

    def test_plain_lines_at_each_tenth(self, member: Member) -> None:
        out = io.StringIO()
        with PlainView(Console(file=out, width=20)) as view:
            for done in (0, 1, 2, 3, 7):
                view.show(self.snapshot(done), [member])
            view.say("[worker] said")
        assert out.getvalue().splitlines() == [
            "  10 %  2 of 20 files done; worker-1 2 tokens, 2 files",
            "  35 %  7 of 20 files done; worker-1 2 tokens, 7 files",
            "[worker] said",
        ]

    def test_table_in_a_terminal(self, member: Member) -> None:
        out = io.StringIO()
        with TerminalView(Console(file=out, force_terminal=True, width=100)) as view:
            view.show(self.snapshot(7), [member])
            view.say("[worker] said")
        shown = out.getvalue()
        assert re.search(rf"worker-1.*{member.process.pid}.*working, leads.*2.*7", shown)
        assert "7 of 20 files done, 35 %" in shown
        assert "[worker] said" in shown


class TestSnapshot:
    noon = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)

    def make(self, nodes: str, owners: list[str | None], moving: int = 0) -> Snapshot:
        return Snapshot(dict.fromkeys(nodes, self.noon), dict(enumerate(owners)), moving, self.noon, {}, 0)

    @pytest.mark.parametrize(
        ("nodes", "owners", "moving", "settled"),
        [
            ("ab", ["a", "b", "a"], 0, True),
            ("ab", ["a", "b", "a"], 1, False),
            ("ab", ["a", "a", "a", "b"], 0, False),
            ("ab", ["a", "b", None], 0, False),
            ("abc", ["a", "b", "a"], 0, False),
            ("a", ["a", "a", "b"], 0, False),
            ("ab", ["a", "a"], 0, False),
        ],
        ids=["even", "moving", "uneven", "unowned", "third node", "dead owner", "without tokens"],
    )
    def test_settled(self, nodes: str, owners: list[str | None], moving: int, settled: bool) -> None:
        assert self.make(nodes, owners, moving).is_settled("ab") is settled

    def test_moved(self) -> None:
        before = self.make("ab", ["a", "b", "a", None])
        assert self.make("ab", ["a", "a", None, "b"]).moved_since(before) == 3
