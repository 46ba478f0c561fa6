import os

from flask import Blueprint, request
from sqlalchemy import select, text

from flask_app.extensions import db, jobsync
from flask_app.models import Parcel

parcels = Blueprint("parcels", __name__, url_prefix="/parcels")


@parcels.cli.command("init")
def init() -> None:
    """flask parcels init: in an application of yours, a migration."""
    make_tables()


def make_tables() -> None:
    """Once the library's tables are there, and by one process at a time."""
    with db.engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(1)"))
        db.metadata.create_all(connection)


@parcels.post("")
def add() -> tuple[dict[str, str], int]:
    """Any process may add a parcel, its own or not."""
    db.session.add(Parcel(code=request.get_json()["code"]))
    db.session.commit()
    return {}, 201


@parcels.get("/mine")
def mine() -> dict[str, object]:
    """The parcels of the process that answers."""
    job = jobsync.job
    codes = [parcel.code for parcel in Parcel.query.owned_by(job).order_by(Parcel.code)]
    return {"node": job.node_name, "pid": os.getpid(), "parcels": codes}


@parcels.post("/mine/pack")
def pack() -> dict[str, object]:
    """Pack some of them. Two requests never get the same one."""
    job = jobsync.job
    # From here on the session is fenced: if the parcels are another process's by then, its commit is refused.
    found = job.claim(db.session, select(Parcel).where(Parcel.packed_by.is_(None)), limit=10)
    for parcel in found:
        parcel.packed_by = job.node_name
    packed = [parcel.code for parcel in found]
    db.session.commit()
    return {"node": job.node_name, "packed": packed}
