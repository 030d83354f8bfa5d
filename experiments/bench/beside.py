"""A table of what this simulator and another one say of the same requests."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Seconds = dict[str, list[float]]
"""By metric, of each request."""


class Peer(NamedTuple):
    """Another simulator, and how a split cluster is run in both."""

    name: str
    environment: str
    """What a Python must have to run it."""
    specification: Callable[[Path, float, int], dict[str, Any]]
    """Returns the experiment, of a checkout of the peer, requests a second, and how many."""
    ours: Callable[[dict[str, Any]], Seconds]
    """Runs it here."""
    theirs: Callable[[dict[str, Any], Path, Path], Seconds]
    """Runs it there, of the checkout and by a Python; returns the same metrics."""


def beside_peer(
    peer: Peer, rates: Sequence[float], num_requests: int, argv: list[str] | None = None
) -> None:
    """Run both as the command line asks, and print a table of each rate and metric.

    Parameters
    ----------
    peer : Peer
        The other one.
    rates : sequence of float
        Requests a second, unless the command line says others.
    num_requests : int
        How many, likewise.
    argv : list of str, optional
        The command line.
    """
    about = f"Run a split cluster here and in {peer.name}."
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--peer", type=Path, required=True, help=f"a checkout of {peer.name}")
    parser.add_argument("--python", type=Path, required=True, help=f"one {peer.environment}")
    parser.add_argument("--rates", type=float, nargs="+", default=rates)
    parser.add_argument("--num-requests", type=int, default=num_requests)
    options = parser.parse_args(argv)
    print(f"{'req/s':>6} {'metric':>15} {'':>5} {'here, s':>10} {peer.name + ', s':>16} {'x':>7}")
    for rate in options.rates:
        asked = peer.specification(options.peer, rate, options.num_requests)
        start_s = time.perf_counter()
        mine = peer.ours(asked)
        between_s = time.perf_counter()
        its = peer.theirs(asked, options.peer, options.python)
        end_s = time.perf_counter()
        for name in mine:
            for percentile in (50, 99):
                a, b = (float(np.percentile(found[name], percentile)) for found in (mine, its))
                print(
                    f"{rate:6g} {name:>15} {f'p{percentile}':>5} {a:10.4f} {b:16.4f} {a / b:7.3f}"
                )
        print(f"{rate:6g} {'seconds to run':>15} {'':>5} {between_s - start_s:10.1f}"
              f" {end_s - between_s:16.1f}", flush=True)  # fmt: skip
