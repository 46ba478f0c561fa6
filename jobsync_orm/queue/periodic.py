"""Periodic jobs: a job at each tick of a cron expression, once in the whole cluster.

::

    @queue.periodic("0 3 * * *", timezone="Europe/Berlin")
    @queue.handler("nightly_report")
    def nightly_report(ctx): ...

    queue.add_periodic("*/5 * * * *", "poll_carrier", {"carrier": "dhl"}, name="poll_dhl")

Each :class:`~jobsync_orm.JobWorker` of the queue looks which schedules are due; there is no process of its own for it.
A schedule is a row that says up to which moment it has fired. Whoever finds it due moves that moment and inserts the
job in ONE statement, and only if the moment is still the one it had seen: of many workers one fires, and a worker that
dies right there has done both or neither. Ticks are computed from the database's time.

The row is the truth, also of what is to happen when: a worker writes its own idea of a schedule when it starts, and
from then on goes by the row. So the worker that started last decides, which at the end of a deployment is the newest
version, and those still running with an older one fire by the new expression instead of beside it. A schedule begins
when it is first seen, and again when its expression or its time zone changes: nothing is fired for the time before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar, get_args

from sqlalchemy import select, text

from jobsync_orm.autocommit import Autocommit
from jobsync_orm.exceptions import InvalidJob, InvalidPayload, JobsyncError
from jobsync_orm.models.states import JobPriority
from jobsync_orm.queue.cron import Cron
from jobsync_orm.queue.handlers import HandlerCalls
from jobsync_orm.queue.new_jobs import NewJob
from jobsync_orm.queue.options import brief, job_type
from jobsync_orm.queue.schedule import Missed, Schedule, ScheduleStatus
from jobsync_orm.queue.typed_payload import dump

__all__ = ["ScheduleCalls"]

Function = TypeVar("Function", bound=Callable[..., Any])


class ScheduleCalls(HandlerCalls):
    """The part of a queue that knows its periodic jobs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.periodic_jobs: dict[str, Schedule] = {}

    def periodic(
        self,
        cron: str,
        *,
        timezone: str = "UTC",
        payload: Any = None,
        name: str | None = None,
        missed: Missed = "latest",
        overlap: bool = True,
        tick_as: str | None = None,
        priority: int = JobPriority.NORMAL,
        key: str | None = None,
        max_retries: int | None = None,
        timeout: float | None = None,
    ) -> Callable[[Function], Function]:
        """Decorate a handler whose job is to run at each tick of ``cron``. Stands above ``@queue.handler(...)``.

        See :meth:`add_periodic` for the parameters.
        """
        if callable(cron):
            raise InvalidJob('@queue.periodic needs a cron expression: @queue.periodic("0 3 * * *")')

        def decorate(function: Function) -> Function:
            types = [handler.type for handler in self.handlers.values() if handler.function is function]
            if len(types) != 1:
                what = f"the handler of {', '.join(map(repr, types))}" if types else "no handler of this queue"
                raise InvalidJob(
                    f"@queue.periodic: {getattr(function, '__qualname__', function)!s} is {what}. Put "
                    '@queue.handler("...") right below @queue.periodic(...), or name the type: '
                    "queue.add_periodic(cron, type)"
                )
            self.add_periodic(
                cron,
                types[0],
                payload,
                timezone=timezone,
                name=name,
                missed=missed,
                overlap=overlap,
                tick_as=tick_as,
                priority=priority,
                key=key,
                max_retries=max_retries,
                timeout=timeout,
            )
            return function

        return decorate

    def add_periodic(
        self,
        cron: str,
        type: str,
        payload: Any = None,
        *,
        timezone: str = "UTC",
        name: str | None = None,
        missed: Missed = "latest",
        overlap: bool = True,
        tick_as: str | None = None,
        priority: int = JobPriority.NORMAL,
        key: str | None = None,
        max_retries: int | None = None,
        timeout: float | None = None,
    ) -> Schedule:
        """Enqueue a job at each tick of ``cron``, once in the whole cluster, as long as a worker runs.

        Parameters
        ----------
        cron : str
            Minute, hour, day of month, month and day of week, as ``"0 3 * * *"``; six fields begin with the second.
        type : str
            Type of the job; its handler must have been registered.
        payload : mapping or model, optional
            The job's payload, as for :meth:`~jobsync_orm.JobQueue.enqueue`.
        timezone : str
            In which ``cron`` is read: ``"Europe/Berlin"``. What happens when clocks change is told in
            :mod:`jobsync_orm.queue.cron`.
        name : str, optional
            Of the schedule, unique in the cluster; the type if not given. Whoever changes it begins a new schedule.
        missed : str
            What becomes of ticks for which no worker was there: ``"latest"`` runs the job once for the last of them,
            ``"skip"`` does so only if that is not older than a minute, ``"all"`` runs it once for each, at most for
            the last 1,000.
        overlap : bool
            Whether a job is also enqueued while that of the tick before is unfinished. With False there is never more
            than one, and a tick that finds one adds none.
        tick_as : str, optional
            Entry of the payload that gets the tick's time, as ISO 8601 text: the moment the job is for, which is
            earlier than the one it runs at.
        priority, key, max_retries, timeout
            As in :meth:`~jobsync_orm.JobQueue.enqueue`.

        Returns
        -------
        Schedule
            What has been declared. The table knows it when a worker starts.

        Raises
        ------
        InvalidJob
            A value that cannot be, or a name that is taken.
        InvalidPayload
            The payload does not fit the handler.
        UnknownJobType
            There is no handler for ``type``.
        ConfigurationError
            The extra ``cron`` is not installed.
        """
        handler = self.handler_of(type)
        if missed not in get_args(Missed):
            raise InvalidJob(f"missed={brief(missed)} must be one of {', '.join(map(repr, get_args(Missed)))}")
        if not isinstance(overlap, bool):
            raise InvalidJob(f"overlap={brief(overlap)} must be True or False")
        if missed == "all" and not overlap:
            raise InvalidJob("missed='all' needs overlap=True: with False there would be one job for all of them")
        if tick_as is not None and not isinstance(tick_as, str):
            raise InvalidJob(f"tick_as={brief(tick_as)} must be the name of an entry of the payload, or None")
        if handler.payload is not None and isinstance(payload, handler.payload):
            payload = dump(handler.payload, payload)
        elif not isinstance(payload, Mapping | None):
            raise InvalidPayload(f"payload is {brief(payload)}: give a dict, whose entries are the handler's arguments")
        draft = Schedule(
            name=named(type if name is None else name),
            type=handler.type,
            cron=Cron(cron, timezone),
            payload=dict(payload or {}),
            missed=missed,
            overlap=overlap,
            tick_as=tick_as,
            priority=priority,
            key=key,
            max_retries=handler.max_retries if max_retries is None else max_retries,
            timeout=handler.timeout if timeout is None else timeout,
            retry_blocks_key=handler.retry_blocks_key,
            max_retries_given=max_retries is not None,
            timeout_given=timeout is not None,
        )
        # The job of a tick is checked as any other would be. What is kept is what is stored of it, so that nothing the
        # application does to its objects later changes a job.
        example, idempotency_key = draft.job(draft.cron, datetime.now(UTC))
        columns = NewJob(
            handler.type,
            example,
            priority=priority,
            key=key,
            idempotency_key=idempotency_key,
            max_retries=max_retries,
            timeout=timeout,
        ).columns(self, check=True)
        schedule = replace(
            draft,
            payload=json.loads(columns["payload"]),
            priority=int(columns.get("priority", 0)),
            key=columns.get("key"),
            max_retries=int(columns.get("max_retries", draft.max_retries)),
            timeout=float(columns.get("timeout", draft.timeout)),
        )
        if self.periodic_jobs.setdefault(schedule.name, schedule) is not schedule:
            raise InvalidJob(f"there is a periodic job named {schedule.name!r} already: give this one another name=")
        return schedule

    def schedules(self) -> list[ScheduleStatus]:
        """The periodic jobs that the database knows, by name: also of those that this process does not declare."""
        row = self.models.JobSchedule
        columns = (row.name, row.type, row.cron, row.timezone, row.fired_until, row.last_job_id)
        with self.engine.connect() as connection:
            found = connection.execute(select(*columns).order_by(row.name)).all()
        return [ScheduleStatus(*one, next_at=_next(one)) for one in found]

    def forget_schedule(self, name: str) -> bool:
        """Remove the row of a periodic job. One that workers still declare begins anew, from now.

        Returns
        -------
        bool
            Whether there was such a row.
        """
        table = self.names.text("job_schedule")
        statement = text(f"DELETE FROM {table} WHERE name = CAST(:name AS text) RETURNING name")
        return bool(Autocommit(self.engine).execute(statement, {"name": named(name)}))


def named(name: Any) -> str:
    """``name``, if it can name a schedule."""
    try:
        return job_type(name)
    except InvalidJob as error:
        raise InvalidJob(str(error).replace("type=", "name=", 1)) from None


def _next(row: Any) -> datetime | None:
    """The next tick of a row, if this process can tell."""
    try:
        return Cron(row.cron, row.timezone).next(row.fired_until)
    except JobsyncError:
        return None
