"""What each record of the library's log says beside its text: ``event``, ``node``, ``epoch``, ``job_id``, ``job_type``.

They are attributes of the record, for formatters that write JSON and for filters: ``event`` is a short name that stays
the same when the text does not (``docs/monitoring.md`` lists them all); the others are None where they are not known.
"""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["fields"]


class _Job(Protocol):
    id: int
    type: str


def fields(event: str, node: str | None = None, epoch: int | None = None, job: _Job | None = None) -> dict[str, Any]:
    """The ``extra`` of a record.

    Parameters
    ----------
    event : str
        What has happened, in words joined by underscores.
    node : str, optional
        The node it happened to.
    epoch : int, optional
        The epoch of the tokens that it goes by; 0 counts as None.
    job : ClaimedJob, optional
        The job of the queue that it is about.
    """
    return {
        "event": event,
        "node": node,
        "epoch": epoch or None,
        "job_id": None if job is None else job.id,
        "job_type": None if job is None else job.type,
    }
