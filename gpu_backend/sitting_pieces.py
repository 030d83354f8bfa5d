"""The pieces of a sitting: what each runs, how long it may take, and what it needs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from schedlab.gpu_backend.kernel_hash import kernel_hash
from schedlab.sim.files import read_json_object, write_text

ROOT = Path(__file__).resolve().parents[1]
"""The checkout: sittings run from one, for its experiments and tests."""

LOADS = (1.4, 0.8)
"""Requests a second of the comparison, as multiples of what fcfs serves by the profile."""


class Setup(NamedTuple):
    """What a sitting measures on a kind of device."""

    device: str
    calibration: tuple[str, ...]
    """Options of ``schedlab calibrate``: the limits are those of the comparison."""
    comparison: tuple[str, ...]
    """Changes to the experiment of the comparison."""
    small_calibration: tuple[str, ...]
    small_comparison: tuple[str, ...]
    """The same of a small model, to see the whole chain run before time is spent on it."""
    poll_s: float
    """How often the results are looked at while a piece runs."""


def _calibration(model: str, seqs: int, tokens: int, length: int, blocks: int) -> tuple[str, ...]:
    options = {
        "model": model, "max-num-seqs": seqs, "max-num-batched-tokens": tokens,
        "max-model-len": length, "num-blocks": blocks,
    }  # fmt: skip
    return tuple(str(word) for key, value in options.items() for word in (f"--{key}", value))


def _comparison(model: str, seqs: int, tokens: int, length: int, blocks: int) -> tuple[str, ...]:
    return (
        f"model={model}", f"engine.max_num_seqs={seqs}", f"engine.max_num_batched_tokens={tokens}",
        f"engine.max_model_len={length}", f"engine.num_gpu_blocks_override={blocks}",
        f"workload.max_total_tokens={length}", "workload.num_requests=40",
        "sweep.policy=[fcfs, prefill_first]", "real.repeats=1",
    )  # fmt: skip


_SMALL = ("schedlab-small", 16, 256, 1024, 400)
_TINY = ("schedlab-tiny", 4, 64, 128, 32)
_ON_CPU = ("engine.dtype=fp32", "real.device=cpu")

GPU = Setup(
    device="cuda",
    calibration=(*_calibration("llama-3-8b", 256, 2048, 4096, 6000), "--rounds", "3"),
    comparison=(),
    small_calibration=(*_calibration(*_SMALL), "--rounds", "1"),
    small_comparison=(*_comparison(*_SMALL), "sweep.workload.request_rate=[20]"),
    poll_s=5.0,
)
REHEARSAL = Setup(
    device="cpu",
    calibration=(*_calibration(*_TINY), "--rounds", "1"),
    comparison=(*_ON_CPU, *_comparison(*_TINY), "workload.num_requests=24"),
    small_calibration=(*_calibration(*_TINY), "--rounds", "1"),
    small_comparison=(
        *_ON_CPU, *_comparison(*_TINY), "workload.num_requests=24", "sweep.policy=[fcfs]",
        "sweep.workload.request_rate=[20]",
    ),
    poll_s=0.5,
)  # fmt: skip


class Sitting(NamedTuple):
    """One sitting.

    Attributes
    ----------
    setup : Setup
        What to measure.
    spec : Path
        Experiment of the comparison.
    work : Path
        Results; those of each version of the kernels in a folder of their own.
    output : Path
        Gets the archive and summary.txt.
    end_s : float
        By the monotonic clock; nothing runs later.
    """

    setup: Setup
    spec: Path
    work: Path
    output: Path
    end_s: float

    @property
    def results(self) -> Path:
        """Folder of the present kernels' results."""
        return self.work / f"kernels-{kernel_hash()}"

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.end_s - time.monotonic()


Command = list[str]


class Piece(NamedTuple):
    """A part of a sitting."""

    limit_s: float
    least_s: float
    """With less left it is not begun."""
    commands: Callable[[Sitting, float], Iterator[Command]]
    """Given the sitting and the piece's seconds; each command is asked for when the one before has
    succeeded."""
    needs: str = ""
    """A file of the results without which it cannot be begun, and so the piece that makes it."""
    only_checks: bool = False
    """Whether no time that it takes is a result."""
    is_watched: bool = False
    """Whether the device's clocks and power are written down meanwhile, where it tells them."""


