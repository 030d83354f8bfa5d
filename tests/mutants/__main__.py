"""``python -m tests.mutants``: plant bugs one at a time, run tests until one fails, keep score.

Every bug is planted in a process of its own; no file is changed. A bug survives if all tests pass
that were asked in the time there is; one that hangs or dies counts as caught. See
docs/mutation-testing.md.
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

import pytest

from tests.mutants.asking import asked_of
from tests.mutants.judging import (
    OPTIONS,
    ROOT,
    Children,
    Fate,
    Mutant,
    every_mutant,
    judge_anew,
    runs_at_import,
    slip_mutants,
)
from tests.mutants.reaching import Reached
from tests.mutants.slips import LIST, Slip

SUBJECTS = ("sim", "policies", "traces", "experiments", "gpu_backend", "schedlab/testing")
SAMPLE = 100


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("subjects", nargs="*", help="folders or files; all by default")
    parser.add_argument("--slips", action="store_true", help="those planted by hand (slips.txt)")
    parser.add_argument("--list", type=Path, default=LIST, help="another list than slips.txt")
    parser.add_argument(
        "--sample", type=int, help=f"how many, drawn; {SAMPLE} by default, all of the slips; 0: all"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--limit-s", type=float, default=120.0, help="CPU time of a test and of all"
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="where to write every fate; those already there are not asked again",
    )
    parser.add_argument(
        "--reached",
        type=Path,
        help="which tests run the line of each bug, seen in a run of all and written here if the "
        "file is not there: these are asked, fastest first, and no others",
    )
    parser.add_argument(
        "--slow", action="store_true", help="see those marked slow, too, but for the dearest"
    )
    asked = parser.parse_args()
    if asked.slips:
        mutants, sample = slip_mutants(asked.subjects or [""], asked.list), asked.sample or 0
    else:
        mutants = every_mutant(asked.subjects or list(SUBJECTS))
        sample = SAMPLE if asked.sample is None else asked.sample
    total = len(mutants)
    if 0 < sample < total:
        mutants = random.Random(asked.seed).sample(mutants, sample)
    fates = _kept(asked.json, mutants)
    out = os.fdopen(os.dup(1), "w", buffering=1)  # pytest catches what is printed
    os.environ["SCHEDLAB_DATA"] = str(ROOT / "no-data-folder")

    def judge_all(children: Children) -> None:
        reached: Reached | None = None
        if asked.reached is not None:
            if not asked.reached.exists():
                children.survey(mutants, asked.reached, asked.slow)
            reached = json.loads(asked.reached.read_text(encoding="utf-8"))
        elif (bare := children.judge(mutants[0], asked.limit_s, planted=False)).caught:
            pytest.exit(f"without any bug planted: {bare.how} {bare.by}", returncode=1)

        def judged(mutant: Mutant) -> tuple[Mutant, Fate]:
            if runs_at_import(mutant):
                return mutant, judge_anew(mutant, asked.limit_s)
            return mutant, children.judge(mutant, asked.limit_s, reached=reached)

        todo = [mutant for mutant in mutants if mutant not in fates]
        with ThreadPoolExecutor(asked.jobs) as pool:
            for mutant, fate in pool.map(judged, todo):
                fates[mutant] = fate
                print(f"{len(fates):5d} {fate.how:9s} {fate.seconds:6.1f} s  {mutant}", file=out)
                if asked.json is not None:
                    rows = [{"mutant": str(m), **asdict(f)} for m, f in fates.items()]
                    asked.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")

    slips = {mutant.module: isinstance(mutant.bug, Slip) for mutant in mutants}
    files = {asked.file for module, briefly in slips.items() for asked in asked_of(module, briefly)}
    if asked.reached is not None:
        files = {"tests"}
    os.chdir(ROOT)
    if code := pytest.main([*OPTIONS, *sorted(files)], plugins=[Children(judge_all)]):
        sys.exit(int(code))
    _summary(list(fates.items()), total)


def _kept(path: Path | None, mutants: list[Mutant]) -> dict[Mutant, Fate]:
    """Return the fates that an earlier run wrote down."""
    if path is None or not path.exists():
        return {}
    rows = {row.pop("mutant"): Fate(**row) for row in json.loads(path.read_text(encoding="utf-8"))}
    return {mutant: rows[str(mutant)] for mutant in mutants if str(mutant) in rows}


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
            print(f"  {fate.how}: {mutant}")


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
