"""The application's tables, and the triggers that write down what happens to ownership.

A *lane* is a key; there is one for each token. Tasks wait in lanes; doing one writes an effect and counts the lane's
counter up by reading and writing it. Nothing in these tables stops two workers from doing the same task: no unique
constraint, no row lock, no version. Only the fence does.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import count

from sqlalchemy import BigInteger, Engine, ForeignKey, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.schema import FetchedValue

from jobsync_orm import TokenOwned
from jobsync_orm.hashing import task_to_token
from jobsync_orm.migrate.fence import create_ownership_fence
from tests.chaos.settings import TOKENS

__all__ = ["Base", "Counter", "Effect", "Todo", "create", "lanes"]


class Base(DeclarativeBase):
    pass


class Todo(TokenOwned, Base):
    """A task of the producer's."""

    __tablename__ = "todo"
    __token_key__ = "lane"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    lane: Mapped[str] = mapped_column(ForeignKey("counter.lane"))
    done: Mapped[bool] = mapped_column(default=False)


class Counter(TokenOwned, Base):
    """How many effects a lane has had."""

    __tablename__ = "counter"
    __token_key__ = "lane"
    lane: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(BigInteger, default=0)


class Effect(TokenOwned, Base):
    """One task done: by whom, with what it knew when its transaction began."""

    __tablename__ = "effect"
    __token_key__ = "lane"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    todo: Mapped[int] = mapped_column(BigInteger)
    lane: Mapped[str]
    version: Mapped[int] = mapped_column(BigInteger)
    node: Mapped[str]
    incarnation: Mapped[str]
    epoch: Mapped[int] = mapped_column(BigInteger)
    attempt: Mapped[str]
    fence: Mapped[int | None] = mapped_column(BigInteger)  # of the claim under which it was done
    xid: Mapped[int] = mapped_column(BigInteger, server_default=FetchedValue())


@cache
def lanes() -> tuple[str, ...]:
    """A key for each token: ``lanes()[token]`` hashes to ``token``."""
    found: dict[int, str] = {}
    for number in count():
        lane = f"lane-{number}"
        found.setdefault(task_to_token(lane, TOKENS), lane)
        if len(found) == TOKENS:
            break
    return tuple(found[token] for token in range(TOKENS))


def _ddl() -> Iterator[str]:
    yield "ALTER TABLE effect ALTER COLUMN xid SET DEFAULT pg_current_xact_id()::text::bigint"
    yield "CREATE INDEX ON todo (token_id, id) WHERE NOT done"
    # Drawn while the token's row is locked: for one token, the order of ids is the order of commits.
    yield """
        CREATE TABLE token_log (id bigserial PRIMARY KEY, at timestamptz DEFAULT clock_timestamp(), token_id int,
            node text, epoch bigint, next_node text, next_epoch bigint)"""
    yield """
        CREATE FUNCTION log_tokens() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO token_log (token_id, node, epoch, next_node, next_epoch)
                SELECT token_id, node, epoch, next_node, next_epoch FROM after ORDER BY token_id;
            RETURN NULL; END $$"""
    yield """
        CREATE TRIGGER log_tokens AFTER UPDATE ON sync_token REFERENCING NEW TABLE AS after
            FOR EACH STATEMENT EXECUTE FUNCTION log_tokens()"""
    yield """
        CREATE TABLE node_log (id bigserial PRIMARY KEY, at timestamptz DEFAULT clock_timestamp(), name text,
            ordinal bigint, gone bool)"""
    yield """
        CREATE FUNCTION log_nodes() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF TG_OP = 'DELETE' THEN INSERT INTO node_log (name, ordinal, gone) VALUES (OLD.name, OLD.ordinal, true);
            ELSE INSERT INTO node_log (name, ordinal, gone) VALUES (NEW.name, NEW.ordinal, NEW.state = 'away');
            END IF; RETURN NULL; END $$"""
    # Heartbeats name none of these columns.
    yield """
        CREATE TRIGGER log_nodes AFTER INSERT OR DELETE OR UPDATE OF ordinal, state, incarnation ON sync_node
            FOR EACH ROW EXECUTE FUNCTION log_nodes()"""


def create(engine: Engine, *, triggers: bool) -> None:
    """The tables, and a counter for each lane; with the trigger of the library's fence for raw SQL, if wanted."""
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        for statement in _ddl():
            connection.execute(text(statement))
        for table in Base.metadata.tables if triggers else ():
            create_ownership_fence(connection, table)
        connection.execute(Counter.__table__.insert(), [{"lane": lane, "version": 0} for lane in lanes()])
