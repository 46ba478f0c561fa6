"""What runs in the background, in any of the processes."""

from sqlalchemy.orm import sessionmaker

from fastapi_app.models import Parcel, config, engine
from jobsync_orm import JobContext, JobQueue

queue = JobQueue(config, session_factory=sessionmaker(engine))


@queue.handler("print_label")
def print_label(ctx: JobContext, parcel_id: int) -> None:
    parcel = ctx.session.get_one(Parcel, parcel_id)
    parcel.label = f"label of {parcel.code}"  # committed with the job's completion, or not at all