def _part(name: str) -> Callable[[Sitting, float], Iterator[Command]]:
    def commands(sitting: Sitting, seconds: float) -> Iterator[Command]:
        yield [
            "schedlab.gpu_backend.selfcheck", "--device", sitting.setup.device, "--only", name,
            "-o", str(sitting.results),
        ]  # fmt: skip

    return commands


def _smoke(sitting: Sitting, seconds: float) -> Iterator[Command]:
    setup, folder = sitting.setup, sitting.results / "smoke"
    profile = folder / "profile"
    yield [
        "schedlab", "calibrate", "--device", setup.device, *setup.small_calibration, "-q",
        "-o", str(profile),
    ]  # fmt: skip
    yield [
        "schedlab", "measure", str(sitting.spec), *_of_profile(profile), *setup.small_comparison,
        "--no-check", "--keep", str(folder / "measured"), "-o", str(folder / "comparison"),
    ]  # fmt: skip


def _of_profile(profile: Path) -> tuple[str, ...]:
    """Return the changes that let an experiment be of the device that a profile was made on."""
    hardware = read_json_object(profile / "meta.json")["hardware"]
    return f"name=compare-{hardware}", f"hardware={hardware}", f"cost_model={profile}"


def _tests(sitting: Sitting, seconds: float) -> Iterator[Command]:
    yield ["pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", str(ROOT / "tests" / "gpu")]


def _calibrate(sitting: Sitting, seconds: float) -> Iterator[Command]:
    setup = sitting.setup
    yield [
        "schedlab", "calibrate", "--device", setup.device, *setup.calibration, "-q",
        "--time-limit-s", f"{max(0.0, seconds - 30):.0f}",
        "-o", str(sitting.results / "profile"),
    ]  # fmt: skip


def _compare(sitting: Sitting, seconds: float) -> Iterator[Command]:
    """Set the loads by what the profile says the device can, once; then measure and compare."""
    begun_s = time.monotonic()
    results, setup = sitting.results, sitting.setup
    spec = [str(sitting.spec), *_of_profile(results / "profile"), *setup.comparison]
    loads = results / "loads.json"
    if not loads.exists():
        yield [
            "schedlab", "run", *spec, "backend=sim", "sweep.policy=[fcfs]",
            "sweep.workload.request_rate=[.inf]", "-q", "-o", str(results / "capacity"),
        ]  # fmt: skip
        found = read_json_object(results / "capacity" / "result.json")["request_throughput"]
        rates = [float(f"{factor * found:.3g}") for factor in LOADS]
        write_text(loads, json.dumps({"capacity": found, "request_rates": rates}) + "\n")
    rates = read_json_object(loads)["request_rates"]
    # Each point is simulated once more and drawn after the last run.
    writing_s = min(60.0, seconds / 3)
    left_s = seconds - (time.monotonic() - begun_s) - writing_s
    yield [
        "schedlab", "measure", *spec, f"sweep.workload.request_rate={rates}", "--no-check",
        "--keep", str(results / "measured"), "--time-limit-s", f"{max(0.0, left_s):.0f}",
        "-o", str(results / "comparison"),
    ]  # fmt: skip


_SEVERAL_BYTES = 60 * 2**30
"""What a device has to hold for the pieces that only check to run on it at the same time."""


def device_holds_several(results: Path) -> bool:
    """Tell whether pieces that only check can share the device, by what the versions say of it."""
    path = results / "versions.json"
    if not path.exists():
        return False
    rows = read_json_object(path).get("rows", [])
    return any(row["name"] == "memory_bytes" and row["value"] >= _SEVERAL_BYTES for row in rows)


PIECES: dict[str, Piece] = {
    "versions": Piece(120, 5, _part("versions")),
    "correctness": Piece(240, 40, _part("correctness"), only_checks=True),
    "smoke": Piece(150, 20, _smoke, only_checks=True),
    "tests": Piece(180, 20, _tests, only_checks=True),
    "ceilings": Piece(120, 10, _part("ceilings")),
    "bench": Piece(180, 20, _part("bench")),
    "steps": Piece(180, 20, _part("steps")),
    "calibrate": Piece(330, 110, _calibrate, is_watched=True),
    "comparison": Piece(24 * 3600, 60, _compare, needs="profile/fit.json", is_watched=True),
    "tiles": Piece(180, 20, _part("tiles")),
}
"""In order of worth. A comparison may be gone on with, so it is never done for good; only where it
has all its runs is there time for more."""
