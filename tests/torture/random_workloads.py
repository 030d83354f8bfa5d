"""Random workloads in batches of a seed each: what fails is shrunk to its smallest form."""

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from tests.property.test_combinations import check_combination, combinations
from tests.property.test_fleet_combinations import check_fleet, fleet_combinations

BATCH = 50
"""Workloads of a batch."""

_KINDS: dict[str, tuple[SearchStrategy[Any], Callable[[Any], None]]] = {
    "engine": (combinations(), check_combination),
    "fleet": (fleet_combinations(), check_fleet),
}


def batches(first_seed: int) -> Iterator[tuple[str, int]]:
    """Yield kinds of batches with their seeds for ever: an engine and a fleet in turn."""
    while True:
        for kind in _KINDS:
            yield kind, first_seed
        first_seed += 1


def run_batch(kind: str, batch_seed: int, num_examples: int = BATCH) -> tuple[int, str | None]:
    """Try the workloads of a batch.

    Parameters
    ----------
    kind : str
        ``engine`` or ``fleet``.
    batch_seed : int
        The same batch for the same seed.
    num_examples : int
        Workloads.

    Returns
    -------
    num_tried : int
        How many there were, those of shrinking among them.
    failure : str or None
        The smallest workload that breaks a law, and how; None if all keep them.
    """
    strategy, check = _KINDS[kind]
    num_tried = 0

    def law(one: object) -> None:
        nonlocal num_tried
        num_tried += 1
        check(one)

    chosen = settings(
        max_examples=num_examples,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,  # one smallest workload, not a group without its examples
    )
    try:
        seed(batch_seed)(chosen(given(strategy)(law)))()
    except Exception as error:  # whatever a law or the simulator raises is what is looked for
        where = traceback.extract_tb(error.__traceback__)[-1]
        notes = "\n".join(getattr(error, "__notes__", ()))
        told = f"{type(error).__name__}: {error}, at {Path(where.filename).name}:{where.lineno}"
        return num_tried, f"{told}: {where.line}\n{notes}"
    return num_tried, None
