"""Measured runs, each known by what was asked for, and kept on disk to be compared anywhere."""

from __future__ import annotations

import gc
import gzip
import json
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

from schedlab.experiments.comparing.level_runs import (
    LevelLoad,
    level_run_numbers,
    serve_level_requests,
)
from schedlab.experiments.comparing.machine import kernels, machine_name
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.identity import data_hash
from schedlab.sim.core.plan_log import RecordedStep
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import SpecError, described
from schedlab.sim.files import read_json_object, write_text
from schedlab.sim.result import RunResult

_MARKER = "measurement.json"
_ABOUT = "run.json"
_STEPS = "plan_log.jsonl.gz"
_LEVEL_STEPS = "level_log.jsonl.gz"
_TORN = (
    AttributeError, KeyError, TypeError, ValueError, EOFError, zlib.error, gzip.BadGzipFile,
)  # fmt: skip


class MeasuredRun(NamedTuple):
    """A run on the real backend.

    Attributes
    ----------
    result : RunResult
        What became of the requests.
    steps : list of RecordedStep
        Every step.
    machine : str
        GPU or processor that it ran on; see `schedlab.experiments.comparing.machine.machine_name`.
    level_steps : sequence of RecordedStep
        Those of its level runs, before and after it; none unless the experiment asks for them.
    """

    result: RunResult
    steps: list[RecordedStep]
    machine: str
    level_steps: Sequence[RecordedStep] = ()


def measure(
    spec: ExperimentSpec, repeat: int = 0, level_load: LevelLoad | None = None
) -> MeasuredRun:
    """Run one point on the real backend, with the garbage of others out of the way.

    What lives already is kept from the garbage collector, as serving engines do: looking through it
    again and again would count as time of the scheduler.

    Parameters
    ----------
    spec : ExperimentSpec
        The point, for the real backend.
    repeat : int
        0-based; the requests of level runs follow from it.
    level_load : LevelLoad, optional
        What the level runs before and after it are like; there are none if absent.
    """
    steps: list[RecordedStep] = []
    level: list[RecordedStep] = []
    with _frozen_garbage():
        *before, after = level_run_numbers(repeat)
        if level_load is not None:
            for number in before:
                level += serve_level_requests(spec, level_load, number)
        result = run(spec, record=steps)
        if level_load is not None:
            level += serve_level_requests(spec, level_load, after)
    return MeasuredRun(result, steps, machine_name(spec.real.device), level)


def steps_at_level(spec: ExperimentSpec, level_load: LevelLoad, repeat: int) -> list[RecordedStep]:
    """Return the steps of the level runs of a repeat alone, with no measured run among them."""
    with _frozen_garbage():
        return [
            step
            for number in level_run_numbers(repeat)
            for step in serve_level_requests(spec, level_load, number)
        ]


