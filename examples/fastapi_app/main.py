"""The application."""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI
from pydantic import BaseModel
from sqlalchemy import select, text
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from fastapi_app.jobs import queue
from fastapi_app.models import Base, Parcel, config, engine
from jobsync_orm import JobWorker
from jobsync_orm.integrations.fastapi import CurrentJob, health_router, jobsync_lifespan


def make_tables() -> None:
    """In an application of yours: a migration."""
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(1)"))  # the processes start at the same time
        Base.metadata.create_all(connection)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    await run_in_threadpool(make_tables)
    yield
    await run_in_threadpool(engine.dispose)


app = FastAPI(
    lifespan=jobsync_lifespan(
        config, lifespan=lifespan, worker=lambda job: JobWorker(queue, job=job, concurrency=2, grace_sec=10)
    )
)
app.include_router(health_router())


def session() -> Iterator[Session]:
    with Session(engine) as session:
        yield session


CurrentSession = Annotated[Session, Depends(session)]


class NewParcel(BaseModel):
    code: str


@app.post("/parcels", status_code=201)
def add(parcel: NewParcel, session: CurrentSession) -> dict[str, int]:
    """Any process may add a parcel, its own or not; the label's job exists if, and only if, the parcel does."""
    row = Parcel(code=parcel.code)
    session.add(row)
    session.flush()
    enqueued = queue.enqueue(session, "print_label", {"parcel_id": row.id})
    session.commit()
    return {"job": enqueued.id}


@app.get("/parcels/mine")
def mine(job: CurrentJob, session: CurrentSession) -> dict[str, str | int | list[str]]:
    """The parcels of the process that answers."""
    codes = session.scalars(select(Parcel.code).where(Parcel.owned_by(job)).order_by(Parcel.code)).all()
    return {"node": job.node_name, "pid": os.getpid(), "parcels": list(codes)}


@app.post("/parcels/mine/pack")
def pack(job: CurrentJob, session: CurrentSession, limit: int = 10) -> dict[str, str | list[str]]:
    """Pack some of them. Two requests never get the same one."""
    # From here on the session is fenced: if the parcels are another process's by then, its commit is refused.
    parcels = job.claim(session, select(Parcel).where(Parcel.packed_by.is_(None)), limit=limit)
    for parcel in parcels:
        parcel.packed_by = job.node_name
    packed = [parcel.code for parcel in parcels]
    session.commit()
    return {"node": job.node_name, "packed": packed}


@app.get("/parcels/{code}")
def one(code: str, session: CurrentSession) -> dict[str, str | None]:
    parcel = session.scalars(select(Parcel).where(Parcel.code == code)).one()
    return {"code": parcel.code, "packed_by": parcel.packed_by, "label": parcel.label}
