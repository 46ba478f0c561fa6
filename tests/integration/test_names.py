"""A schema and a node whose names are full of what SQL, SQLAlchemy and drivers read as something else."""

from __future__ import annotations

import pytest
from sqlalchemy import URL, create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from jobsync_orm import CoordinationConfig, Job, OwnershipLost, migrate
from jobsync_orm.naming import quote
from jobsync_orm.orm import TokenOwned, fence
from jobsync_orm.status import ClusterReader
from tests.integration.cluster import QUICK

SCHEMA = """a :b 'c' "d" \\e %f %(g)s"""
NODE = """it's "w" :x \\y %z; --"""


class Base(DeclarativeBase):
    pass


class Item(TokenOwned, Base):
    __tablename__ = "item"
    __token_key__ = "sku"
    __token_schema__ = SCHEMA
    id: Mapped[int] = mapped_column(primary_key=True)
    sku: Mapped[str]


def test_everything_that_sends_sql(empty_database: URL) -> None:
    engine = create_engine(empty_database)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {quote(SCHEMA)}".replace(":", r"\:")))
    config = CoordinationConfig(engine=engine, schema=SCHEMA, total_tokens=20, **QUICK)
    migrate.upgrade(config)
    Base.metadata.create_all(engine)
    with Job(NODE, config) as job:
        job.register_lock("pinned", NODE)
        assert [lock["task_id"] for lock in job.list_locks()] == ["pinned"]
        assert [node["name"] for node in ClusterReader(engine, config.names, 5).active_nodes()] == [NODE]
        with Session(engine) as session, job.claim_task("t") as claim:
            job.bind(session)
            session.add(Item(id=1, sku="a"))
            job.checkpoint("t", {":k": "%s"}, session)
            claim.complete(session)
            session.commit()
        assert job.last_checkpoint("t") == {":k": "%s"}
        assert job.add_task("u")
        job.write_audit()
        assert job.get_audit() == [{"node": NODE, "task_id": "t"}, {"node": NODE, "task_id": "u"}]
        with Session(engine) as session:
            job.bind(session)
            connection = session.connection()
            assert fence.owners_seen(connection, config.names, [3]) == {3: NODE}
            session.add(Item(id=2, sku="b"))
            session.flush()
            token = job.task_to_token("b")
            with engine.begin() as other:
                other.execute(
                    text(f"UPDATE {config.names.text('token')} SET node = NULL, epoch = epoch + 1 WHERE token_id = :t"),
                    {"t": token},
                )
            with pytest.raises(OwnershipLost) as caught:
                session.commit()
            assert caught.value.owners == {token: None}
    engine.dispose()
