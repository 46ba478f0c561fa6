"""What ``import jobsync_orm`` makes known, in a process that has imported nothing else."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, jobsync_orm
assert "jobsync_orm.orm" not in sys.modules, "imported before it is used"
names = dir(jobsync_orm)
assert names == sorted(names)
assert set(jobsync_orm.__all__) | {"migrate", "__name__"} <= set(names)
for name in jobsync_orm.__all__:
    getattr(jobsync_orm, name)
jobsync_orm.migrate.upgrade
try:
    jobsync_orm.no_such_name
except AttributeError as error:
    assert "no_such_name" in str(error)
else:
    raise AssertionError("no error")
"""


def test_names_that_are_imported_when_they_are_used() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
