"""Results appear whole or not at all, and destroy nothing that is not theirs."""

import errno
import os
import re
import subprocess
import sys

import pytest

from schedlab.experiments.results.results_folder import (
    SWEEP_FILE,
    _moved,
    add_to_marker,
    check_replaceable,
    replacing_folder,
    tidy_up_after_the_killed,
)
from schedlab.sim.errors import SpecError
from schedlab.sim.files import replacing, write_texts


def write(folder, text):
    with replacing_folder(folder) as new:
        (new / "inner").mkdir()
        (new / "inner" / "a.txt").write_text(text)


def test_replacing_folder_appears_at_the_end_only(tmp_path):
    folder = tmp_path / "deep" / "out"
    with replacing_folder(folder) as new:
        (new / "a.txt").write_text("1")
        assert not folder.exists()
    assert (folder / "a.txt").read_text() == "1"
    assert [path.name for path in folder.parent.iterdir()] == ["out"]


def test_replacing_folder_removes_files_of_the_run_before(tmp_path):
    with replacing_folder(tmp_path / "out") as new:
        (new / "old.txt").write_text("1")
    write(tmp_path / "out", "2")
    assert not (tmp_path / "out" / "old.txt").exists()
    assert (tmp_path / "out" / "inner" / "a.txt").read_text() == "2"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_replacing_folder_when_the_block_raises_keeps_the_old(tmp_path, error):
    write(tmp_path / "out", "1")

    def fail():
        with replacing_folder(tmp_path / "out") as new:
            (new / "a.txt").write_text("2")
            raise error

    with pytest.raises(error):
        fail()
    assert (tmp_path / "out" / "inner" / "a.txt").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("names_what_it_wrote", [False, True])
def test_file_that_a_full_disk_has_no_room_for_is_named_as_it_was_to_be(
    tmp_path, names_what_it_wrote
):
    def fill_the_disk():
        with replacing_folder(tmp_path / "out") as new, replacing(new / "steps.parquet") as part:
            part.write_text("a part")
            named = str(part) if names_what_it_wrote else None
            raise OSError(errno.ENOSPC, "Error writing bytes to file", named)

    path = tmp_path / "out" / "steps.parquet"
    told = f"[Errno {errno.ENOSPC}] No space left on device: '{path}'"
    with pytest.raises(OSError, match=re.escape(told)):
        fill_the_disk()
    assert list(tmp_path.iterdir()) == []


def test_files_that_belong_together_stay_as_they_were_where_one_cannot_be_written(tmp_path):
    (tmp_path / "second").mkdir()
    (tmp_path / "first").write_text("old")
    with pytest.raises(IsADirectoryError, match="second"):
        write_texts(tmp_path, {"first": "new", "second": "new"})
    assert (tmp_path / "first").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}


def test_replacing_folder_accepts_an_empty_folder(tmp_path):
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", "1")
    assert (tmp_path / "out" / "inner" / "a.txt").exists()


@pytest.mark.parametrize("where", ["notes.txt", "inner/notes.txt"])
def test_check_replaceable_names_a_file_that_is_not_a_result(tmp_path, where):
    write(tmp_path / "out", "1")
    (tmp_path / "out" / where).write_text("mine")
    with pytest.raises(SpecError, match=where):
        check_replaceable(tmp_path / "out")


def test_check_replaceable_names_other_results_in_a_folder_as_results(tmp_path):
    write(tmp_path / "out", "1")
    write(tmp_path / "out" / "deeper" / "one", "2")
    with pytest.raises(SpecError, match="out holds other results, in deeper/one, which would be"):
        check_replaceable(tmp_path / "out")


def test_check_replaceable_names_the_points_of_a_sweep_as_such(tmp_path):
    for name in (".lock", SWEEP_FILE, "notes.txt"):
        (tmp_path / name).write_text("")
    with pytest.raises(SpecError, match="holds the points of a sweep, which would be lost: choose"):
        check_replaceable(tmp_path)


def test_check_replaceable_refuses_files_and_links_to_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for name, said in (("file", "is not a folder"), ("link", "is a link to where nothing is")):
        with pytest.raises(SpecError, match=said):
            check_replaceable(tmp_path / name)


def test_results_are_written_where_a_link_leads_and_replace_no_others_there(tmp_path):
    disk, link = tmp_path / "disk", tmp_path / "link"
    (disk / "results").mkdir(parents=True)
    link.symlink_to(disk / "results")
    write(link, "1")
    write(link, "2")
    assert link.is_symlink()
    assert (disk / "results" / "inner" / "a.txt").read_text() == "2"
    assert [path.name for path in disk.iterdir()] == ["results"]
    (disk / "results" / "mine.txt").write_text("")
    with pytest.raises(SpecError, match=r"mine\.txt"):
        write(link, "3")


