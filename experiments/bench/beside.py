"""A table of what two simulators say of the same requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

Seconds = dict[str, list[float]]
"""By metric, of each request."""


def compare(
    peer: str,
    rates: Sequence[float],
    ours: Callable[[float], Seconds],
    theirs: Callable[[float], Seconds],
) -> None:
    """Print a line for each rate (req/s), metric and percentile, and how long both took.

    Parameters
    ----------
    peer : str
        The name of the other one.
    rates : sequence of float
        Requests a second.
    ours, theirs : callable
        Run the requests at a rate, and return the same metrics.
    """
    print(f"{'req/s':>6} {'metric':>15} {'':>5} {'here, s':>10} {peer + ', s':>16} {'x':>7}")
    for rate in rates:
        start_s = time.perf_counter()
        mine = ours(rate)
        between_s = time.perf_counter()
        its = theirs(rate)
        end_s = time.perf_counter()
        for name in mine:
            for percentile in (50, 99):
                a, b = (float(np.percentile(found[name], percentile)) for found in (mine, its))
                print(
                    f"{rate:6g} {name:>15} {f'p{percentile}':>5} {a:10.4f} {b:16.4f} {a / b:7.3f}"
                )
        print(f"{rate:6g} {'seconds to run':>15} {'':>5} {between_s - start_s:10.1f}"
              f" {end_s - between_s:16.1f}", flush=True)  # fmt: skip
