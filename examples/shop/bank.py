"""A payment provider that is away now and then: before it has charged, or, worse, after.

Like real ones it takes a reference of the caller's, and charges once for each, however often it is asked. It keeps its
books in transactions of its own, which the shop's have no part in.
"""

import random
import uuid
from decimal import Decimal

from sqlalchemy import Engine
from sqlalchemy.dialects.postgresql import insert

from shop.models import Charge

# Of a hundred requests this many fail before, and as many after the money has moved.
PERCENT = 3


class BankAway(Exception):
    """No answer. Whether the money has moved is not known."""


class Bank:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")

    def charge(self, reference: str, amount: Decimal) -> str:
        """Take the money, once for each ``reference``. Returns the receipt."""
        if random.randrange(100) < PERCENT:
            raise BankAway("the bank did not take the request")
        new = insert(Charge).values(reference=reference, amount=amount, receipt=uuid.uuid4().hex, requests=1)
        asked_again = new.on_conflict_do_update(
            index_elements=[Charge.reference], set_={"requests": Charge.requests + 1}
        ).returning(Charge.receipt)
        with self._engine.connect() as connection:
            receipt = connection.execute(asked_again).scalar_one()
        if random.randrange(100) < PERCENT:
            raise BankAway("the bank's answer was lost")
        return receipt
