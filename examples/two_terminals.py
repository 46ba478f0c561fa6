"""Two workers share a table; nothing to install but ``pip install 'jobsync-orm[embedded]'``.

Start it in one terminal, then in another, and watch each take its half. End one with Ctrl-C: the other takes all::

    python examples/two_terminals.py worker-01
    python examples/two_terminals.py worker-02
"""

import signal
import sys
import time
from contextlib import suppress

from sqlalchemy import create_engine, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from jobsync_orm import CoordinationConfig, Job, OwnedSession, OwnershipLost, RebalanceEvent, TokenOwned


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
# A worker that hangs in a transaction holds the locks of its rows: the server ends such a session after 15 s.
engine = create_engine(
    config.sqlalchemy_url(), connect_args={"options": "-c idle_in_transaction_session_timeout=15000"}
)


def show_share(event: RebalanceEvent) -> None:
    print(f"{name} owns {len(job.my_tokens)} of {job.total_tokens} tokens", flush=True)


def make_items() -> None:
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(1)"))  # two workers may start at once
        Base.metadata.create_all(connection)
        items = [{"sku": f"sku-{number:04}"} for number in range(1000)]
        connection.execute(insert(Item).on_conflict_do_nothing(), items)


def work() -> None:
    to_do = select(Item).where(Item.done_by.is_(None)).order_by(Item.id)
    try:
        with Session.begin() as session:
            items = job.claim(session, to_do, limit=5)
            for item in items:
                item.done_by = name
    except OwnershipLost:  # they went to another worker meanwhile, and nothing is stored
        return
    for item in items:
        print(f"{name} does {item.sku}", flush=True)


signal.signal(signal.SIGTERM, lambda *_: sys.exit())
job = Job(name, coordination_config=config, on_rebalance=show_share)
# Its commits are fenced: what it wrote for rows that are another worker's by then is refused.
Session = sessionmaker(engine, class_=OwnedSession, job=job, expire_on_commit=False)
with suppress(KeyboardInterrupt), job:
    make_items()
    while True:
        work()
        time.sleep(1)
