"""What several workers do on one folder, and the laws that hold however they interleave."""

import copy
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

from schedlab.experiments.results.point_folder import content_hash_of
from schedlab.experiments.results.results_folder import replacing_folder
from schedlab.experiments.running import run as running
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.sweeps.store import Store
from schedlab.experiments.sweeps.sweep_all import Shard, sweep_all
from schedlab.experiments.sweeps.workers import InProcess
from schedlab.gpu_backend.calibration import measure, measured
from schedlab.gpu_backend.calibration_design import BatchPoint, design
from schedlab.sim.config import EngineConfig
from schedlab.sim.errors import SpecError
from schedlab.sim.files import write_text
from schedlab.sim.result import RunResult
from tests.torture.interleaving import History, World

_SPEC = {
    "workload": {"num_requests": 3, "request_rate": 4, "prompt_tokens": 64, "output_tokens": 8},
    "engine": {"max_num_seqs": 8, "max_model_len": 2048},
    "sweep": {"policy": ["fcfs", "shortest_prompt"]},
}
_CONFIG = EngineConfig(num_blocks=64, max_model_len=128, max_num_seqs=4)
_POINTS = design(_CONFIG, num_random=3, seed=0)[:6]
_ROUNDS = 2


def sweeps(root: Path, seed: int) -> History:
    """Let a sweep, the same again, and its two halves go at one folder.

    Raises
    ------
    AssertionError
        If a point is published torn, lost, or other than it is without haste; or if anybody is
        stopped by anything but another that does the same work.
    """
    with _computed_once():
        _sweep(root / "calm")
        expected = _content(root / "calm")
        folder, seen = root / "wild" / "out", set[str]()
        folder.parent.mkdir()

        def nothing_is_torn_or_lost() -> None:
            there = _published(folder)
            torn = [name for name in there if content_hash_of(folder / name) is None]
            assert not torn, f"torn: {torn}"
            assert seen <= there, f"lost: {seen - there}"
            seen.update(there)

        world = World(folder.parent, seed, 0.02, after_operation=nothing_is_torn_or_lost)
        parts = {"all": None, "again": None, "first": Shard(1, 2), "second": Shard(2, 2)}
        history = world.run({name: partial(_sweep, folder, part) for name, part in parts.items()})
        _require_refused(history, "another sweep is at work")
        _sweep(folder)
        found = _content(folder)
        assert found == expected, sorted(found.keys() ^ expected.keys())
    return history


def runs(root: Path, seed: int) -> History:
    """Let three runs write their results into one folder.

    Raises
    ------
    AssertionError
        If what is there is ever a mixture, anybody is stopped, or anything is left behind.
    """
    folder = root / "out"

    def write(mark: str) -> None:
        with replacing_folder(folder) as new:
            for name in "abc":
                write_text(new / name, mark)

    def marks() -> set[str]:
        return {(folder / name).read_text() for name in "abc"}

    def nothing_is_mixed() -> None:
        assert not folder.is_dir() or len(marks()) == 1

    world = World(root, seed, 0.03, after_operation=nothing_is_mixed)
    history = world.run({mark: partial(write, mark) for mark in "xyz"})
    assert not history.errors, history.errors
    write("last")
    assert marks() == {"last"}
    left = [path.name for path in root.iterdir() if path.suffix != ".tmp"]
    assert left == ["out"], left
    return history


def calibrations(root: Path, seed: int) -> History:
    """Let two calibrations measure into one folder.

    Raises
    ------
    AssertionError
        If readings mix or are taken twice, the result is another than without haste, or anybody is
        stopped by anything but the other.
    """
    _calibrate(root / "calm")
    folder = root / "wild"
    world = World(folder, seed, 0.1)
    history = world.run({name: partial(_calibrate, folder) for name in "ab"})
    _require_refused(history, "another calibration is at work")
    _calibrate(folder)
    assert (folder / "result.txt").read_text() == (root / "calm" / "result.txt").read_text()
    lines = (folder / "points.jsonl").read_text().splitlines()[1:]
    rows = [json.loads(line) for line in lines]
    visits = sorted((row["round"], row["point"]) for row in rows if row["point"] >= 0)
    assert visits == [(n, i) for n in range(_ROUNDS) for i in range(len(_POINTS))]
    return history


SCENARIOS: dict[str, Callable[[Path, int], History]] = {
    "sweeps": sweeps,
    "runs": runs,
    "calibrations": calibrations,
}


def _sweep(folder: Path, shard: Shard | None = None) -> None:
    swept = sweep_all(make_spec(_SPEC), Store(folder, light=True), InProcess(), shard=shard)
    assert not swept.failures, swept.failures[0].error


class _Timer:
    """Takes so long for a batch as its description says."""

    def time(
        self, point: BatchPoint, repetitions: int
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        seconds = 1e-3 + 1e-6 * int(hashlib.sha256(repr(point).encode()).hexdigest()[:4], 16)
        return (seconds,) * repetitions, (seconds,) * repetitions


def _calibrate(folder: Path) -> None:
    log = folder / "points.jsonl"
    found = measure(_Timer(), _CONFIG, _POINTS, log, about="nothing", num_rounds=_ROUNDS)
    lines = [f"{one.shape} {one.seconds}" for one in measured(found, _POINTS)]
    write_text(folder / "result.txt", "\n".join(lines))


def _require_refused(history: History, message: str) -> None:
    """Require that whoever was stopped was told so."""
    for name, error in history.errors:
        told = isinstance(error, SpecError) and message in str(error)
        assert told, f"{name}: {error!r} after {history.operations[-20:]}"


@cache
def _run_once(text: str) -> RunResult:
    return _REAL_RUN(make_spec(json.loads(text)))


_REAL_RUN = running.run


@contextmanager
def _computed_once() -> Iterator[None]:
    """Let each point be simulated once: what is tried is what becomes of its files."""

    def run(spec: ExperimentSpec, *_: Any) -> RunResult:
        return copy.copy(_run_once(json.dumps(spec.to_data())))

    with mock.patch.object(running, "run", run), mock.patch.dict(os.environ, SOURCE_DATE_EPOCH="0"):
        yield


def _published(folder: Path) -> set[str]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return {path.name for path in paths if path.is_dir() and not path.name.startswith(".")}


def _content(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder but for locks, and what one that was killed had begun."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith(".lock") and path.suffix != ".tmp":
            data = path.read_bytes()
            if path.name == "point.json":
                data = json.dumps({**json.loads(data), "seconds": 0}).encode()
            found[str(path.relative_to(folder))] = data
    return found
