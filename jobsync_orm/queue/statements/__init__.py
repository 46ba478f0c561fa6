"""The SQL of every queue transaction that the library starts itself. Each is ONE statement, sent in one message.

So no transaction of a worker is ever open while its process is not inside a round trip: a process that is paused or
killed between two statements holds no row lock. Every write of an attempt names it, by the job's id and the attempt's
number, which each claim raises; written late, twice or by a worker that was thought dead, it changes nothing.

None of a worker's own waits for a row: all take jobs with ``SKIP LOCKED``. A job that somebody else's transaction holds
is left for the next turn, and nothing stands still for it. Two belong to a handler, which waits for its own job's row.

| statement | locks | if the process stops right after sending it |
|---|---|---|
| claim, heads | the jobs taken (skip) | taken or not; if so they are rescued with their node, or past their deadline |
| dequeue | the jobs taken (skip), until COMMIT | not taken; or taken, and rescued past their deadline |
| settle | the jobs settled (skip) | settled or not; sent again it changes nothing more |
| promote | due jobs (skip) | ready or not; any worker does it at the next turn |
| rescue, overdue | jobs of dead nodes or past their deadline (skip) | done or not; another worker does it |
| stale | jobs past their deadline or begun too long ago (skip) | done or not; call again |
| unblock, sweep | jobs whose last dependency has completed (skip) | done or not; the next sweep does it |
| presence, absence | own worker row; worker rows of dead nodes (skip) | written or not; the next worker cleans up |
| restamp | attempts under way of one worker (skip) | done or not; what is not is rescued |
| declare | rows of the schedules declared, in order of name | declared or not; the next worker that starts does it |
| fire | the schedule's row (skip) | the jobs are there and it is fired until then, or neither |
| settle_one | the handler's own job (waits), until COMMIT | rolled back with what the handler wrote |
| extend | the handler's own job (waits) | extended or not |
| discover, lines, survey, unserved, held, adopt, lost, schedules, orders | nothing | nothing |

One wait there is, for the end of another transaction that is one message long: two that claim different jobs of one
key at once, one of which the other could not see yet, meet in the unique index of jobs under way by key. The second is
refused with one of ``COLLIDED`` and sends its statement again. So no two attempts of a key are ever alive, whoever
thinks what of who owns it.

How each finds its rows
-----------------------
The worker's session has ``SESSION`` set, so that a plan walks the partial index its statement is written for whatever
the table's statistics say, which change faster than they are gathered. Rows are updated by their ``ctid``, which a
locked row keeps. Rows come back as one JSON text: a batch is one value to decode.
"""

from __future__ import annotations

from jobsync_orm.naming import Names
from jobsync_orm.queue.statements.claiming import Claiming
from jobsync_orm.queue.statements.ending import Ending
from jobsync_orm.queue.statements.firing import Firing
from jobsync_orm.queue.statements.keyed import WORKER_SILENT_SEC, Keyed
from jobsync_orm.queue.statements.parts import DEADLINE_SLACK_SEC, MOST_BYTES, Parts
from jobsync_orm.queue.statements.upkeep import Upkeep

__all__ = ["COLLIDED", "DEADLINE_SLACK_SEC", "MOST_BYTES", "SESSION", "WORKER_SILENT_SEC", "QueueStatements"]

# Of the queue's own sessions. No default of the database's or the role's may change what the statements mean.
SESSION = (
    "SET standard_conforming_strings = on; SET TimeZone = 'UTC'; SET DateStyle = 'ISO';"
    " SET default_transaction_isolation = 'read committed'; SET lock_timeout = '2s'; SET statement_timeout = '60s';"
    " SET idle_session_timeout = 0;"
    " SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_hashjoin = off;"
    " SET enable_mergejoin = off; SET enable_material = off; SET jit = off;"
    # Nothing in these plans depends on the values, and planning a statement takes as long as running it for ten jobs.
    " SET plan_cache_mode = force_generic_plan; SET client_encoding = 'UTF8'"
)

# SQLSTATEs with which ``heads`` is refused when another has just claimed of the same key: send it again.
COLLIDED = frozenset({"23505", "40P01"})


class QueueStatements(Claiming, Keyed, Ending, Upkeep, Firing):
    """The statements of one cluster, as text with ``$n`` parameters. Each part has a module of its own."""

    def __init__(self, names: Names) -> None:
        parts = Parts(names)
        Claiming.__init__(self, parts)
        Keyed.__init__(self, parts)
        Ending.__init__(self, parts)
        Upkeep.__init__(self, parts)
        Firing.__init__(self, parts)
