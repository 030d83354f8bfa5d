"""Measure this checkout against another one: ``python -m schedlab.experiments.bench.against BASE``.

Both run the same experiments as processes of their own, in turn, on the Python core. What counts is
the ratio of CPU seconds inside a round, because a shared machine changes its speed by the minute.
Exit 1 if the median ratio of a case is above the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from schedlab.experiments.bench.bench import ROOT, workloads
from schedlab.sim.files import write_text

SLOWER = 1
LIMIT = 1.15
"""A ratio of medians that noise does not reach on a runner of GitHub's, in five rounds."""


def cases() -> dict[str, dict[str, Any]]:
    """Return what both run, by name: every part that has a cost of its own, in about a second."""
    bench = workloads(None)
    small = {
        name: {**bench[name], "workload": {**bench[name]["workload"], "num_requests": 3_000}}
        for name in ("all at once", "6 req/s")
    }
    common = small["6 req/s"]
    shared = {
        "trace": "azure-conv", "num_requests": 800, "request_rate": 8.0,
        "classes": {"chat": {"share": 1, "shared_prefix": {"tokens": 512, "groups": 8}}},
    }  # fmt: skip
    return {
        "one request": {"name": "bench", "workload": {"trace": "fixed", "num_requests": 1}},
        **small,
        "sjf": {**common, "policy": {"name": "sjf", "predictor": {"name": "noisy", "sigma": 0.5}}},
        "preempting": {**common, "engine": {**common["engine"], "num_gpu_blocks_override": 1_500}},
        "prefix caching": {**common, "workload": shared,
                           "engine": {**common["engine"], "enable_prefix_caching": True}},
        "sweep of 20 points": {
            "name": "bench", "replications": 5,
            "workload": {"trace": "azure-conv", "num_requests": 100, "request_rate": 4.0},
            "sweep": {"policy": ["fcfs", "sarathi"], "workload.request_rate": [3, 5]},
        },
    }  # fmt: skip


def cpu_s(root: Path, arguments: Sequence[str], folder: Path) -> float:
    """Return the CPU seconds (user and system) of ``python ARGUMENTS`` with a checkout's schedlab.

    Raises
    ------
    SystemExit
        If it fails; with the end of what it printed.
    """
    before = os.times()
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(root),
            "OMP_NUM_THREADS": "1",
            "SCHEDLAB_CORE": "python",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    after = os.times()
    if done.returncode:
        sys.exit(f"{root}: {' '.join(arguments)} failed:\n{done.stdout[-2000:]}")
    spent = after.children_user + after.children_system
    return spent - before.children_user - before.children_system


def measure(
    roots: Mapping[str, Path], specs: Mapping[str, object], rounds: int
) -> dict[str, list[dict[str, float]]]:
    """Return the CPU seconds of each checkout, a row a round, by case."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in specs}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for number, root in enumerate(roots.values()):
            # It must be the checkout's own; and what is compiled to byte code is so before.
            imports = "import schedlab, pathlib, sys; " + (
                f"sys.exit(not pathlib.Path(schedlab.__file__).is_relative_to({str(root)!r}))"
            )
            cpu_s(root, ["-c", imports], folder)
            for case, spec in enumerate(specs.values()):
                write_text(folder / f"{case}.yaml", json.dumps(spec))
                cpu_s(root, _run(case, f"warm-{number}-{case}"), folder)
        for turn in range(rounds):
            order = list(roots)[:: 1 if turn % 2 else -1]
            for case, name in enumerate(specs):
                row = {
                    who: cpu_s(roots[who], _run(case, f"{who}-{turn}-{case}"), folder)
                    for who in order
                }
                found[name].append(row)
    return found


def _run(case: int, output: str) -> list[str]:
    return ["-m", "schedlab", "run", f"{case}.yaml", "-q", "-o", output]


def table(found: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    """Return the lines of a Markdown table: seconds, and the ratios inside the rounds."""
    lines = [
        "| case | base, CPU s | this, CPU s | this / base, median (range) |",
        "|---|---|---|---|",
    ]
    for name, rows in found.items():
        ratios = [row["this"] / row["base"] for row in rows]
        base, this = (median(row[who] for row in rows) for who in ("base", "this"))
        span = f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        lines.append(f"| {name} | {base:.2f} | {this:.2f} | {span} |")
    return lines


def slower(found: Mapping[str, Sequence[Mapping[str, float]]], limit: float) -> list[str]:
    """Return the cases whose median ratio is above a limit."""
    medians = {
        name: median(row["this"] / row["base"] for row in rows) for name, rows in found.items()
    }
    return [name for name, ratio in medians.items() if ratio > limit]


def main(argv: list[str] | None = None) -> None:
    """Measure every case and print a table; exit 1 if one is slower than it may be."""
    parser = argparse.ArgumentParser(description="Measure this checkout against another one.")
    parser.add_argument("base", type=Path, help="the folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=LIMIT, help="largest median of this / base")
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    options = parser.parse_args(argv)
    if not (options.base / "schedlab" / "__init__.py").is_file():
        parser.error(f"{options.base} is no checkout of schedlab")
    roots = {"base": options.base.resolve(), "this": ROOT}
    found = measure(roots, cases(), options.rounds)
    lines = table(found)
    worse = slower(found, options.limit)
    lines += ["", f"slower than {options.limit:g} times: {', '.join(worse) or 'none'}"]
    print("\n".join(lines))
    if options.markdown is not None:
        write_text(options.markdown, "\n".join(["### Speed against the base", "", *lines, ""]))
    if worse:
        sys.exit(SLOWER)


if __name__ == "__main__":
    main()
