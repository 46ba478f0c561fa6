"""The extensions, without an application."""

from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase

from jobsync_orm import ShardedQuery
from jobsync_orm.integrations.flask import JobSync


class Base(DeclarativeBase):
    pass


# Parcel.query and db.session.query(Parcel) have owned_by().
db = SQLAlchemy(model_class=Base, query_class=ShardedQuery, session_options={"query_cls": ShardedQuery})
jobsync = JobSync()
