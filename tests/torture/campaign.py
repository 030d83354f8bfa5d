"""Bad inputs, random workloads, kills and interleavings, with their numbers: ``make torture``.

    python -m tests.torture.campaign [inputs] [workloads] [kills] [interleavings] [--inputs N]
        [--workloads N] [--kills N] [--interleavings N] [--seconds S] [--seed K] [--journal FILE]
        [--only TEXT] [--limit S]

Prints every case that goes wrong as it is found, and how many were tried. With a journal, the same
command goes on where it was stopped. Exits with 1 if anything was found.
"""

import argparse
import gc
import importlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from schedlab.sim.files import write_text
from tests.torture.combined_experiments import combined_cases
from tests.torture.hand_written import (
    command_cases,
    environment_cases,
    file_cases,
    policy_cases,
)
from tests.torture.kills import disturbed, victims
from tests.torture.mutated_files import mutated_file_cases
from tests.torture.odd_options import option_cases
from tests.torture.odd_values import specification_cases
from tests.torture.random_workloads import batches, run_batch
from tests.torture.sandbox import Case, modules_of, run_case
from tests.torture.sound_files import seeds

_CALIBRATION = "schedlab.gpu_backend.calibration"
_LOADED_BEFOREHAND = (
    "schedlab.experiments.commands.app",
    "schedlab.experiments.commands.run",
    "schedlab.experiments.figures.figures",
    "schedlab.experiments.running.run",
    "schedlab.experiments.sweeps.sweep_all",
    _CALIBRATION,
    "matplotlib.pyplot",
    "pyarrow.parquet",
    "scipy.special",
)
_BARS = {"inputs": 10_000, "workloads": 20_000, "kills": 300, "interleavings": 2_000}
"""How many of each a campaign tries."""
_ALL_INPUTS = 46_000
"""About how many there are; a campaign takes them at equal distances."""
_COSTLY = ("report ", "plot ")
_COSTLY_EVERY = 40
"""Of those that draw all figures anew, seconds each, it takes one in so many times as many."""


class Tried(NamedTuple):
    """Some cases that were tried at once."""

    name: str
    num_cases: int
    faults: list[str]


def load(calibrates: bool = False) -> None:
    """Import what cases need, once, for the forks they run in.

    PyTorch, which only calibration needs, takes as long as all else, and makes forks slower.
    """
    for module in _LOADED_BEFOREHAND:
        if calibrates or module != _CALIBRATION:
            importlib.import_module(module)
    if find_spec("pandas"):  # an extra of notebooks; imported in a case, it would take memory there
        importlib.import_module("pandas")


def all_cases() -> Iterator[tuple[str, Case]]:
    """Yield every bad input with its name, always in the same order."""
    return chain(
        policy_cases(),
        file_cases(),
        command_cases(),
        option_cases(),
        environment_cases(),
        specification_cases(),
        combined_cases(),
        mutated_file_cases(),
    )


def torture(
    cases: Iterable[tuple[str, Case]], limit_s: float = 30.0
) -> Iterator[tuple[str, list[str]]]:
    """Run cases and yield the name of each, with its faults."""
    load()
    for name, case in cases:
        outside = Path(tempfile.mkdtemp(prefix="torture-"))
        (folder := outside / "cwd").mkdir()
        try:
            faults = run_case(case, folder, limit_s).faults
        finally:
            shutil.rmtree(outside, ignore_errors=True)
        yield name, faults


def _load_what_sound_files_need() -> None:
    """Import what reading every kind of file imports, so that no fork has to do it again."""
    load()
    tried = set()
    for seed in seeds():
        kind = (seed.argv[0], seed.kind.rpartition(" ")[0] or seed.kind)
        if kind not in tried:
            tried.add(kind)
            case = Case(seed.argv, dict(seed.files))
            with tempfile.TemporaryDirectory(prefix="torture-") as outside:
                (folder := Path(outside) / "cwd").mkdir()
                for name in modules_of(case, folder):
                    with suppress(ImportError):
                        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else a collection in a fork would copy all pages


