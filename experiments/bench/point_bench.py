"""What a point of a sweep costs: ``python -m schedlab.experiments.bench.point_bench``.

The same points run in turn alone, and as a sweep of one process runs them: identity, result, files,
and what is read back. Both in CPU seconds of this process; what is told is their difference.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from schedlab import core
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.sweeps.runs import Runs
from schedlab.experiments.sweeps.store import Store
from schedlab.experiments.sweeps.workers import InProcess

_NUM_REQUESTS = 100


def measure(num_points: int, rounds: int, light: bool) -> tuple[float, float]:
    """Return the CPU milliseconds of a run alone, and of a point beside it, medians of rounds.

    Parameters
    ----------
    num_points : int
        Points of a round, each with a seed of its own.
    rounds : int
        How often.
    light : bool
        Whether tables are left out.
    """
    alone, beside = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(rounds + 1):
            specs = [_spec(number * num_points + i) for i in range(num_points)]
            store = Store(Path(scratch) / str(number), light=light)

            def run_all(specs: list[ExperimentSpec] = specs) -> None:
                for spec in specs:
                    run(spec)

            def sweep(specs: list[ExperimentSpec] = specs, store: Store = store) -> None:
                Runs(store, InProcess()).points([(spec, "point") for spec in specs])

            runs_ms, points_ms = (_cpu_ms(work) / num_points for work in (run_all, sweep))
            if number:  # the first one imports
                alone.append(runs_ms)
                beside.append(points_ms - runs_ms)
    return median(alone), median(beside)


def _spec(seed: int) -> ExperimentSpec:
    workload = {"trace": "azure-conv", "num_requests": _NUM_REQUESTS, "request_rate": 6.0}
    return make_spec({"name": "bench", "hardware": "a100-80gb", "seed": seed, "workload": workload})


def _cpu_ms(work: Callable[[], None]) -> float:
    begun_s = time.process_time()
    work()
    return (time.process_time() - begun_s) * 1e3


def main(argv: list[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description="Measure what a point costs beside its run.")
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    print(f"core: {core.running()}; {options.points} points of {_NUM_REQUESTS} requests,"
          f" {options.rounds} rounds in turn; CPU ms a point")  # fmt: skip
    print(f"{'files':12} {'run alone':>10} {'beside it':>10}")
    for name, light in (("--light", True), ("with tables", False)):
        alone_ms, beside_ms = measure(options.points, options.rounds, light)
        print(f"{name:12} {alone_ms:10.1f} {beside_ms:10.1f}", flush=True)


if __name__ == "__main__":
    main()
