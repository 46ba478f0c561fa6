"""An online shop: web servers place orders, workers take the payment, make the pictures and send the mail.

``make shop`` runs it: 10,000 orders, with workers killed on the way, and proves that each order was paid once. The same
with other numbers, from the folder ``examples`` of a checkout::

    python -m shop --orders 2000 --kill-every 3

The files: ``models.py`` the application's tables, ``jobs.py`` the queue and its three handlers, ``web.py`` what a web
server does, ``bank.py`` a payment provider that fails now and then, ``photos.py`` the pictures, ``mailbox.py`` an SMTP
server, ``director.py`` what happens when, ``proof.py`` what is checked in the end.
"""
