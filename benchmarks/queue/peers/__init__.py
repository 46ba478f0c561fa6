"""One module per library. Each offers

``PACKAGE``
    Its name on the index.
``CONFIGS``
    Settings of a worker, by name; ``default`` is what the library does by itself.
``prepare(dsn)``
    Make its tables.
``Producer(dsn)``
    ``one(i)`` in a transaction of its own, ``many(numbers)`` the same for each, ``bulk(numbers)``, ``close()``; and
    ``ways``, others to enqueue one per transaction, if there are any: what to call it -> as ``many``.
``work(dsn, settings)``
    Run a worker until it is killed; its jobs call ``sink.hit``.
``fill(connection, rows, kind)``
    Put ``rows`` rows that are ``finished``, or ``future`` ones, beside the jobs.
``figures(dsn, times)``
    Of this library only: how long its figures take, in ms, so many times.
``WAITING``
    SQL that says whether a job is not finished, ``future`` ones aside.
"""
