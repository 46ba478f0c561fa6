"""The dashboard: an ASGI application that shows a cluster and its queue. Needs the extra ``web``.

::

    from jobsync_orm.web import dashboard

    app.mount("/jobsync", dashboard(engine))  # of FastAPI or Starlette, or any ASGI server

or, by itself, ``jobsync-orm dashboard``. Pages, styles and scripts are files of this package: there is no build step,
and nothing is loaded from elsewhere.

Reading
-------
What is shown comes from pictures that the process keeps (:mod:`jobsync_orm.web.pictures`): they are read anew at most
once a second while somebody looks, however many do, by at most four threads with a connection each. The server gives
up a statement after five seconds.

Writing
-------
Off, unless ``allow_writes=True`` and ``auth=`` say who may: see :func:`dashboard`.
"""

from __future__ import annotations

try:
    import starlette  # noqa: F401
except ImportError as error:
    raise ImportError("jobsync_orm.web needs starlette: pip install 'jobsync-orm[web]'") from error

from jobsync_orm.web.app import THREADS, WITHIN_SEC, dashboard

__all__ = ["THREADS", "WITHIN_SEC", "dashboard"]
