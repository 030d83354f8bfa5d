"""Sittings: what is lost when a piece fails or hangs, or the whole is killed; and a rehearsal."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from schedlab.experiments.commands.app import app  # noqa: E402
from schedlab.gpu_backend import kernel_bench, selfcheck, sitting  # noqa: E402
from schedlab.gpu_backend.sitting import ARCHIVE, missing_packages, run, seconds, unpack  # noqa: E402
from schedlab.gpu_backend.sitting_pieces import (  # noqa: E402
    PIECES,
    REHEARSAL,
    ROOT,
    Piece,
    Sitting,
    device_holds_several,
)
from schedlab.sim.errors import SpecError  # noqa: E402

WORKER = """
import sys, time
from pathlib import Path
name, how, folder = sys.argv[1:]
print("begun", name, flush=True)
Path(folder, name + ".txt").write_text(name)
if how == "hang":  # in the midst of a character
    sys.stdout.buffer.write("\u2500".encode()[:2])
    sys.stdout.flush()
    time.sleep(60)
while how == "meet" and len([*Path(folder).glob("*.txt")]) < 2:
    time.sleep(0.02)
sys.exit(3 if how == "fail" else 0)
"""


@pytest.fixture
def pieces(tmp_path, monkeypatch):
    """Let the pieces be a script that writes a file, then ends well, fails or hangs."""
    (tmp_path / "sitting_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def put(hang_limit_s=4.0, **how):
        # Time to begin on a busy machine, where it is not what is tested.
        limits = {name: hang_limit_s if "hang" in word else 90.0 for name, word in how.items()}
        monkeypatch.setattr(sitting, "PIECES", {
            name: Piece(limits[name], 1.0, commands(name, word), only_checks="meet" in word)
            for name, word in how.items()
        })  # fmt: skip

    def commands(name, word):
        def some(at, seconds):
            for how in word.split():
                yield ["sitting_worker", f"{name}-{how}", how, str(at.results)]

        return some

    return put


def sat(tmp_path, budget_s=200.0):
    setup = REHEARSAL._replace(poll_s=0.05)
    end_s = time.monotonic() + budget_s
    return Sitting(setup, Path("none.yaml"), tmp_path / "work", tmp_path / "out", end_s)


def archived(tmp_path):
    with tarfile.open(tmp_path / "out" / ARCHIVE) as tar:
        return {Path(name).name for name in tar.getnames()}


def outcomes(at):
    return json.loads((at.results / "pieces.json").read_text())


@pytest.mark.slow
def test_piece_that_fails_or_hangs_costs_only_itself(pieces, tmp_path):
    pieces(bench="good fail good", steps="hang", tiles="good")
    at = sat(tmp_path)
    assert not run(at, ["bench", "steps", "tiles"])
    found = outcomes(at)
    assert found["bench"].startswith("failed, status 3")
    assert found["steps"].startswith("stopped at its time limit")
    assert found["tiles"].startswith("done")
    # The command behind the one that failed was not run; what came before is kept.
    there = archived(tmp_path)
    assert {"bench-good.txt", "bench-fail.txt", "steps-hang.txt", "tiles-good.txt"} <= there
    assert {"bench.log", "steps.log", "pieces.json"} <= there
    summary = (tmp_path / "out" / "summary.txt").read_text()
    assert [line.split(":")[0] for line in summary.splitlines()] == ["bench", "steps", "tiles"]


def describe_device(at, memory_bytes):
    at.results.mkdir(parents=True, exist_ok=True)
    rows = [{"name": "device", "value": "a GPU"}, {"name": "memory_bytes", "value": memory_bytes}]
    (at.results / "versions.json").write_text(json.dumps({"rows": rows}))


def test_pieces_that_only_check_run_at_the_same_time_where_the_device_holds_both(pieces, tmp_path):
    # Each waits for the other: one after the other neither would end.
    pieces(correctness="meet", tests="meet")
    at = sat(tmp_path)
    describe_device(at, 60 * 2**30)
    assert run(at, ["correctness", "tests"])
    assert set(outcomes(at)) == {"correctness", "tests"}
    logs = at.results / "logs"
    for name in ("correctness", "tests"):
        assert (logs / f"{name}.log").read_text().startswith("$ python -m sitting_worker " + name)


def test_clocks_are_written_down_while_a_watched_piece_runs_and_not_after(
    pieces, tmp_path, monkeypatch
):
    told = tmp_path / "nvidia-smi"
    told.write_text('#!/bin/sh\necho "$@"\nexec sleep 60\n')
    told.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    pieces(steps="good", comparison="good")
    watched = sitting.PIECES["comparison"]._replace(is_watched=True)
    monkeypatch.setitem(sitting.PIECES, "comparison", watched)
    begun, popen = [], subprocess.Popen

    def noted(command, **given):
        begun.append(popen(command, **given))
        return begun[-1]

    monkeypatch.setattr(sitting.subprocess, "Popen", noted)
    at = sat(tmp_path)
    assert run(at, ["steps"])
    assert not (at.results / "clocks.csv").exists()
    (at.results / "clocks.csv").write_text("of a sitting before\n")
    assert run(at, ["comparison"])
    assert len(begun) == 3
    assert all(process.returncode is not None for process in begun)
    before, asked = (at.results / "clocks.csv").read_text().splitlines()
    assert before == "of a sitting before"
    assert "clocks.sm" in asked
    assert "power.draw" in asked
    assert asked.endswith("--format=csv,noheader -l 10")
    assert [name for name, piece in PIECES.items() if piece.is_watched] == [
        "calibrate", "comparison",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("memory_bytes", "turns"),
    [
        (60 * 2**30, [["versions"], ["correctness", "smoke", "tests"], ["bench"], ["tests"]]),
        (60 * 2**30 - 1, [[one] for one in
                          ("versions", "correctness", "smoke", "tests", "bench", "tests")]),
    ],
)  # fmt: skip
def test_pieces_are_alone_if_they_measure_or_the_device_is_small(tmp_path, memory_bytes, turns):
    at = sat(tmp_path)
    describe_device(at, memory_bytes)
    assert list(sitting._turns(at, [name for turn in turns for name in turn])) == turns
    assert [name for name, piece in PIECES.items() if piece.only_checks] == [
        "correctness", "smoke", "tests",
    ]  # fmt: skip


def test_device_that_was_never_looked_at_holds_one_piece(tmp_path):
    at = sat(tmp_path)
    assert list(sitting._turns(at, ["correctness", "tests"])) == [["correctness"], ["tests"]]
    describe_device(at, 150 * 10**9)
    (at.results / "versions.json").write_text("{}")
    assert not device_holds_several(at.results)


@pytest.mark.slow
def test_archive_is_renewed_while_a_piece_runs(pieces, tmp_path, monkeypatch):
    pieces(hang_limit_s=90.0, steps="hang")
    pack = sitting.pack

    def interrupted(at):
        pack(at)
        raise KeyboardInterrupt

    monkeypatch.setattr(sitting, "pack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(sat(tmp_path), ["steps"])
    # Before the piece was stopped, and noted.
    assert "steps-hang.txt" in archived(tmp_path)
    assert "pieces.json" not in archived(tmp_path)


@pytest.mark.slow
def test_archive_is_renewed_for_whole_files_that_are_new_or_longer(tmp_path):
    names = ("a.json", "in/b.csv", "c.log", ".d.new/e.csv", "in/.f.csv.tmp-7", "in/.g.old-3")
    for size, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    folders = {one for one in sitting._state(tmp_path) if one[0].endswith("/in")}
    told = sitting._state(tmp_path) - folders
    assert told == {(str(tmp_path / "a.json"), 0), (str(tmp_path / "in/b.csv"), 1)}


def test_resumed_sitting_repeats_what_failed_and_not_what_is_done(pieces, tmp_path):
    pieces(bench="good", steps="fail")
    run(sat(tmp_path), ["bench", "steps"])
    archive = tmp_path / "kept.tar.gz"
    (tmp_path / "out" / ARCHIVE).rename(archive)
    other = tmp_path / "elsewhere"
    unpack(archive, other / "work")
    pieces(bench="fail", steps="good", tiles="good")
    at = sat(other)
    assert run(at, ["bench", "steps", "tiles"])
    assert not (at.results / "bench-fail.txt").exists()
    assert {"bench-good.txt", "steps-good.txt", "tiles-good.txt"} <= archived(other)


@pytest.mark.slow
def test_results_of_other_kernels_are_kept_apart(pieces, tmp_path, monkeypatch):
    pieces(bench="good")
    run(sat(tmp_path), ["bench"])
    monkeypatch.setattr("schedlab.gpu_backend.sitting_pieces.kernel_hash", lambda: "0123")
    at = sat(tmp_path)
    assert run(at, ["bench"])
    assert at.results.name == "kernels-0123"
    assert len(list((tmp_path / "work").glob("kernels-*/bench-good.txt"))) == 2


def test_comparisons_are_of_the_device_that_their_profile_was_made_on(tmp_path):
    at = sat(tmp_path)
    for profile, piece, place in (("profile", "comparison", 0), ("smoke/profile", "smoke", 1)):
        meta = at.results / profile / "meta.json"
        meta.parent.mkdir(parents=True)
        meta.write_text('{"hardware": "h100-80gb"}')
        commands = PIECES[piece].commands(at, 60.0)
        *_, command = (next(commands) for _ in range(place + 1))
        assert {"name=compare-h100-80gb", "hardware=h100-80gb"} <= set(command)
        assert f"cost_model={meta.parent}" in command


@pytest.mark.slow
def test_piece_without_time_or_without_what_it_needs_is_not_begun(pieces, tmp_path):
    pieces(bench="good")
    at = sat(tmp_path, budget_s=0.5)
    assert not run(at, ["bench"])
    assert outcomes(at)["bench"] == "not begun: no time was left"
    sitting.PIECES["comparison"] = PIECES["comparison"]
    at = sat(tmp_path)
    assert not run(at, ["comparison"])
    assert outcomes(at)["comparison"] == "not begun: there is no profile/fit.json"


@pytest.mark.slow
def test_nothing_is_tried_where_not_even_the_versions_can_be_told(pieces, tmp_path):
    pieces(versions="fail", bench="good")
    at = sat(tmp_path)
    with pytest.raises(SpecError, match=r"versions.log says why"):
        run(at, ["versions", "bench"])
    assert list(outcomes(at)) == ["versions"]


@pytest.mark.slow
def test_sitting_on_a_gpu_that_is_not_there_ends_with_status_2(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    where = ["-o", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    assert sitting.main([*where, "--pieces", "versions,bench"]) == 2
    shown = capsys.readouterr()
    assert "nothing was measured" in shown.err
    assert "use device cpu" in shown.out


def test_unpacking_keeps_what_is_there_and_refuses_half_an_archive(tmp_path):
    whole = tmp_path / "whole.tar.gz"
    with tarfile.open(whole, "w:gz") as tar:
        for name in ("a.txt", "b.txt"):
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"old"))
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.txt").write_text("new")
    unpack(whole, work)
    assert [(work / name).read_text() for name in ("a.txt", "b.txt")] == ["new", "old"]
    with tarfile.open(stray := tmp_path / "stray.tar.gz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("../elsewhere.txt"), io.BytesIO())
    with pytest.raises(SpecError, match=r"'../elsewhere.txt' is no file of a sitting"):
        unpack(stray, work)
    half = tmp_path / "half.tar.gz"
    half.write_bytes(whole.read_bytes()[:40])
    with pytest.raises(SpecError, match=r"half.tar.gz: not a whole archive"):
        unpack(half, work)


def test_missing_packages_are_named_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    assert missing_packages() == []
    real = sitting.metadata.version
    monkeypatch.setattr(
        sitting.metadata, "version", lambda name: "0.12.5" if name == "typer" else real(name)
    )
    assert sitting.main(["-o", str(tmp_path / "out"), "--work", str(tmp_path / "work")]) == 2
    said = capsys.readouterr().err
    assert "typer>=0.19.2 (0.12.5 is here)" in said
    assert "--no-index" in said
    assert not (tmp_path / "out").exists()


def test_budget_is_a_duration_and_pieces_have_names(tmp_path, capsys):
    assert [seconds(text) for text in ("90", "90s", "1.5m", "1h")] == [90, 90, 90, 3600]
    for wrong in (["--budget", "soon"], ["--pieces", "bench,dance"]):
        with pytest.raises(SystemExit):
            sitting.main(["-o", str(tmp_path), *wrong])
    assert "'soon' is no duration" in (said := capsys.readouterr().err)
    assert "'dance' is none of versions, correctness" in said


def rehearsal(folder, *options):
    return [
        "--device", "cpu", "-o", str(folder / "out"), "--work", str(folder / "work"),
        "--budget", "10m", *options,
    ]  # fmt: skip


def rehearse(folder, *options):
    """Begin a sitting on the CPU in a session of its own, so that all of it can be killed."""
    return subprocess.Popen(
        [sys.executable, "-m", "schedlab.gpu_backend.sitting", *rehearsal(folder, *options)],
        cwd=ROOT, start_new_session=True, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def in_this_process(piece, command):
    module, *options = command
    assert module == "schedlab"
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, f"{done.output} {done.exception}"
    return SimpleNamespace(poll=lambda: 0)


@pytest.mark.slow
def test_parts_of_the_selfcheck_that_a_sitting_runs_all_pass_on_the_tiny_model(
    tmp_path, monkeypatch
):
    # In this process: each of its own would take longer to import torch than to run.
    if torch.cuda.is_available():
        pytest.skip("the kernels are not interpreted here")
    # The interpreter takes its time over each head.
    monkeypatch.setattr(kernel_bench, "NUM_HEADS", 4)
    monkeypatch.setattr(kernel_bench, "NUM_KV_HEADS", 1)
    at = sat(tmp_path)
    parts = ["versions", "ceilings", "correctness", "bench", "steps", "tiles"]
    for part in parts:
        ((module, *options),) = PIECES[part].commands(at, 60.0)
        assert module == "schedlab.gpu_backend.selfcheck"
        assert selfcheck.main(options) == 0
        record = json.loads((at.results / f"{part}.json").read_text())
        assert record["complete"]
        assert record["failed"] == 0


def test_tests_of_a_sitting_are_those_that_need_a_gpu(tmp_path):
    ((module, *options),) = PIECES["tests"].commands(sat(tmp_path), 60.0)
    assert module == "pytest"
    assert options[:2] == ["-m", "gpu"]
    assert Path(options[-1]) == Path(__file__).parent


@pytest.mark.slow
def test_rehearsed_sitting_that_is_killed_goes_on_from_its_archive_to_the_comparison(
    tmp_path, monkeypatch, capsys, blank_figures
):
    # What is not to be killed runs in this process, which need not import torch once more.
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sitting._Running, "_start", in_this_process)
    begun, first, second = (tmp_path / name for name in ("begun", "first", "second"))
    assert sitting.main(rehearsal(begun, "--pieces", "calibrate")) == 0
    both = ["--pieces", "calibrate,comparison", "--resume"]
    process = rehearse(first, *both, str(begun / "out" / ARCHIVE))
    archive = first / "out" / ARCHIVE
    try:
        # Killed as soon as the archive holds a measured run of the comparison.
        while not (archive.exists() and "run.json" in archived(first)):
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.1)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    capsys.readouterr()
    assert sitting.main(rehearsal(second, *both, str(archive))) == 0
    said = capsys.readouterr().out
    assert said.count(", before") == 1, said
    with tarfile.open(second / "out" / ARCHIVE) as tar:
        (name,) = (n for n in tar.getnames() if n.endswith("comparison/comparison.json"))
        data = json.load(tar.extractfile(name))
    assert data["runs"] == "1 measured runs a point"
    assert len(data["points"]) == 4
    with tarfile.open(archive) as tar:
        kept = [name for name in tar.getnames() if name.endswith("plan_log.jsonl.gz")]
        assert len(kept) >= 1
        for name in kept:  # with how long each step took, which no other run repeats
            assert (second / "work" / name).read_bytes() == tar.extractfile(name).read()


@pytest.mark.parametrize(
    ("before", "ends", "asked", "all_done"),
    [
        ({}, {}, ["bench", "steps", "comparison"], True),
        ({"bench": "done"}, {}, ["steps", "comparison"], True),
        ({"bench": "failed", "comparison": "done"}, {}, ["bench", "steps", "comparison"], True),
        ({"steps": "done"}, {"bench": "stopped"}, ["bench", "comparison"], False),
        ({}, {"comparison": "failed"}, ["bench", "steps", "comparison"], False),
    ],
)
def test_sitting_begins_what_is_not_done_and_a_comparison_always(
    tmp_path, monkeypatch, before, ends, asked, all_done
):
    names, run_now = ["bench", "steps", "comparison"], []
    monkeypatch.setattr(sitting, "PIECES", {name: Piece(9.0, 1.0, None) for name in names})

    def end_at_once(_, together, note):
        for name in together:
            run_now.append(name)
            note(name, ends.get(name, "done"))

    monkeypatch.setattr(sitting, "_run_together", end_at_once)
    at = sat(tmp_path)
    at.results.mkdir(parents=True)
    (at.results / "pieces.json").write_text(json.dumps(before))
    assert run(at, names) is all_done
    assert run_now == asked
    assert outcomes(at) == {**before, **dict.fromkeys(names, "done"), **ends}


def test_missing_packages_are_those_older_than_they_have_to_be_or_not_there(monkeypatch, tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        "[project]\n"
        'dependencies = ["same>=1.2", "newer>=1.9", "older>=1.10.1", "gone>=3", "local>=2.6"]\n'
        '[project.optional-dependencies]\ngpu = ["torch>=2.6; platform_system"]\nray = ["ray>=9"]\n'
    )
    there = {
        "same": "1.2.0",
        "newer": "1.10",
        "older": "1.9.99",
        "local": "2.6.0+cpu",
        "torch": "2.5.9",
    }

    def version(name):
        if name not in there:
            raise sitting.metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(sitting, "ROOT", tmp_path)
    monkeypatch.setattr(sitting.metadata, "version", version)
    assert missing_packages() == ["older>=1.10.1 (1.9.99 is here)", "gone>=3",
                                  "torch>=2.6 (2.5.9 is here)"]  # fmt: skip
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["odd"]\n[project.optional-dependencies]\ngpu = []\n'
    )
    with pytest.raises(SpecError, match=r"requirement 'odd' is not NAME>=VERSION"):
        missing_packages()
