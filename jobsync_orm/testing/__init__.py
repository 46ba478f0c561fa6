"""For the tests of applications that use the queue. No worker is needed, and nothing has to be waited for.

A handler is a plain function, so most of it can be tested by calling it::

    def test_resize():
        assert resize(FakeContext(queue, "resize"), image_id=7, width=80) == {"bytes": 512}

:func:`run_handler` does so with the checks a real job would meet: the payload must fit, and the result must be JSON::

    def test_resize():
        assert run_handler(queue, "resize", {"image_id": 7}) == {"bytes": 512}

With the database, :func:`drain` runs what has been enqueued, follow-up jobs too, until nothing is left, and raises if a
job has failed; :func:`run_inline` runs each job as soon as its transaction is committed::

    def test_checkout(session):
        checkout(session, cart)
        session.commit()
        drain(queue)
        assert session.scalars(select(Receipt)).one().order_id == order.id

        with run_inline(queue):
            client.post("/checkout", json=cart)

Many test suites keep everything in one transaction that is rolled back at the end. Then nobody else sees the jobs, so
``drain(queue, connection=connection)`` works inside it, on the same connection.

In a test that is a coroutine it is ``await drain_async(queue)``.

Rows to begin a test with come from :mod:`jobsync_orm.testing.factories` (the extra ``testing``).
"""

from jobsync_orm.testing.draining import HandlerFailed, Ran, drain, drain_async
from jobsync_orm.testing.fake_context import FakeContext
from jobsync_orm.testing.handlers import run_handler
from jobsync_orm.testing.inline import run_inline

__all__ = ["FakeContext", "HandlerFailed", "Ran", "drain", "drain_async", "run_handler", "run_inline"]
