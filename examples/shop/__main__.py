"""Run the shop: ``python -m shop``; see ``--help``."""

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sqlalchemy import URL, Engine, create_engine, make_url, text

from jobsync_orm import embedded, migrate
from shop.director import Director
from shop.mailbox import Mailbox
from shop.models import Base
from shop.photos import take_photos
from shop.proof import faults, findings

WORKERS = 3
WEB_SERVERS = 2


@contextlib.contextmanager
def database(url: str | None, folder: Path) -> Iterator[URL]:
    """A new database on the server of ``url``, or on an embedded one."""
    server = make_url(url or embedded.server_url(folder / "pg")).set(drivername="postgresql+psycopg")
    name = f"shop_{os.getpid()}"
    admin = create_engine(server, isolation_level="AUTOCOMMIT")
    try:
        with admin.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        yield server.set(database=name)
    finally:
        with admin.connect() as connection:
            connection.execute(text(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
        admin.dispose()
        if url is None:
            embedded.stop(folder / "pg")


def run(orders: int, kill_every: float, kills: int | None, url: str | None, console: Console) -> bool:
    folder = Path(tempfile.mkdtemp(prefix="shop-"))
    try:
        with database(url, folder) as where, Mailbox() as mailbox:
            engine = create_engine(where)
            migrate.upgrade(engine)
            Base.metadata.create_all(engine)
            take_photos(folder)
            environment = {
                "SHOP_DATABASE": where.render_as_string(hide_password=False),
                "SHOP_FOLDER": str(folder),
                "SHOP_SMTP_PORT": str(mailbox.port),
            }
            try:
                with Director(environment, folder) as director:
                    play(director, engine, orders, kill_every, kills, console)
                    director.stop_workers()
                    killed = director.kills
                with engine.connect() as connection:
                    console.print(f"{killed} workers killed in the middle of a job")
                    for line in findings(connection, mailbox):
                        console.print(line)
                    wrong = list(faults(connection, orders, folder, mailbox))
            except Exception:
                console.print((folder / "processes.log").read_text()[-3000:], markup=False)
                raise
            finally:
                engine.dispose()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for line in wrong:
        console.print(f"[red]wrong:[/red] {line}")
    if not wrong:
        console.print(f"[green]proved:[/green] each of {orders:,} orders was paid once, has its pictures and its mail")
    return not wrong


def play(
    director: Director, engine: Engine, orders: int, kill_every: float, kills: int | None, console: Console
) -> None:
    """Orders come in and are worked off."""
    began = time.monotonic()
    for number in range(WORKERS):
        director.start_worker(f"worker-{number + 1}")
    for number in range(WEB_SERVERS):
        director.start_web(orders // WEB_SERVERS + (number < orders % WEB_SERVERS))
    columns = (TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, refresh_per_second=4) as progress, engine.connect() as connection:
        connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        bars = {what: progress.add_task(what, total=orders) for what in ("placed", "paid", "pictures", "mailed")}
        bars["kills"] = progress.add_task("kills", total=None)
        types = {"process_payment": "paid", "make_pictures": "pictures", "send_mail": "mailed"}
        count = text("SELECT type, count(*), count(*) FILTER (WHERE state = 'completed') FROM sync_job GROUP BY type")

        told_at = began

        def finished() -> int | bool:
            nonlocal told_at
            done = 0
            for type_, placed, completed in connection.execute(count):
                progress.update(bars["placed"], completed=placed)
                progress.update(bars[types[type_]], completed=completed)
                done += completed
            progress.update(bars["kills"], completed=director.kills)
            if not console.is_terminal and time.monotonic() - told_at > 10:
                told_at = time.monotonic()
                console.print(f"{done:,} of {3 * orders:,} jobs done, {director.kills} workers killed")
            if failed := connection.scalar(text("SELECT count(*) FROM sync_job WHERE state = 'failed'")):
                raise RuntimeError(f"{failed} jobs have failed for good")
            return done == 3 * orders or done

        def busy() -> list[str]:
            return list(connection.scalars(text("SELECT DISTINCT worker FROM sync_job WHERE state = 'processing'")))

        director.run(finished, busy, kill_every, kills, patience=300)
    console.print(f"{orders:,} orders in {time.monotonic() - began:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the shop, kill workers, prove that each order was paid once.")
    parser.add_argument("--orders", type=int, default=10_000)
    parser.add_argument("--kill-every", type=float, default=5, metavar="SECONDS")
    parser.add_argument("--kills", type=int, metavar="N", help="kill so many workers at most; 0: none")
    parser.add_argument("--url", help="use this PostgreSQL server (a database of its own is made in it)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    sys.exit(0 if run(arguments.orders, arguments.kill_every, arguments.kills, arguments.url, Console()) else 1)


if __name__ == "__main__":
    main()
