"""A web server, reduced to what matters here: each request places an order. ``python -m shop.web ORDERS``."""

import random
import sys
from decimal import Decimal

from shop.jobs import NewSession, place_order, queue
from shop.photos import PRODUCTS


def main(orders: int) -> None:
    for number in range(orders):
        with NewSession.begin() as session:
            amount = Decimal(random.randrange(500, 20_000)) / 100
            place_order(session, f"customer{number}@example.com", random.randrange(PRODUCTS), amount)
    queue.dispose()


if __name__ == "__main__":
    main(int(sys.argv[1]))
