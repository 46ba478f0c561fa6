"""Settings of the workers under chaos, and the bound that follows from them."""

from __future__ import annotations

TOKENS = 96

# Quick enough that a minute has room for many deaths, slow enough for a busy machine of two cores.
COORDINATION = {
    "total_tokens": TOKENS,
    "heartbeat_interval_sec": 0.5,
    "heartbeat_timeout_sec": 3,
    "connection_grace_sec": 0.3,
    "lock_watch_interval_sec": 0.3,
    "drain_timeout_sec": 2,
    "certainty_wait_sec": 2,
    "callback_timeout_sec": 2,
}
HEARTBEAT_TIMEOUT_SEC = float(COORDINATION["heartbeat_timeout_sec"])

# What an application should set for its own sessions: a worker that is stopped between its fence and its COMMIT holds
# its tokens' rows in share mode, and one that is stopped after a write that row, until the server ends the session.
IDLE_IN_TRANSACTION_SEC = 6.0
LOCK_TIMEOUT_SEC = 2.0

# A busy machine: processes that start, a server that recovers.
SLACK_SEC = 3.0


def bound_sec() -> float:
    """Longest that a token may be without a worker that says yes to it, and longest that a mark may stand.

    Counted from the last disturbance of a worker that has part in it (its owner, whom it is to go to, the leader) or of
    the server. The terms: the leader dies together with another worker, so that the next leader must first outwait the
    one and then watch the other for itself; meanwhile a stopped worker's transaction may hold the token's row until the
    server ends that session, and the leader comes back to such rows every 2 s at least; a live owner may use its whole
    drain; an answer may be lost once, which takes a worker one answer's patience to find out.
    """
    timeout = HEARTBEAT_TIMEOUT_SEC
    answer = timeout - float(COORDINATION["heartbeat_interval_sec"])
    detected = max(2 * timeout, IDLE_IN_TRANSACTION_SEC)
    return detected + 2.0 + float(COORDINATION["drain_timeout_sec"]) + answer + SLACK_SEC
