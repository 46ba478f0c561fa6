from __future__ import annotations

import pytest

from jobsync_orm.wording import counted


@pytest.mark.parametrize(
    ("number", "told"), [(0, "0 tokens are parked"), (1, "1 token is parked"), (2, "2 tokens are parked")]
)
def test_one_is_one(number: int, told: str) -> None:
    assert counted(number, "token is", "tokens are") + " parked" == told
