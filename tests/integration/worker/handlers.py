"""Functions that child processes import."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from sqlalchemy import text

from jobsync_orm.queue import JobContext


def who(ctx: JobContext) -> dict[str, object]:
    return {"pid": os.getpid(), "parent": os.getppid(), "worker": ctx.worker, "job": ctx.id}


def add(ctx: JobContext, a: int, b: int) -> int:
    return a + b


def fail(ctx: JobContext) -> None:
    raise LookupError("no such order")


def spin(ctx: JobContext, file: str) -> None:
    Path(file).write_text(str(os.getpid()))
    while True:
        pass


def spin_with_company(ctx: JobContext, file: str) -> None:
    """Goes on for ever, as does a program that it has started."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    Path(file).write_text(f"{os.getpid()} {other.pid}")
    while True:
        time.sleep(1)


def leave(ctx: JobContext, code: int) -> None:
    os._exit(code)


def be_killed(ctx: JobContext, number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


def ignore_signals(ctx: JobContext) -> str:
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    # A program that the handler starts may be ended by it as usual.
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    other.terminate()
    return signal.Signals(-other.wait()).name


def say(ctx: JobContext, what: str) -> None:
    print(what, flush=True)


def size(ctx: JobContext, text: str) -> int:
    return len(text)


def be_killed_once(ctx: JobContext, file: str, number: int) -> None:
    if not Path(file).exists():
        Path(file).touch()
        be_killed(ctx, number)


def write_effect(ctx: JobContext) -> dict[str, int]:
    """In the transaction that completes the job: an effect, and another job."""
    ctx.session.execute(text("INSERT INTO effect VALUES (:job, :pid)"), {"job": ctx.id, "pid": os.getpid()})
    ctx.enqueue("follow", {})
    return {"pid": os.getpid()}


def take_longer(ctx: JobContext, seconds: float) -> None:
    """Asks for more time, and takes it."""
    ctx.extend(60)
    time.sleep(seconds)


def note(ctx: JobContext, text_: str) -> dict[str, int]:
    """Writes in the transaction that completes the job."""
    ctx.session.execute(text("INSERT INTO note VALUES (:text)"), {"text": text_})
    return {"next": ctx.enqueue("next").id}


def leave_daemon(ctx: JobContext, file: str) -> None:
    """Ends its process, but not a child of it that has made itself independent."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        time.sleep(3600)
    Path(file).write_text(str(pid))
    os._exit(3)


def interrupt(ctx: JobContext) -> None:
    raise KeyboardInterrupt("by hand")
