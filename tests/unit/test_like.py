from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobsync_orm.exceptions import InvalidPattern
from jobsync_orm.like import can_meet, compile_pattern, matches, validate


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("gpu-7", "gpu-7", True),
        ("gpu-7", "gpu-%", True),
        ("gpu-", "gpu-%", True),
        ("gpu-7", "%7", True),
        ("gpu-7", "%", True),
        ("gpu-7", "%%", True),
        ("gpu-7", "gpu-_", True),
        ("gpu-77", "gpu-_", False),
        ("gpu-", "gpu-_", False),
        ("gpu-7", "gpu", False),
        ("gpu-7", "pu-7", False),
        ("GPU-7", "gpu-7", False),
        ("a\nb", "a_b", True),
        ("a\nb", "a%b", True),
        ("a\n", "a", False),
        ("é", "_", True),
        ("e\u0301", "_", False),
        ("\U0001f600", "_", True),
        ("a_b", r"a\_b", True),
        ("axb", r"a\_b", False),
        ("100%", r"100\%", True),
        ("1000", r"100\%", False),
        ("a\\b", r"a\\b", True),
        ("ab", r"\a\b", True),
        ("a.b", "a.b", True),
        ("axb", "a.b", False),
        ("a*[b]$", "a*[b]$", True),
        ("", "", True),
        ("", "%", True),
        ("", "_", False),
        ("a", "", False),
        # The run in the middle must not eat what the end needs.
        ("aba", "a%ba", True),
        ("ab", "ab%ab", False),
        ("abab", "%ab%ab", True),
        ("aab", "%_a%b", True),
    ],
)
def test_matches(name: str, pattern: str, expected: bool) -> None:
    assert matches(name, pattern) is expected
    assert compile_pattern(pattern)(name) is expected


@pytest.mark.parametrize("count", [1, 2, 3, 40, 1000])
def test_a_pattern_of_many_runs_takes_no_more_than_length_times_length(count: int) -> None:
    # A backtracking matcher would need longer than the age of the universe for the third of them.
    assert not matches("a" * 2000, "%a" * count + "%b")
    assert matches("a" * 2000, "%a" * count)
    assert not matches("a" * 2000, "%a_" * count + "%b%")
    assert not matches("ab" * 1000, "%a%b" * count + "c")


@pytest.mark.parametrize("pattern", ["\\", "a\\", "%\\", "\\\\\\"])
def test_a_lone_backslash_at_the_end_is_refused(pattern: str) -> None:
    for call in (
        validate,
        compile_pattern,
        lambda p: matches("a", p),
        lambda p: can_meet(p, "a"),
        lambda p: can_meet("a", p),
    ):
        with pytest.raises(InvalidPattern, match="must not end in a lone backslash: write two"):
            call(pattern)


@pytest.mark.parametrize("pattern", ["a\0", "\udc80%", "\\\0"])
def test_what_postgresql_cannot_store_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidPattern, match="NUL or a lone surrogate"):
        validate(pattern)


@pytest.mark.parametrize("pattern", [None, 7, b"a%", ["a%"]])
def test_what_is_no_text_is_refused(pattern: object) -> None:
    with pytest.raises(InvalidPattern, match="must be text, not"):
        validate(pattern)  # type: ignore[arg-type]


def test_a_good_pattern_is_fine() -> None:
    validate(r"gpu-%\\")


@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [
        ("gpu-%", "%-7", True),
        ("gpu-%", "cpu-%", False),
        ("a", "a", True),
        ("a", "b", False),
        ("_", "__", False),
        ("_%", "__", True),
        (r"\%", "a", False),
        (r"\%", "%", True),
        (r"\_", "_", True),
        ("%a", "%b", False),
        ("%a%", "%b%", True),
        ("a%b%c", "a_c", True),
        ("a%b%c", "ac", False),
        # The empty name is no name.
        ("", "", False),
        ("", "%", False),
        ("%", "%%", True),
    ],
)
def test_can_meet(p: str, q: str, expected: bool) -> None:
    assert can_meet(p, q) is expected


ALPHABET = "ab"
NAMES = ["".join(letters) for length in range(1, 7) for letters in itertools.product(ALPHABET + "%", repeat=length)]


@given(st.text(alphabet=ALPHABET + "%_", max_size=3), st.text(alphabet=ALPHABET + "%_", max_size=3))
def test_two_patterns_meet_just_if_a_name_matches_both(p: str, q: str) -> None:
    # Two patterns of at most three parts that meet do so in a name of at most six letters: each run need only cover
    # what the other pattern says there.
    first, second = compile_pattern(p), compile_pattern(q)
    assert can_meet(p, q) == any(first(name) and second(name) for name in NAMES)
    assert can_meet(q, p) == can_meet(p, q)


patterns = st.lists(st.sampled_from(["%", "_", "a", "b", r"\%", r"\_", r"\\", r"\a", "é", "\n"]), max_size=12).map(
    "".join
)


@given(patterns, patterns)
def test_can_meet_is_symmetric(p: str, q: str) -> None:
    assert can_meet(p, q) == can_meet(q, p)


@given(st.text(alphabet="ab\\%_\né", min_size=1, max_size=8), patterns, patterns)
def test_patterns_that_match_one_name_can_meet(name: str, p: str, q: str) -> None:
    if matches(name, p) and matches(name, q):
        assert can_meet(p, q)
    # Every name is also a pattern for just itself, once its special characters are escaped.
    itself = "".join("\\" + letter if letter in "\\%_" else letter for letter in name)
    assert matches(name, itself)
    assert can_meet(itself, p) == matches(name, p)
