"""The tables, and where they are."""

import os

from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from jobsync_orm import CoordinationConfig, TokenOwned

URL = os.environ.get("DATABASE_URL")
config = CoordinationConfig(url=URL, create_tables=True) if URL else CoordinationConfig.embedded(".jobsync/pg")
# A process that hangs in a transaction holds the locks of its rows: the server ends such a session after 15 s.
engine = create_engine(
    config.sqlalchemy_url(), connect_args={"options": "-c idle_in_transaction_session_timeout=15000"}
)


class Base(DeclarativeBase):
    pass


class Parcel(TokenOwned, Base):
    __tablename__ = "parcel"
    __token_key__ = "code"

    id: Mapped[int] = mapped_column(primary_key=True)
    code: Mapped[str] = mapped_column(unique=True)
    packed_by: Mapped[str | None]
    label: Mapped[str | None]
