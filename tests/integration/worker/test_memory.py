"""A worker's memory does not grow with the number of jobs it has run. JOBS=1000000 for the long run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sqlalchemy import URL

from tests.integration.cluster import wait_for
from tests.integration.worker.conftest import Jobs
from tests.integration.worker.processes import Process

MANY = int(os.environ.get("JOBS", "200000"))


def resident_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


@pytest.mark.load
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_is_flat(database: URL, jobs: Jobs) -> None:
    jobs.sql(f"INSERT INTO sync_job (type) SELECT 'nothing' FROM generate_series(1, {MANY})")
    worker = Process(database)

    def completed(share: float) -> bool:
        return jobs.sql("SELECT completed >= %s FROM sync_job_worker", share * MANY) == [(True,)]

    try:
        wait_for(lambda: completed(0.2), "a fifth is done", 600)
        early = resident_kb(worker.process.pid)
        wait_for(lambda: completed(1), "all is done", 3600)
        late = resident_kb(worker.process.pid)
        print(f"{MANY} jobs: {early} kB after a fifth, {late} kB at the end")
        assert late < 1.03 * early + 1000
        assert jobs.states() == {"completed": MANY}
    finally:
        worker.end()
