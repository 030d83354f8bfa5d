"""Many bad inputs, each of which must be refused in one line: ``make torture``.

    python -m tests.torture.campaign [--only TEXT] [--every N] [--limit SECONDS]

prints every case that ends in a traceback, a hang, a message that nobody can read or that does not
say where, or with half-written files, and exits with 1 if there is one.
"""

import argparse
import importlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path

from tests.torture.hand_written import environment_cases, file_cases, policy_cases
from tests.torture.mutated_files import mutated_file_cases
from tests.torture.odd_values import specification_cases
from tests.torture.sandbox import Case, run_case

_LOADED_BEFOREHAND = (
    "schedlab.experiments.commands.app",
    "schedlab.experiments.sweeps.sweep_all",
    "matplotlib.pyplot",
    "pyarrow.parquet",
    "scipy.special",
)


def all_cases() -> Iterator[tuple[str, Case]]:
    """Yield every case with its name, always in the same order."""
    return chain(
        policy_cases(),
        file_cases(),
        environment_cases(),
        specification_cases(),
        mutated_file_cases(),
    )


def torture(
    cases: Iterable[tuple[str, Case]], limit_s: float = 30.0
) -> Iterator[tuple[str, list[str]]]:
    """Run cases and yield the name of each, with its faults."""
    for module in _LOADED_BEFOREHAND:
        importlib.import_module(module)
    if find_spec("pandas"):  # an extra of notebooks; imported in a case, it would take memory there
        importlib.import_module("pandas")
    for name, case in cases:
        outside = Path(tempfile.mkdtemp(prefix="torture-"))
        (folder := outside / "cwd").mkdir()
        try:
            faults = run_case(case, folder, limit_s).faults
        finally:
            shutil.rmtree(outside, ignore_errors=True)
        yield name, faults


def main() -> int:
    """Run the campaign and print what is wrong."""
    parser = argparse.ArgumentParser(description="Bad inputs, to be refused in one line each.")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--every", type=int, default=1, help="only every so many cases")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds a case may take")
    asked = parser.parse_args()
    named = (case for case in all_cases() if asked.only in case[0])
    num_cases = num_bad = 0
    for name, faults in torture(islice(named, 0, None, asked.every), asked.limit):
        num_cases += 1
        num_bad += bool(faults)
        for fault in faults:
            print(f"{name[:120]}: {fault}", flush=True)
    print(f"{num_cases:,} cases, {num_bad} of them with faults")
    return int(num_bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
