"""The models of these tests, and a stand-in for a job."""

from __future__ import annotations

from dataclasses import dataclass, field

from sqlalchemy import ForeignKey, Text
from sqlalchemy.orm import (
    DeclarativeBase,
    DynamicMapped,
    Mapped,
    WriteOnlyMapped,
    mapped_column,
    relationship,
)

from jobsync_orm.naming import Names
from jobsync_orm.observe import Audience
from jobsync_orm.orm import TokenOwned

DEFAULT = Names()


@dataclass
class FakeJob:
    """What the filters ask of a job."""

    node_name: str = "me"
    names: Names | None = DEFAULT
    total_tokens: int = 10_000
    hash_function: str = "double_sha256"
    audience: Audience = field(default_factory=Audience)


class Base(DeclarativeBase):
    pass


class Shop(Base):
    __tablename__ = "shop"
    id: Mapped[int] = mapped_column(primary_key=True)
    items: Mapped[list[Item]] = relationship(back_populates="shop", order_by="Item.id")
    dynamic_items: DynamicMapped[Item] = relationship(viewonly=True)
    write_only_items: WriteOnlyMapped[Item] = relationship(viewonly=True)


class Tagging(Base):
    __tablename__ = "tagging"
    item_id: Mapped[int] = mapped_column(ForeignKey("item.id"), primary_key=True)
    tag_id: Mapped[int] = mapped_column(ForeignKey("tag.id"), primary_key=True)
    item: Mapped[Item] = relationship(viewonly=True)


class Tag(Base):
    __tablename__ = "tag"
    id: Mapped[int] = mapped_column(primary_key=True)
    items: Mapped[list[Item]] = relationship(secondary="tagging", order_by="Item.id", viewonly=True)


class Item(TokenOwned, Base):
    __tablename__ = "item"
    __token_key__ = "sku"
    id: Mapped[int] = mapped_column(primary_key=True)
    sku: Mapped[str]
    note: Mapped[str] = mapped_column(default="")
    shop_id: Mapped[int | None] = mapped_column(ForeignKey("shop.id"))
    shop: Mapped[Shop | None] = relationship(back_populates="items")
    parts: Mapped[list[Part]] = relationship(back_populates="item")


class Part(TokenOwned, Base):
    __tablename__ = "part"
    __token_key__ = "serial"
    id: Mapped[int] = mapped_column(primary_key=True)
    serial: Mapped[str] = mapped_column(Text)
    item_id: Mapped[int] = mapped_column(ForeignKey("item.id"))
    item: Mapped[Item] = relationship(back_populates="parts")


class Vehicle(TokenOwned, Base):
    """Joined inheritance, the token with the parent."""

    __tablename__ = "vehicle"
    __token_key__ = "plate"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    plate: Mapped[str]
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "vehicle"}  # noqa: RUF012


class Truck(Vehicle):
    __tablename__ = "truck"
    id: Mapped[int] = mapped_column(ForeignKey("vehicle.id"), primary_key=True)
    load: Mapped[int] = mapped_column(default=0)
    __mapper_args__ = {"polymorphic_identity": "truck"}  # noqa: RUF012


class Document(Base):
    """Joined inheritance, the token with the subclass."""

    __tablename__ = "document"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    title: Mapped[str] = mapped_column(default="")
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "document"}  # noqa: RUF012


class Invoice(TokenOwned, Document):
    __tablename__ = "invoice"
    __token_key__ = "number"
    id: Mapped[int] = mapped_column(ForeignKey("document.id"), primary_key=True)
    number: Mapped[str]
    paid: Mapped[bool] = mapped_column(default=False)
    __mapper_args__ = {"polymorphic_identity": "invoice"}  # noqa: RUF012
