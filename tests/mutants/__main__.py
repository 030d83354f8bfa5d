"""``python -m tests.mutants``: plant bugs one at a time, run tests until one fails, keep score.

Every bug is planted in a process of its own by an import hook; no file is changed. A bug survives
if all tests pass; one that hangs or dies counts as caught. See docs/mutation-testing.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from tests.mutants.judging import Fate, Mutant, every_mutant, judge, slip_mutants

SUBJECTS = ("sim", "policies")
SAMPLE = 100


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("subjects", nargs="*", help="folders or files; sim and policies by default")
    parser.add_argument("--slips", action="store_true", help="those planted by hand (slips.txt)")
    parser.add_argument(
        "--sample", type=int, help=f"how many, drawn; {SAMPLE} by default, all of the slips; 0: all"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit-s", type=float, default=120.0, help="CPU time: longer is hanging")
    parser.add_argument("--json", type=Path, help="where to write every fate")
    asked = parser.parse_args()
    if asked.slips:
        mutants, sample = slip_mutants(asked.subjects or [""]), asked.sample or 0
    else:
        mutants = every_mutant(asked.subjects or list(SUBJECTS))
        sample = SAMPLE if asked.sample is None else asked.sample
    total = len(mutants)
    if 0 < sample < total:
        mutants = random.Random(asked.seed).sample(mutants, sample)
    _import_what_is_heavy()
    if judge(None, asked.limit_s).caught:
        sys.exit("tests fail, or take too long, without any bug planted")
    fates: list[tuple[Mutant, Fate]] = []
    with ThreadPoolExecutor(asked.jobs) as pool:
        for mutant, fate in pool.map(lambda m: (m, judge(m, asked.limit_s)), mutants):
            fates.append((mutant, fate))
            print(f"{len(fates):5d} {fate.how:8s} {fate.seconds:6.1f} s  {mutant}", flush=True)
            if asked.json is not None:
                rows = [{"mutant": str(m), **asdict(f)} for m, f in fates]
                asked.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    _summary(fates, total)


def _import_what_is_heavy() -> None:
    """Import what every child needs and no mutant changes, so that children start at once."""
    import hypothesis
    import numpy as np
    import pyarrow.parquet
    import pydantic
    import pytest
    import scipy.stats
    import simpy

    del hypothesis, np, pyarrow, pydantic, pytest, scipy, simpy
    assert not any(name.startswith("schedlab.") for name in sys.modules), (
        "mutants need fresh imports"
    )


def _summary(fates: list[tuple[Mutant, Fate]], total: int) -> None:
    print(f"\n{_score([fate.caught for _, fate in fates])}, drawn from {total}")

    def by(place: Callable[[Mutant], str]) -> None:
        found: dict[str, list[bool]] = {}
        for mutant, fate in fates:
            found.setdefault(place(mutant), []).append(fate.caught)
        for name, caught in sorted(found.items()):
            print(f"  {name:24s} {_score(caught)}")

    by(lambda mutant: mutant.room)
    for mutant, fate in fates:
        if not fate.caught:
            print(f"  survived: {mutant}")


def _score(caught: list[bool]) -> str:
    """Write down the share that was caught, with Wilson's interval of 95 %."""
    n, z = len(caught), 1.96
    share = sum(caught) / n
    middle = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = ((middle + sign * half) / (1 + z * z / n) for sign in (-1, 1))
    return f"caught {sum(caught)} of {n}: {share:.1%} ({low:.1%} to {high:.1%})"


if __name__ == "__main__":
    main()