def _inputs(asked: argparse.Namespace, begin: int) -> Iterator[Tried]:
    _load_what_sound_files_need()
    every = max(1, _ALL_INPUTS // asked.inputs)
    cases = enumerate(case for case in all_cases() if asked.only in case[0])
    chosen = (
        case
        for i, case in cases
        if (i + asked.seed) % (every * (_COSTLY_EVERY if case[0].startswith(_COSTLY) else 1)) == 0
    )
    for number, case in enumerate(chosen):
        if number >= begin:
            for name, faults in torture([case], asked.limit):
                yield Tried(name[:120], 1, faults)


def _workloads(asked: argparse.Namespace, begin: int) -> Iterator[Tried]:
    for number, (kind, batch_seed) in enumerate(batches(asked.seed * 1_000_000)):
        if number >= begin:
            num_tried, failure = run_batch(kind, batch_seed)
            faults = [] if failure is None else [failure]
            yield Tried(f"{kind} workloads of seed {batch_seed}", num_tried, faults)


def _kills(asked: argparse.Namespace, begin: int) -> Iterator[Tried]:
    load(calibrates=True)
    with victims() as all_of_them:
        rounds = [disturbed(victim, asked.seed) for victim in all_of_them]
        number = 0
        while True:
            for one in rounds:
                name, faults_of = next(one)
                number += 1
                if number > begin:
                    yield Tried(name, 1, faults_of())


def _interleavings(asked: argparse.Namespace, begin: int) -> Iterator[Tried]:
    from tests.torture.concurrent_work import SCENARIOS

    for number in count(begin):
        name = list(SCENARIOS)[number % len(SCENARIOS)]
        seed = asked.seed * 1_000_000 + number
        with tempfile.TemporaryDirectory(prefix="torture-") as root:
            try:
                SCENARIOS[name](Path(root), seed)
                faults = []
            except Exception as error:
                faults = [f"{type(error).__name__}: {error}"[:500]]
        yield Tried(f"{name} of seed {seed}", 1, faults)


_PARTS = {
    "inputs": _inputs,
    "workloads": _workloads,
    "kills": _kills,
    "interleavings": _interleavings,
}


def main() -> int:
    """Run the campaign and print what is wrong."""
    parser = argparse.ArgumentParser(description="Bad inputs, random workloads and kills.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(_PARTS)}")
    for part, bar in _BARS.items():
        parser.add_argument(f"--{part}", type=int, default=bar, help=f"how many; {bar:,}")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of each part, at most")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn; 0")
    parser.add_argument("--journal", type=Path, help="file that tells how far it is")
    parser.add_argument("--only", default="", help="only inputs whose name contains this")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds an input may take")
    asked = parser.parse_args()
    if unknown := set(asked.parts) - set(_PARTS):
        parser.error(f"no part is called {sorted(unknown)[0]!r}; there are {', '.join(_PARTS)}")
    found = [_run(part, asked) for part in asked.parts or _PARTS]
    return int(any(found))


def _run(part: str, asked: argparse.Namespace) -> int:
    """Run a part, telling its journal how far it is; return how many cases went wrong."""
    noted = (
        json.loads(asked.journal.read_text()) if asked.journal and asked.journal.exists() else {}
    )
    steps, num_cases, num_bad = noted.get(part, (0, 0, 0))
    end_s = time.monotonic() + asked.seconds
    for tried in _PARTS[part](asked, steps) if num_cases < getattr(asked, part) else ():
        steps, num_cases, num_bad = (
            steps + 1, num_cases + tried.num_cases, num_bad + bool(tried.faults)
        )  # fmt: skip
        for fault in tried.faults:
            print(f"{tried.name}: {fault}", flush=True)
        if asked.journal and (steps % 20 == 0 or part != "inputs"):
            write_text(asked.journal, json.dumps({**noted, part: [steps, num_cases, num_bad]}))
        if num_cases >= getattr(asked, part) or time.monotonic() > end_s:
            break
    if asked.journal:
        write_text(asked.journal, json.dumps({**noted, part: [steps, num_cases, num_bad]}))
    print(f"{part}: {num_cases:,} tried, {num_bad} with faults", flush=True)
    return num_bad


if __name__ == "__main__":
    raise SystemExit(main())
