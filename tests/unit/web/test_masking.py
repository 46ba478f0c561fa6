"""What of a payload is shown."""

from __future__ import annotations

import pytest

from jobsync_orm.web.masking import DEPTH, ELEMENTS, MASK, TEXT, masked

SECRETS = (
    *("password", "smtp_password", "passwd", "PASSPHRASE", "client_secret", "access_token", "apiKey", "api_key"),
    *("Authorization", "aws_credentials", "private_key"),
)


@pytest.mark.parametrize("name", SECRETS)
def test_values_of_secret_names_are_masked(name: str) -> None:
    assert masked({"a": [{name: "hunter2", "n": 1}]}) == {"a": [{name: MASK, "n": 1}]}
    assert masked({name: {"nested": "hunter2"}}) == {name: MASK}
    assert masked({name: None}) == {name: None}


@pytest.mark.parametrize("name", ["token_id", "passenger", "key", "keyboard", "author"])
def test_other_names_are_shown(name: str) -> None:
    assert masked({name: "x"}) == {name: "x"}


def test_what_is_long_or_deep_is_cut() -> None:
    assert masked("x" * TEXT) == "x" * TEXT
    assert masked("x" * (TEXT + 1)) == "x" * TEXT + f"… ({TEXT + 1} characters)"
    assert masked(list(range(ELEMENTS + 3)))[-1] == "… 3 more"
    many = masked({str(number): number for number in range(ELEMENTS + 3)})
    assert (len(many), many["…"]) == (ELEMENTS + 1, "3 more")
    deep: object = 1
    for _ in range(DEPTH + 5):
        deep = [deep]
    assert "…" in str(masked(deep))
