"""The application's own tables."""

from decimal import Decimal

from sqlalchemy import ForeignKey, Numeric
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "order"

    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]
    product: Mapped[int]
    amount: Mapped[Decimal] = mapped_column(Numeric(10, 2))
    state: Mapped[str] = mapped_column(default="placed")


class Payment(Base):
    """What the shop has booked. Nothing here forbids a second row for an order: the proof would find it."""

    __tablename__ = "payment"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("order.id"), index=True)
    amount: Mapped[Decimal] = mapped_column(Numeric(10, 2))
    receipt: Mapped[str]


class Charge(Base):
    """The bank's ledger, in this database only so that the example needs no other one."""

    __tablename__ = "bank_charge"

    reference: Mapped[str] = mapped_column(primary_key=True)
    amount: Mapped[Decimal] = mapped_column(Numeric(10, 2))
    receipt: Mapped[str]
    requests: Mapped[int] = mapped_column(default=1)