class MeasuredRuns:
    """A folder with one subfolder for each measured run.

    A run is known by `run_identity` and the number of its repeat, so that a folder may serve
    several experiments, and one more policy or load in a sweep invalidates nothing.

    Parameters
    ----------
    folder : Path
        Made with the first run that is kept.

    Raises
    ------
    SpecError
        If the folder holds something else.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / _MARKER).exists() and folder.exists() and any(folder.iterdir()):
            raise SpecError(f"{folder} holds something else than measured runs; choose another")

    def find(self, spec: ExperimentSpec, repeat: int) -> MeasuredRun | None:
        """Return a run of a point, or None if it is not kept.

        Parameters
        ----------
        spec : ExperimentSpec
            The point, for the real backend.
        repeat : int
            0-based.
        """
        folder = self._folder_of(spec, repeat)
        if not folder.exists():
            return None
        try:
            about = read_json_object(folder / _ABOUT)
            if about["cost_model"] not in (None, _cost_model_hash(spec)):
                return None
            steps = _read_steps(folder / _STEPS)
            has_level = (folder / _LEVEL_STEPS).exists()  # the identity says if it must
            level = _read_steps(folder / _LEVEL_STEPS) if has_level else []
            return MeasuredRun(RunResult.load(folder), steps, str(about["machine"]), level)
        except _TORN as error:
            raise SpecError(f"{folder}: not a measured run ({described(error)})") from error

    def keep(self, spec: ExperimentSpec, repeat: int, measured: MeasuredRun) -> None:
        """Write a run down; it is there whole or not at all."""
        if not (self.folder / _MARKER).exists():
            write_text(self.folder / _MARKER, json.dumps({"holds": "measured runs"}) + "\n")
        folder = self._folder_of(spec, repeat)
        new = folder.with_name(f".{folder.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        measured.result.save(new)
        _write_steps(new / _STEPS, measured.steps)
        if measured.level_steps:
            _write_steps(new / _LEVEL_STEPS, measured.level_steps)
        about = {
            "machine": measured.machine,
            "kernels": kernels(spec.backend, spec.real.device),
            # A run by its own measured times depends on a cost model only where a policy asks it,
            # or where its seconds are those of the profile.
            "cost_model": _cost_model_hash(spec)
            if _asked_for_estimates(measured) or spec.real.clock == "reference"
            else None,
        }
        write_text(new / _ABOUT, json.dumps(about) + "\n")
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        with suppress(FileNotFoundError):
            folder.rename(old)  # removed when the new one is there: a kill loses neither
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)

    def describe(self) -> str:
        """Say in a few words what is kept."""
        folders = [path.parent for path in sorted(self.folder.glob(f"*/{_ABOUT}"))]
        kernels = {str(read_json_object(folder / _ABOUT).get("kernels")) for folder in folders}
        of = f" of kernels {', '.join(sorted(kernels))}" if kernels else ""
        return f"{self.folder} holds {len(folders)} measured runs{of}"

    def _folder_of(self, spec: ExperimentSpec, repeat: int) -> Path:
        name = f"{spec.policy.name.rpartition(':')[2]}-{run_identity(spec)[:16]}-repeat-{repeat}"
        return self.folder / name


def run_identity(spec: ExperimentSpec) -> str:
    """Return a hash of all that a run on the real backend depends on, but the machine.

    Parameters
    ----------
    spec : ExperimentSpec
        One point, for the real backend.

    Returns
    -------
    str
        SHA-256 (hex) of its keys and of the kernels' source. Not in it: keys that have their
        default value, so that a run stays what it was when a later version has more of them; name
        and claim, how often the point is measured, what is called ok, and, unless the clock goes by
        it, the cost model.
    """
    data = spec.changes()
    for key in ("name", "claim"):
        data.pop(key, None)
    if spec.real.clock != "modelled":
        data.pop("cost_model", None)
    aside = ("repeats", "throughput_bar", "latency_bar")
    real = data.get("real", {})
    data["real"] = {key: value for key, value in real.items() if key not in aside}
    return data_hash({"point": data, "kernels": kernels(spec.backend, spec.real.device)})


def _cost_model_hash(spec: ExperimentSpec) -> str:
    """Return a hash of a cost model that leaves out what is in its folder for people to look at."""
    data = dict(spec.to_data()["cost_model"])
    if spec.cost_model.profile is not None:
        folder = Path(spec.cost_model.profile)
        if (folder / "fit.json").exists():
            data["profile"] = [str(folder / "fit.json"), str(folder / "meta.json")]
    return data_hash(data)


def _asked_for_estimates(measured: MeasuredRun) -> bool:
    real = measured.result.provenance["real"]
    assert isinstance(real, dict)
    return bool(real["estimates"])


@contextmanager
def _frozen_garbage() -> Iterator[None]:
    gc.collect()
    if gc.get_freeze_count():  # by who called, and nothing could be thawed without all of that
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def read_steps(run: Path) -> list[RecordedStep]:
    """Return the steps of a kept run.

    Raises
    ------
    SpecError
        If the folder holds none, or they cannot be read.
    """
    path = run / _STEPS
    try:
        return _read_steps(path)
    except (OSError, EOFError, ValueError, TypeError, AttributeError) as error:
        raise SpecError(f"{path}: no steps of a kept run: {error}") from error


def _write_steps(path: Path, steps: Sequence[RecordedStep]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(step, default=astuple) + "\n" for step in steps)


def _read_steps(path: Path) -> list[RecordedStep]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [_step(json.loads(line)) for line in lines]


def _step(row: list[Any]) -> RecordedStep:
    start_ns, tokens, preempted, shape, duration_ns, overhead_ns = row
    num_decodes, context_sum, context_max, chunks, *others = shape
    batch = BatchShape(
        num_decodes, context_sum, context_max, tuple((q, c) for q, c in chunks), *others
    )
    return RecordedStep(
        start_ns,
        {int(key): n for key, n in tokens.items()},
        tuple(preempted),
        batch,
        duration_ns,
        overhead_ns,
    )
