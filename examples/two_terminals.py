"""Two workers share a table; nothing to install but ``pip install 'jobsync-orm[embedded]'``.

Start it in one terminal, then in another, and watch each take its half. End one with Ctrl-C: the other takes all::

    python examples/two_terminals.py worker-01
    python examples/two_terminals.py worker-02
"""

import signal
import sys
import time
from contextlib import suppress

from sqlalchemy import create_engine, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from jobsync_orm import CoordinationConfig, Job, RebalanceEvent
from jobsync_orm.orm import OwnedQuerySession, TokenOwned


class Base(DeclarativeBase):
    pass


class Item(TokenOwned, Base):
    __tablename__ = "item"
    __token_key__ = "sku"

    id: Mapped[int] = mapped_column(primary_key=True)
    sku: Mapped[str] = mapped_column(unique=True)
    done_by: Mapped[str | None]


if len(sys.argv) != 2:
    sys.exit("usage: two_terminals.py WORKER-NAME")
name = sys.argv[1]
# A real PostgreSQL in this folder: the first worker starts it, the last one to leave stops it.
config = CoordinationConfig.embedded(".jobsync/pg")
engine = create_engine(config.sqlalchemy_url())
Session = sessionmaker(engine, class_=OwnedQuerySession)


def show_share(event: RebalanceEvent) -> None:
    print(f"{name} owns {len(job.my_tokens)} of {job.total_tokens} tokens", flush=True)


def make_items() -> None:
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(1)"))  # two workers may start at once
        Base.metadata.create_all(connection)
        items = [{"sku": f"sku-{number:04}"} for number in range(1000)]
        connection.execute(insert(Item).on_conflict_do_nothing(), items)


def work() -> None:
    with Session.begin() as session:
        mine = session.query(Item).owned_by(job).filter(Item.done_by.is_(None)).order_by(Item.id).limit(5)
        # Rows that their earlier owner is just finishing are locked, and are skipped.
        for item in mine.with_for_update(skip_locked=True):
            if job.can_claim_task(item.sku):
                item.done_by = name
                print(f"{name} does {item.sku}", flush=True)


signal.signal(signal.SIGTERM, lambda *_: sys.exit())
job = Job(name, coordination_config=config, on_rebalance=show_share)
with suppress(KeyboardInterrupt), job:
    make_items()
    while True:
        work()
        time.sleep(1)