def test_check_replaceable_with_a_broken_marker_trusts_nothing(tmp_path):
    write(tmp_path / "out", "1")
    (tmp_path / "out" / ".schedlab.json").write_text("{")
    with pytest.raises(SpecError, match="is no result of schedlab"):
        check_replaceable(tmp_path / "out")


def test_add_to_marker_makes_later_files_replaceable(tmp_path):
    write(tmp_path / "out", "1")
    (tmp_path / "out" / "figure.png").write_text("x")
    add_to_marker(tmp_path / "out", ["figure.png"])
    check_replaceable(tmp_path / "out")


def test_what_a_killed_run_left_is_removed_or_put_back_by_the_next(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    alive = f".out.new-{os.getppid()}"
    for name in (f".out.new-{gone.pid}", alive, f".out.old-{gone.pid}"):
        (tmp_path / name).mkdir()
    write(tmp_path / "older", "older")
    (tmp_path / "older").rename(tmp_path / f".out.old-{gone.pid}")
    with pytest.raises(ZeroDivisionError), replacing_folder(tmp_path / "out"):
        raise ZeroDivisionError
    assert (tmp_path / "out" / "inner" / "a.txt").read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == [alive, "out"]


def test_link_that_is_named_like_what_a_killed_run_left_stays(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    write(tmp_path / "elsewhere", "kept")
    link = tmp_path / f".out.old-{gone.pid}"
    link.symlink_to(tmp_path / "elsewhere")
    tidy_up_after_the_killed(tmp_path, "out")
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == [link.name, "elsewhere"]


def test_half_of_what_a_killed_run_was_removing_is_never_put_back(tmp_path):
    write(tmp_path / "out", "older")
    removing = """
import os, shutil, sys
from pathlib import Path
from schedlab.experiments.results.results_folder import replacing_folder
def remove_one_and_die(folder, **_):
    for path in Path(folder).rglob("*.txt"):
        path.unlink()
        os._exit(9)
shutil.rmtree = remove_one_and_die
with replacing_folder(Path(sys.argv[1])) as new:
    (new / "a.txt").write_text("newer")
"""
    done = subprocess.run([sys.executable, "-c", removing, str(tmp_path / "out")], check=False)
    assert done.returncode == 9
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "out").rename(tmp_path / "moved aside by another run")
    tidy_up_after_the_killed(tmp_path, "out")
    assert [path.name for path in tmp_path.iterdir()] == ["moved aside by another run"]


def test_folder_that_cannot_be_made_is_named_as_it_was_given(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for below in ("out", "deeper/out"):
        with (
            pytest.raises(SpecError, match=r"out: cannot be written: .*/file is a file$"),
            replacing_folder(tmp_path / "file" / below),
        ):
            pass


def test_run_that_fails_removes_the_parent_only_if_it_made_it(tmp_path):
    for parent, stays in ((tmp_path / "there", True), (tmp_path / "new", False)):
        if stays:
            parent.mkdir()
        with pytest.raises(KeyError), replacing_folder(parent / "out"):
            raise KeyError
        assert parent.exists() is stays


def test_what_is_named_a_little_otherwise_than_what_a_killed_run_left_stays(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    ours = [f".out.new-{gone.pid}", f"..out.new-{gone.pid}.old-{gone.pid}"]
    others = [
        f".out.new-{gone.pid}.csv", f"out.new-{gone.pid}", f".out.new{gone.pid}", ".out.new-",
        f".other.new-{gone.pid}", f".outer.old-{gone.pid}",
    ]  # fmt: skip
    for name in (*ours, *others):
        (tmp_path / name).mkdir()
    tidy_up_after_the_killed(tmp_path, "out")
    assert {path.name for path in tmp_path.iterdir()} == set(others)


@pytest.mark.parametrize(
    ("number", "moved"),
    [(None, True), (errno.ENOTEMPTY, False), (errno.EEXIST, False), (errno.EACCES, None),
     (errno.EXDEV, None)],
)  # fmt: skip
def test_folder_is_not_moved_onto_one_in_use_whatever_the_system_calls_that(
    tmp_path, monkeypatch, number, moved
):
    def rename(self, target):
        if number is not None:
            raise OSError(number, "no")

    monkeypatch.setattr(type(tmp_path), "rename", rename)
    if moved is None:
        with pytest.raises(OSError, match="no"):
            _moved(tmp_path / "new", tmp_path / "there")
    else:
        assert _moved(tmp_path / "new", tmp_path / "there") == moved
