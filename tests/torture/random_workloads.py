"""Random workloads in batches of a seed each: what fails is shrunk to its smallest form."""

import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from tests.property.test_combinations import check_combination, combinations
from tests.property.test_fleet_combinations import check_fleet, fleet_combinations

BATCH = 50
"""Workloads of a batch."""

LIMIT_S = 60.0
"""CPU seconds that a workload may take; nearly all take less than a tenth of one."""

_KINDS: dict[str, tuple[SearchStrategy[Any], Callable[[Any], None]]] = {
    "engine": (combinations(), check_combination),
    "fleet": (fleet_combinations(), check_fleet),
}


class _TookTooLong(BaseException):
    """A workload that does not end. No `Exception`: that would be shrunk, a limit's worth a try."""


@contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    """Raise `_TookTooLong` where the block is after some seconds of CPU."""

    def too_long(signal_number: int, frame: FrameType | None) -> None:
        raise _TookTooLong

    before = signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def batches(first_seed: int) -> Iterator[tuple[str, int]]:
    """Yield kinds of batches with their seeds for ever: an engine and a fleet in turn."""
    while True:
        for kind in _KINDS:
            yield kind, first_seed
        first_seed += 1


def run_batch(
    kind: str, batch_seed: int, num_examples: int = BATCH, limit_s: float = LIMIT_S
) -> tuple[int, str | None]:
    """Try the workloads of a batch.

    Parameters
    ----------
    kind : str
        ``engine`` or ``fleet``.
    batch_seed : int
        The same batch for the same seed.
    num_examples : int
        Workloads.
    limit_s : float
        CPU seconds that each may take.

    Returns
    -------
    num_tried : int
        How many there were, those of shrinking among them.
    failure : str or None
        The smallest workload that breaks a law, and how, or the first that takes longer; None if
        all keep them and end.
    """
    strategy, check = _KINDS[kind]
    num_tried = 0
    latest: object = None

    def law(one: object) -> None:
        nonlocal num_tried, latest
        num_tried, latest = num_tried + 1, one
        with _limited(limit_s):
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
    except _TookTooLong as error:
        return num_tried, f"{_where(error)}: still at it after {limit_s:g} s of CPU\n{latest!r}"
    except Exception as error:  # whatever a law or the simulator raises is what is looked for
        notes = "\n".join(getattr(error, "__notes__", ()))
        return num_tried, f"{type(error).__name__}: {error}, at {_where(error)}\n{notes}"
    return num_tried, None


def _where(error: BaseException) -> str:
    """Return the innermost line that a traceback knows."""
    where = [f for f in traceback.extract_tb(error.__traceback__) if f.name != "too_long"][-1]
    return f"{Path(where.filename).name}:{where.lineno}: {where.line}"
