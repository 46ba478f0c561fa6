"""How answers look."""

from __future__ import annotations

import json
import logging
import sys

import pytest
import typer

from jobsync_orm.cli.output import FAILED, INTERRUPTED, Block, Grid, Marked, Output, age
from jobsync_orm.exceptions import LockConflict
from jobsync_orm.terminal import PrintableLog, json_line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (119.4, "119 s"),
        (120, "2 min 0 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (2 * 86_400 - 1, "47 h 59 min"),
        (2 * 86_400, "2 d 0 h"),
        (1000 * 86_400, "1000 d 0 h"),
    ],
)
def test_a_duration_for_people(seconds: float | None, text: str) -> None:
    assert age(seconds) == text


def test_a_table_in_a_pipe_is_aligned_text(capsys: pytest.CaptureFixture[str]) -> None:
    Output().show(None, Grid(("name", ">count", "why"), [("a", 1000, None), ("long\nname", 5, "x")]), "end")
    assert capsys.readouterr().out == ("name       count  why\na           1000  -\nlong�name      5  x\nend\n")


def test_an_empty_table_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    Output().show(None, Grid(("name",), [], "no nodes"))
    assert capsys.readouterr().out == "no nodes\n"


def test_json_is_one_document_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(json=True)
    output.note("on the way")
    with output.progress(3, "work") as bar:
        bar.at(2)
    output.show({"name": "é\n"}, Grid(("name",), [("é",)]))
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    assert json.loads(captured.out) == {"name": "é\n"}
    assert captured.err == ""


@pytest.mark.parametrize("as_json", [True, False])
def test_errors_end_with_2(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, Output(json=as_json).errors():
        raise LockConflict("they cannot meet", 7, ("a", "b"))
    assert ended.value.exit_code == FAILED
    captured = capsys.readouterr()
    assert captured.out == ""
    expected = {"error": {"type": "LockConflict", "message": "they cannot meet"}}
    assert (json.loads(captured.err) if as_json else captured.err) == (
        expected if as_json else "error: they cannot meet\n"
    )


def test_an_interrupt_ends_with_130() -> None:
    with pytest.raises(typer.Exit) as ended, Output().errors():
        raise KeyboardInterrupt
    assert ended.value.exit_code == INTERRUPTED


@pytest.mark.parametrize("as_json", [True, False])
def test_what_nobody_can_confirm_is_refused(
    as_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: as_json, raising=False)
    output = Output(json=as_json)
    output.confirm("Sure?", yes=True)
    with pytest.raises(typer.Exit) as ended:
        output.confirm("Sure?", yes=False)
    assert ended.value.exit_code == FAILED
    assert "Sure? Nobody is there to ask: give --yes" in capsys.readouterr().err


def test_a_title_that_looks_like_markup_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Output().progress(10, "silence of [/b]") as bar:
        bar.at(3)


def test_text_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    output = Output()
    output.show(None, "a\x1b[2Jb\nc", Block("line\n\tline\x9b2J"), Marked("w\x1b", "red", " r\x07"))
    output.note("n\x1b]0;x\x07")
    with pytest.raises(typer.Exit):
        output.fail("one\ntwo\x1b")
    said = capsys.readouterr()
    assert said.out == "a\ufffd[2Jb\ufffdc\nline\n\tline\ufffd2J\nw\ufffd r\ufffd\n"
    assert said.err == "n\ufffd]0;x\ufffd\nerror: one\ntwo\ufffd\n"
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", lambda question, err: asked.append(question) or True)
    output.confirm("Cancel \x1b[31m?", yes=False)
    assert asked == ["Cancel \ufffd[31m?"]


def test_a_bar_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Output().progress(10, "t\x1b]0;x\x07") as bar:
        bar.at(3, "u\x1b]0;x\x07")
    assert "]0;x\ufffd" in (said := capsys.readouterr().err)
    assert "\x1b]0" not in said


def test_records_of_the_log_cannot_either(capsys: pytest.CaptureFixture[str]) -> None:
    formatter = PrintableLog("%(levelname)s %(message)s")
    try:
        raise ValueError("no\x1b[2J")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "job %s", ("t\x9b",), sys.exc_info())
    lines = formatter.format(record).splitlines()
    assert lines[:2] == ["ERROR job t\ufffd", "Traceback (most recent call last):"]
    assert lines[-1] == "ValueError: no\ufffd[2J"


def test_json_has_what_is_not_printable_in_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"é\x9b": "a\u202e\U000e0001\x7f\u2028ü"}
    assert json_line(value) == '{"é\\u009b": "a\\u202e\\udb40\\udc01\\u007f\\u2028ü"}'
    assert json.loads(json_line(value)) == value
