from sqlalchemy.orm import Mapped, mapped_column

from flask_app.extensions import db
from jobsync_orm import TokenOwned


class Parcel(TokenOwned, db.Model):
    __token_key__ = "code"

    id: Mapped[int] = mapped_column(primary_key=True)
    code: Mapped[str] = mapped_column(unique=True)
    packed_by: Mapped[str | None]
