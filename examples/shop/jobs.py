"""The queue, and what a worker does. Run workers with ``jobsync-orm worker shop.jobs:queue``."""

import smtplib
from decimal import Decimal
from email.message import EmailMessage
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

from jobsync_orm import Backoff, CoordinationConfig, JobContext, JobPriority, JobQueue
from shop import photos, settings
from shop.bank import Bank
from shop.models import Order, Payment

engine = create_engine(
    settings.DATABASE,
    # A worker that hangs in a transaction holds the locks of its rows: the server ends such a session.
    connect_args={"options": "-c idle_in_transaction_session_timeout=15000"},
)
NewSession = sessionmaker(engine)
queue = JobQueue(CoordinationConfig(engine=engine), session_factory=NewSession)
bank = Bank(engine)


# In a real shop: minutes between the attempts, and hours.
@queue.handler("process_payment", max_retries=20, timeout=30, backoff=Backoff(base=0.2, factor=2, maximum=2))
def process_payment(ctx: JobContext, order_id: int) -> dict[str, Any]:
    """Charge the customer, and book it.

    The bank charges once for each reference, so asking again is safe. The booking, the order's new state and the end of
    this job are one transaction: whoever runs this again after a crash finds all of them or none.
    """
    order = ctx.session.get_one(Order, order_id)
    receipt = bank.charge(f"order-{order.id}", order.amount)
    ctx.session.add(Payment(order_id=order.id, amount=order.amount, receipt=receipt))
    order.state = "paid"
    return {"receipt": receipt}


# Workers are killed on purpose here, and each kill counts against the jobs in hand.
@queue.handler("make_pictures", kind="process", max_retries=20, timeout=60)
def make_pictures(ctx: JobContext, order_id: int, product: int) -> dict[str, Any]:
    """Resize the product's photo: CPU work, so in a process of its own, which is killed if it takes too long."""
    return photos.resize(settings.FOLDER, product, order_id)


@queue.handler("send_mail", max_retries=20, timeout=30, backoff=Backoff(base=0.2, factor=2, maximum=2))
def send_mail(ctx: JobContext, order_id: int, email: str) -> None:
    """Tell the customer.

    A mail cannot be part of a transaction: if the worker is killed right after it, another one sends it again.
    """
    message = EmailMessage()
    message["From"], message["To"] = "shop@example.com", email
    message["Subject"] = f"Your order {order_id}"
    message["Message-ID"] = f"<order-{order_id}@shop.example.com>"  # by which a mailbox knows a second copy
    message.set_content("Thank you! It is on its way.")
    with smtplib.SMTP("127.0.0.1", settings.SMTP_PORT, timeout=10) as server:
        server.send_message(message)


def place_order(session: Session, email: str, product: int, amount: Decimal) -> Order:
    """What the web server calls: the order and its jobs are there after the commit, or none of them is."""
    order = Order(email=email, product=product, amount=amount)
    session.add(order)
    session.flush()
    number = order.id
    paid = queue.enqueue(
        session,
        "process_payment",
        {"order_id": number},
        priority=JobPriority.HIGH,
        key=f"order:{number}",
        idempotency_key=f"pay:{number}",
    )
    pictures = queue.enqueue(session, "make_pictures", {"order_id": number, "product": product}, after=[paid.id])
    queue.enqueue(
        session,
        "send_mail",
        {"order_id": number, "email": email},
        priority=JobPriority.LOW,
        after=[paid.id, pictures.id],
    )
    return order
