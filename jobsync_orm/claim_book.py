"""Claims: the exclusive, recorded right of this node to work on one task now.

The claim table has one row for each task. A claim ends when it is completed (its row is deleted and an audit row
written, in one transaction), when it is released, or with this life of the node; a row left over from a life that has
ended stops nobody. A token with open claims is handed over only after they end or ``drain_timeout_sec`` has passed;
past that its next owner takes over what is left, because nothing can complete it any more. (A claim made without owning
the token, by ``set_claim``, is no owner's: it lasts until its node ends it. Its row has epoch 0.)

Fencing numbers
---------------
``fence`` is drawn from a sequence, in the claiming statement, after that statement has locked the row of the token
``FOR SHARE`` and found it this node's. A token moves, and a later life of a node gets it again, by a statement that
locks the same row ``FOR UPDATE``, so after this one has ended; who claims the task after that draws a greater number.
Among the claims of one life the number grows because this process asks for the next claim of a task only when the one
before has ended. So the numbers of one task grow in the order in which its claims were given, across owners, restarts
and re-claims, and a store outside the database that keeps the greatest number it has seen can refuse everything older.
The sequence survives a crash of the server only as far as commits do: where the application's sessions have
``synchronous_commit = off`` a number could come twice, so the claiming statement waits for the disk all the same.

| statement | locks | if the process stops right after sending it |
|---|---|---|
| claim | token rows (share), claim rows | claimed or not; claims without an answer end with this life of the node |
| set_claim | claim rows | the same |
| complete | token rows (share), own claim rows | completed with its audit row, or not |
| release | own claim rows (skip) | released or not |
| explain, owners | nothing | nothing |

Nobody waits for a claim row that a transaction of an application holds: the task counts as claimed.

In a transaction of the application (``complete(session)``) the same statement holds its locks until that transaction
ends. Make it the last one: while a worker is paused between it and COMMIT, its token cannot move.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, TextClause, text

from jobsync_orm.autocommit import Autocommit, listed, micros
from jobsync_orm.coordinator.session import array
from jobsync_orm.exceptions import ClaimRefused
from jobsync_orm.naming import Names

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["ClaimBook", "Claimed"]


@dataclass(frozen=True, slots=True)
class Claimed:
    """A row of the claim table, as its claimer knows it."""

    key: str
    token: int
    epoch: int
    fence: int
    at: int  # microseconds since 1970, by the database's clock
    life: str  # incarnation of the node


class ClaimBook:
    """The SQL of one node's claims.

    Parameters
    ----------
    engine : Engine
        The application's engine.
    names : Names
        The cluster.
    node : str
        This node.
    date : datetime.date, optional
        The processing date of audit rows. None takes the database's date when a claim is completed.
    """

    def __init__(self, engine: Engine, names: Names, node: str, date: datetime.date | None = None) -> None:
        self._database = Autocommit(engine)
        self._node = node
        self._date = date
        token, members = names.text("token"), names.text("node")
        claim, audit = names.text("claim"), names.text("audit")
        asked = f"unnest({listed('ids', 'text')}, {listed('tokens', 'int')}) AS a (task_id, token_id)"
        alive = "n.name = :node AND n.incarnation = CAST(:life AS uuid) AND n.state <> 'away'"
        owner = "t.node = :node AND t.next_node IS NULL AND t.epoch BETWEEN n.join_epoch AND CAST(:known AS bigint)"

        # Whether the life behind a claim has ended is asked of what this statement sees, so the claim must be older
        # than that: a node that has joined meanwhile is not seen yet.
        void = f"""(NOT EXISTS (SELECT 1 FROM {members} o
                            WHERE o.name = k.node AND o.incarnation = k.incarnation AND o.state <> 'away')
                        AND EXISTS (SELECT 1 FROM {claim} s
                            WHERE s.task_id = k.task_id AND s.incarnation = k.incarnation))"""
        # A claim of an earlier owner, with which nothing can be completed any more.
        outlived = "(0 < k.epoch AND k.epoch < excluded.epoch)"
        same = "k.node = excluded.node AND k.incarnation = excluded.incarnation"

        def taking(asked: str, fence: str, takes: str) -> TextClause:
            return text(f"""
                WITH asked AS ({asked}),
                free AS (
                    SELECT task_id FROM {claim} WHERE task_id = ANY ({listed("ids", "text")}) FOR UPDATE SKIP LOCKED),
                held AS (
                    SELECT task_id FROM {claim} WHERE task_id = ANY ({listed("ids", "text")})
                    EXCEPT SELECT task_id FROM free),
                taken AS (
                    INSERT INTO {claim} AS k (task_id, token_id, node, incarnation, epoch, claimed_at)
                    SELECT task_id, token_id, CAST(:node AS text), CAST(:life AS uuid), epoch, clock_timestamp()
                    FROM asked WHERE task_id NOT IN (SELECT task_id FROM held) ORDER BY task_id
                    ON CONFLICT (task_id) DO UPDATE SET node = excluded.node, incarnation = excluded.incarnation,
                        epoch = excluded.epoch, token_id = excluded.token_id, claimed_at = excluded.claimed_at,
                        fence = {fence}
                        WHERE {takes}
                    RETURNING task_id, token_id, epoch, fence, claimed_at)
                SELECT task_id, token_id, epoch, fence, {micros("claimed_at")},
                    CASE current_setting('synchronous_commit') WHEN 'off'
                        THEN set_config('synchronous_commit', 'local', true) END
                FROM taken""")

        # A claiming statement that was repeated because its answer was lost, and is executed late, must not bring back
        # the lesser number it has drawn.
        self._claim = taking(
            f"""SELECT a.task_id, a.token_id, t.epoch FROM {asked} JOIN {token} t ON t.token_id = a.token_id
                    JOIN {members} n ON {alive}
                WHERE {owner} FOR SHARE OF t""",
            "greatest(k.fence, excluded.fence)",
            f"{same} OR {void} OR {outlived}",
        )
        self._mark = taking(
            f"""SELECT a.task_id, a.token_id,
                    CASE WHEN t.node = :node AND t.epoch >= n.join_epoch THEN t.epoch ELSE 0 END AS epoch
                FROM {asked} JOIN {token} t ON t.token_id = a.token_id JOIN {members} n ON {alive}""",
            f"CASE WHEN {same} THEN k.fence ELSE excluded.fence END",
            f"{same} OR {void}",
        )

        ending = f"""unnest({listed("ids", "text")}, {listed("tokens", "int")}, {listed("epochs", "bigint")},
                        {listed("fences", "bigint")}, {listed("lives", "uuid")})
                        WITH ORDINALITY AS a (task_id, token_id, epoch, fence, life, place)"""
        valid = f"""{claim} k JOIN {members} n
                            ON n.name = k.node AND n.incarnation = k.incarnation AND n.state <> 'away'"""
        this = """k.task_id = a.task_id AND k.fence = a.fence AND k.node = :node AND k.incarnation = a.life
                            AND t.node = :node AND t.epoch <= a.epoch"""

        def completing(lock: str) -> TextClause:
            return text(f"""
                WITH asked AS (SELECT * FROM {ending}),
                held AS (
                    SELECT a.* FROM asked a JOIN {token} t ON t.token_id = a.token_id JOIN ({valid}) ON {this}
                    FOR {lock}),
                ended AS (
                    DELETE FROM {claim} k USING held h
                    WHERE k.task_id = h.task_id AND k.fence = h.fence
                        AND (NOT CAST(:whole AS bool) OR (SELECT count(*) FROM held) = (SELECT count(*) FROM asked))
                    RETURNING h.task_id, h.token_id, h.epoch, h.place),
                written AS (
                    INSERT INTO {audit} (date, node, task_id, token_id, epoch, created_on)
                    SELECT coalesce(CAST(:date AS date), clock_timestamp()::date), CAST(:node AS text), task_id,
                        token_id, epoch, clock_timestamp()
                    FROM ended ORDER BY place)
                SELECT task_id FROM ended""")

        self._complete = completing("SHARE OF t FOR UPDATE OF k")
        self._complete_fenced = completing("UPDATE OF k")  # the session's fence locks the token, at COMMIT

        # At the instant of the claim or later, by this node, for this very claim: nobody else here works on the task.
        self._completed = text(f"""
            SELECT a.task_id FROM {audit} a JOIN unnest({listed("ids", "text")}, {listed("epochs", "bigint")},
                {listed("ats", "bigint")}) AS d (task_id, epoch, at) ON a.task_id = d.task_id
                AND a.epoch = d.epoch AND {micros("a.created_on")} >= d.at
            WHERE a.node = :node""")
        self._release = text(f"""
            DELETE FROM {claim} WHERE task_id IN (
                SELECT k.task_id
                FROM unnest({listed("ids", "text")}, {listed("lives", "uuid")}, {listed("fences", "bigint")})
                    AS a (task_id, life, fence)
                    JOIN {claim} k ON k.task_id = a.task_id AND k.node = :node AND k.incarnation = a.life
                        AND k.fence = a.fence
                FOR UPDATE OF k SKIP LOCKED)
            RETURNING task_id""")
        self._unset = text(f"""
            DELETE FROM {claim} WHERE task_id IN (
                SELECT task_id FROM {claim} WHERE task_id = ANY ({listed("ids", "text")}) AND node = :node
                    AND incarnation = CAST(:life AS uuid) FOR UPDATE SKIP LOCKED)
            RETURNING task_id""")
        self._standing = text(f"""
            SELECT a.task_id, a.token_id, t.node, k.task_id IS NOT NULL FROM {ending}
                JOIN {token} t ON t.token_id = a.token_id LEFT JOIN ({valid}) ON {this}
            ORDER BY a.token_id""")
        self._explain = text(f"""
            SELECT n.name IS NOT NULL, t.node, t.next_node, t.epoch, k.node, k.incarnation = CAST(:life AS uuid)
            FROM {token} t LEFT JOIN {members} n ON {alive} LEFT JOIN {claim} k ON k.task_id = :id
            WHERE t.token_id = :token""")

    # -- claiming ----------------------------------------------------------------------------------------------

    def claim(self, tokens: Mapping[str, int], life: str, known: int) -> list[Claimed]:
        """Claim tasks whose token is this node's, at an epoch it knows, and not on its way elsewhere.

        Parameters
        ----------
        tokens : mapping of str to int
            Token of each task, by the text of its id.
        life : str
            Incarnation of this node.
        known : int
            The epoch this node knows.

        Returns
        -------
        list of Claimed
            What has been claimed, in no order.
        """
        return self._take(self._claim, tokens, life, known)

    def mark(self, tokens: Mapping[str, int], life: str) -> list[Claimed]:
        """Claim tasks, whoever their tokens' owners are; what this node has claimed before stays as it is."""
        return self._take(self._mark, tokens, life, 0)

    def _take(self, statement: TextClause, tokens: Mapping[str, int], life: str, known: int) -> list[Claimed]:
        values: dict[str, object] = {"ids": array(tokens), "tokens": array(tokens.values()), "node": self._node}
        if statement is self._claim:
            values["known"] = known
        rows, _ = self._database.repeat(statement, {**values, "life": life})
        return [Claimed(key, token, epoch, fence, at, life) for key, token, epoch, fence, at, _ in rows]

    def refusal(self, id: str, token: int, life: str, known: int) -> ClaimRefused | None:
        """Why a task cannot be claimed, as of now; None if nothing speaks against it any more."""
        values = {"id": id, "token": token, "life": life, "node": self._node}
        ((member, owner, target, epoch, claimer, same_life),) = self._database.repeat(self._explain, values)[0]
        if not member:
            return ClaimRefused(f"{self._node} is not a member of its cluster at the moment", "not running", None)
        if owner != self._node:
            whose = "nobody's" if owner is None else f"that of {owner!r}"
            return ClaimRefused(f"task {id!r}: its token {token} is {whose}", "not owned", owner)
        if target is not None or epoch > known:
            target = target or (self._node if target is None else None)
            whither = "no node" if target is None else repr(target)
            return ClaimRefused(f"task {id!r}: its token {token} is on its way to {whither}", "moving", target)
        if claimer is not None and same_life:
            return ClaimRefused(f"task {id!r}: an open transaction holds its claim", "claimed", claimer)
        if claimer is not None:
            return ClaimRefused(f"task {id!r} is claimed by {claimer!r}", "claimed", claimer)
        return None

    # -- ending ------------------------------------------------------------------------------------------------

    def complete(self, claims: Sequence[Claimed]) -> set[str]:
        """End claims and write their audit rows, in one transaction. Returns the text of the ids completed."""
        rows, repeated = self._database.repeat(self._complete, self._ending(claims, whole=False))
        done = {row[0] for row in rows}
        if repeated and len(done) < len(claims):
            done |= self.completed([claim for claim in claims if claim.key not in done])
        return done

    def complete_in(self, session: Session, claims: Sequence[Claimed], *, fenced: bool) -> bool:
        """The same within the transaction of ``session``: all of them, or none and False.

        With ``fenced``, the session itself sees to the tokens when it commits.
        """
        statement = self._complete_fenced if fenced else self._complete
        rows = session.execute(statement, self._ending(claims, whole=True)).all()
        return len(rows) == len(claims)

    def _ending(self, claims: Sequence[Claimed], *, whole: bool) -> dict[str, object]:
        return {
            "ids": array(claim.key for claim in claims),
            "tokens": array(claim.token for claim in claims),
            "epochs": array(claim.epoch for claim in claims),
            "fences": array(claim.fence for claim in claims),
            "lives": array(claim.life for claim in claims),
            "whole": whole,
            "date": self._date,
            "node": self._node,
        }

    def completed(self, claims: Sequence[Claimed], session: Session | None = None) -> set[str]:
        """Which of these claims have an audit row: they were completed, and the answer was lost.

        Asked on ``session``, or else by a statement of its own.
        """
        values = {
            "ids": array(claim.key for claim in claims),
            "epochs": array(claim.epoch for claim in claims),
            "ats": array(claim.at for claim in claims),
            "node": self._node,
        }
        return {row[0] for row in self._rows(self._completed, values, session)}

    def release(self, claims: Sequence[Claimed]) -> set[str]:
        """Delete what is left of these claims. Returns the text of the ids of which there was something left."""
        values = {
            "ids": array(claim.key for claim in claims),
            "lives": array(claim.life for claim in claims),
            "fences": array(claim.fence for claim in claims),
            "node": self._node,
        }
        return {row[0] for row in self._database.repeat(self._release, values)[0]}

    def unset(self, keys: Iterable[str], life: str) -> list[str]:
        """End this node's claims on these tasks. Returns those that were claimed."""
        values = {"ids": array(keys), "node": self._node, "life": life}
        return [row[0] for row in self._database.repeat(self._unset, values)[0]]

    def standing(
        self, claims: Sequence[Claimed], session: Session | None = None
    ) -> tuple[set[str], dict[int, str | None]]:
        """Which of these claims could be completed now, by the text of their ids, and the owner of each token.

        Asked on ``session``, or else by a statement of its own.
        """
        rows = self._rows(self._standing, self._ending(claims, whole=False), session)
        return {row[0] for row in rows if row[3]}, {row[1]: row[2] for row in rows}

    def _rows(
        self, statement: TextClause, values: Mapping[str, object], session: Session | None
    ) -> list[Sequence[Any]]:
        if session is not None:
            return list(session.execute(statement, values))
        return self._database.repeat(statement, values)[0]
