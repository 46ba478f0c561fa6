"""What is checked in the end, from the tables, the files and the mailbox, without the library."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from PIL import Image
from sqlalchemy import Connection, text

from shop.mailbox import Mailbox
from shop.photos import SIZES, small

CHECKS = {
    "orders that were not paid": (
        "SELECT id FROM \"order\" o WHERE state <> 'paid' OR NOT EXISTS (SELECT 1 FROM payment WHERE order_id = o.id)"
    ),
    "orders paid more than once": "SELECT order_id FROM payment GROUP BY order_id HAVING count(*) > 1",
    "orders booked that the bank knows nothing of, or another sum": (
        "SELECT order_id FROM payment p WHERE NOT EXISTS (SELECT 1 FROM bank_charge c"
        " WHERE c.reference = 'order-' || p.order_id AND c.amount = p.amount AND c.receipt = p.receipt)"
    ),
    "charges that the shop has not booked": (
        "SELECT reference FROM bank_charge WHERE reference NOT IN (SELECT 'order-' || order_id FROM payment)"
    ),
    "jobs that have not completed": "SELECT id FROM sync_job WHERE state <> 'completed'",
    "mails sent before their order was paid": (
        "SELECT m.id FROM sync_job m JOIN sync_job p ON p.type = 'process_payment'"
        " AND p.payload->>'order_id' = m.payload->>'order_id'"
        " WHERE m.type = 'send_mail' AND m.started_at < p.finished_at"
    ),
}


def faults(connection: Connection, orders: int, folder: Path, mailbox: Mailbox) -> Iterator[str]:
    """What is wrong; nothing if the proof holds."""
    numbers = list(connection.scalars(text('SELECT id FROM "order"')))
    if len(numbers) != orders:
        yield f"{len(numbers)} orders instead of {orders}"
    for what, query in CHECKS.items():
        yield from _some(what, connection.scalars(text(query)))
    yield from _some("orders without their pictures", (n for n in numbers if not _has_pictures(folder, n)))
    sent = mailbox.received
    yield from _some("orders without a mail", (n for n in numbers if f"<order-{n}@shop.example.com>" not in sent))


def findings(connection: Connection, mailbox: Mailbox) -> Iterator[str]:
    """What happened on the way."""
    booked, total = connection.execute(text("SELECT count(*), sum(amount) FROM payment")).one()
    charged, requests = connection.execute(text("SELECT sum(amount), sum(requests) FROM bank_charge")).one()
    yield f"{booked:,} orders booked as paid, {total:,} in all; the bank charged {charged:,} in {requests:,} requests"
    rows = connection.execute(text("SELECT outcome, count(*) FROM sync_job_attempt GROUP BY outcome ORDER BY outcome"))
    yield "attempts: " + ", ".join(f"{count:,} {outcome}" for outcome, count in rows)
    twice = sum(copies - 1 for copies in mailbox.received.values())
    yield f"{len(mailbox.received):,} mails, {twice} of them sent again by a worker that took over from a killed one"


def _some(what: str, examples: Iterable[object]) -> Iterator[str]:
    if found := list(examples):
        yield f"{len(found)} {what}: {', '.join(map(str, found[:5]))}"


def _has_pictures(folder: Path, order_id: int) -> bool:
    for name, size in SIZES.items():
        path = small(folder, order_id, name)
        if not path.exists():
            return False
        with Image.open(path) as picture:
            if picture.width > size[0] or picture.height > size[1]:
                return False
    return True
