"""A queue that has been used before its process forks, as servers do that load the application first."""

from __future__ import annotations

import os
import warnings

from sqlalchemy import URL, text

from jobsync_orm import CoordinationConfig, JobQueue


def test_a_fork_shares_no_connection_with_its_parent(database: URL) -> None:
    queue = JobQueue(CoordinationConfig(url=database))
    try:

        def server() -> int:
            ((pid,),) = queue._walk(text("SELECT pg_backend_pid()"), {})
            return int(pid)

        before = server()
        queue.submit("nothing", {})
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads
            fork = os.fork()
        if fork == 0:
            try:
                queue.submit("nothing", {})
                os.write(writing, str(server()).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            in_child = int(pipe.read() or 0)
        os.waitpid(fork, 0)
        assert in_child not in (0, before)
        assert server() == before
        assert queue._walk(text("SELECT count(*) FROM sync_job"), {}) == [(2,)]
    finally:
        queue.dispose()
