"""SQLModel's table models with TokenOwned."""

from __future__ import annotations

import uuid

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker
from sqlmodel import Field, Session, SQLModel, select

from jobsync_orm import Job, OwnedSession, OwnershipLost, TokenOwned
from tests.integration.claiming import give_away


class Parcel(TokenOwned, SQLModel, table=True):
    __token_key__ = "code"

    id: int | None = Field(default=None, primary_key=True)
    code: str
    packed: bool = False


class Letter(SQLModel, TokenOwned, table=True):
    __token_key__ = "key"

    id: int | None = Field(default=None, primary_key=True)
    key: uuid.UUID = Field(default_factory=uuid.uuid4)


class FencedSession(OwnedSession, Session):
    """SQLModel's session, with exec(), whose commits are fenced."""


@pytest.fixture
def tables(own_engine: Engine) -> None:
    SQLModel.metadata.create_all(own_engine, [Parcel.__table__, Letter.__table__])  # type: ignore[attr-defined]
    with Session(own_engine) as session:
        session.add_all([*(Parcel(code=f"P{n}") for n in range(10)), *(Letter() for _ in range(10))])
        session.commit()


@pytest.mark.usefixtures("tables")
class TestSqlModel:
    def test_the_token_is_that_of_the_key(self, job: Job, own_engine: Engine) -> None:
        with Session(own_engine) as session:
            parcels = session.exec(select(Parcel).where(Parcel.owned_by(job))).all()
            assert [parcel.token_id for parcel in parcels] == [job.task_to_token(parcel.code) for parcel in parcels]
            letters = session.exec(select(Letter).where(Letter.owned_by(job))).all()
            assert [letter.token_id for letter in letters] == [job.task_to_token(letter.key) for letter in letters]
            assert (len(parcels), len(letters)) == (10, 10)

    def test_it_is_no_field_of_the_model(self) -> None:
        assert "token_id" not in Parcel.model_json_schema()["properties"]
        assert set(Parcel(code="P").model_dump()) == {"id", "code", "packed"}

    def test_claims_and_the_fence(self, job: Job, own_engine: Engine) -> None:
        fenced = sessionmaker(own_engine, class_=FencedSession, job=job)
        with fenced() as session:
            parcels = job.claim(session, select(Parcel).where(Parcel.packed == False), limit=3)  # noqa: E712
            for parcel in parcels:
                parcel.packed = True
            session.commit()
        with fenced() as session:
            parcel = session.exec(select(Parcel).where(Parcel.packed == False)).first()  # noqa: E712
            parcel.packed = True
            give_away(own_engine, parcel.token_id, "other")
            with pytest.raises(OwnershipLost):
                session.commit()
        with Session(own_engine) as session:
            assert len(session.exec(select(Parcel).where(Parcel.packed)).all()) == 3
