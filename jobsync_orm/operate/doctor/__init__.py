"""Look for what is not as it should be, and say what to do.

::

    from jobsync_orm.operate.doctor import Subject, examine

    for finding in examine(Subject(engine, Names("sync_"))).findings:
        print(finding.severity, finding.what, finding.remedy)

Each check is a module beside this one with a function ``check(subject)`` that yields findings; ``examining.py`` lists
them. All of them read, in transactions of their own, and lock nothing.
"""

from __future__ import annotations

from jobsync_orm.operate.doctor.examining import examine
from jobsync_orm.operate.doctor.findings import Diagnosis, Finding, Limits, Severity, Subject

__all__ = ["Diagnosis", "Finding", "Limits", "Severity", "Subject", "examine"]
