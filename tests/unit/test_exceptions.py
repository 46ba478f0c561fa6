"""What errors say, and that they survive the way to another process."""

from __future__ import annotations

import pickle

from jobsync_orm import OwnershipLost


def test_whose_the_lost_tokens_are_now() -> None:
    lost = OwnershipLost([4, 2, 3, 1], {1: "g2", 2: None, 3: "g1", 9: "g2"}, "g1")
    assert lost.tokens == (1, 2, 3, 4)
    assert lost.owners == {1: "g2", 2: None, 3: "g1"}
    message = str(lost)
    assert message.startswith(
        "tokens 1 (now g2's), 2 (nobody's), 3 (this node's, but not since the work began), 4 (owner unknown): "
    )
    assert "job.run" not in message, "it is no help for a checkpoint or a claim"


def test_one_token() -> None:
    assert str(OwnershipLost([7], {7: "g1"})).startswith("token 7 (now g1's): not this node's for as long as ")


def test_it_can_be_pickled() -> None:
    lost = OwnershipLost([1], {1: "g1"}, "g1")
    copy = pickle.loads(pickle.dumps(lost))
    assert (copy.tokens, copy.owners, str(copy)) == (lost.tokens, lost.owners, str(lost))
