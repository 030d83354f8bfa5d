import os
from types import SimpleNamespace

import pytest

from schedlab.sim.core.audit import stalled
from schedlab.sim.errors import MAX_LISTED, SpecError, look_alike, nearest
from schedlab.sim.files import (
    alone,
    check_writable,
    open_regular,
    parse_json,
    read_json_object,
    read_text,
    write_texts,
)


@pytest.mark.parametrize(
    ("word", "choices", "message"),
    [
        ("fcsf", ["sjf", "fcfs"], "did you mean fcfs?"),
        ("FCFS", ["sjf", "fcfs"], "did you mean fcfs?"),
        ("bf16", ["BF16", "FP8"], "did you mean BF16?"),
        ("lottery", ["sjf", "fcfs"], "choose from fcfs, sjf"),
        (7, ["sjf", "fcfs"], "choose from fcfs, sjf"),
        ("lottery", [], "there are none"),
    ],
)
def test_nearest_names_a_look_alike_or_all_choices(word, choices, message):
    assert nearest(word, iter(choices)) == message


def test_nearest_among_many_lists_none_but_still_finds_a_look_alike():
    names = [f"column_{i}" for i in range(MAX_LISTED + 1)]
    assert nearest("xyz", names) == f"none of the {len(names)} names there are is like it"
    assert nearest(f"colunm_{MAX_LISTED}", names) == f"did you mean column_{MAX_LISTED}?"


def test_look_alike_below_the_cutoff_is_none():
    assert look_alike("promt", ["prompt_tokens"], cutoff=0.75) is None
    assert look_alike("promt_tokens", ["prompt_tokens"], cutoff=0.75) == "prompt_tokens"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("", "is a folder: a file is to be written there"),
        ("file/a.md", "file/a.md cannot be written: .*/file is a file"),
        ("file/deeper/a.md", "cannot be written: .*/file is a file"),
        ("locked/deeper/a.md", "cannot be written: nothing may be written in .*/locked"),
    ],
)
def test_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path, monkeypatch, where, message
):
    (tmp_path / "file").touch()
    (tmp_path / "locked").mkdir()
    # Whoever is root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, how: path.name != "locked")
    check_writable(tmp_path / "file")
    check_writable(tmp_path / "new" / "folder" / "a.md")
    with pytest.raises(SpecError, match=message):
        check_writable(tmp_path / where)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "locked"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"{", "not valid JSON: Expecting"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"[" * 100_000, "not valid JSON: nested too deeply"),
        (b"[1]", "must hold a JSON object"),
    ],
)
def test_read_json_object_on_a_bad_file_names_it_and_the_fault(tmp_path, content, message):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError, match=rf"config\.json(:1)?: {message}"):
        read_json_object(path)


def test_json_holds_every_whole_number_of_64_bits_and_no_other():
    least, most = -(2**63), 2**63 - 1
    assert parse_json(f"[{least}, {most}]", "a.json") == [least, most]
    for beyond in (least - 1, most + 1):
        with pytest.raises(SpecError, match=f"the integer {beyond} does not fit 64 bits"):
            parse_json(f"[{beyond}]", "a.json")


def test_text_is_read_up_to_its_limit_and_its_fault_is_told_with_the_line(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    monkeypatch.setenv("SCHEDLAB_MAX_TEXT_MIB", str(2**-20 * 9))
    path.write_bytes(b"nine byte")
    assert read_text(path) == "nine byte"
    path.write_bytes(b"ten bytes!")
    with pytest.raises(SpecError, match=r"a\.txt: larger than 0 MiB.*SCHEDLAB_MAX_TEXT_MIB"):
        read_text(path)
    for content, line in ((b"\xff", 1), (b"a\n\xff", 2), (b"\n\xff", 2), (b"a\n\nbc\xff\n", 3)):
        path.write_bytes(content)
        with pytest.raises(SpecError, match=rf"a\.txt:{line}: not UTF-8 text \(invalid start byte"):
            read_text(path)
    monkeypatch.setenv("SCHEDLAB_MAX_TEXT_MIB", "2.5")
    path.write_bytes(b" " * (5 * 2**19 + 1))
    with pytest.raises(SpecError, match="larger than 2 MiB"):
        read_text(path)
    for wrong in ("0", "1048576", "much"):
        monkeypatch.setenv("SCHEDLAB_MAX_TEXT_MIB", wrong)
        with pytest.raises(SpecError, match=f"SCHEDLAB_MAX_TEXT_MIB.*{wrong}"):
            read_text(path)


def test_what_is_no_file_is_named_for_what_it_is(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, what in ((tmp_path, "a folder"), (pipe, "a pipe, a socket or a device")):
        with pytest.raises(SpecError, match=f"cannot be read: it is not a file but {what}"):
            open_regular(path)
    with pytest.raises(SpecError, match="is no name of a file: embedded null byte"):
        open_regular(tmp_path / "a\0b")


def test_second_at_the_same_work_is_refused_until_the_first_has_ended(tmp_path):
    (tmp_path / "log").touch()
    for path in (tmp_path, tmp_path / "log"):
        with (
            alone(path, "sweep"),
            pytest.raises(SpecError, match=f"another sweep is at work in {tmp_path}$"),
            alone(path, "sweep"),
        ):
            pass
        with alone(path, "sweep"):
            pass


class Told(str):
    """A request as it is told of in a line."""

    __slots__ = ()

    def __repr__(self):
        return str(self)


@pytest.mark.parametrize(("num_waiting", "num_running"), [(0, 2), (3, 0), (7, 1)])
def test_stall_tells_the_first_who_wait_what_denied_them_and_how_many_more(
    num_waiting, num_running
):
    waiting = [Told(f"request {i}") for i in range(num_waiting)]
    denied = (waiting[1], "no seat is free") if num_waiting > 1 else None
    engine = SimpleNamespace(
        now_ns=1_500_000_250,
        requests=SimpleNamespace(waiting=iter(waiting), running=dict.fromkeys(range(num_running))),
        builder=SimpleNamespace(denied=denied),
    )
    told = str(stalled(engine, "nothing can happen")).splitlines()
    assert told == [
        "stalled at t = 1.500000 s: nothing can happen",
        *(f"  request {i}: {'no seat is free' if i == 1 else 'not reached'}"
          for i in range(min(num_waiting, 5))),
        *([f"  and {num_waiting - 5} more waiting"] if num_waiting > 5 else []),
        *([f"  {num_running} running but not scheduled"] if num_running else []),
    ]  # fmt: skip


def test_files_that_belong_together_stay_as_they_were_where_one_cannot_be_written(tmp_path):
    write_texts(tmp_path, {"a": "1", "b": "2"})
    with pytest.raises(UnicodeEncodeError):
        write_texts(tmp_path, {"a": "3", "b": "\ud800"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "1", "b": "2"}
