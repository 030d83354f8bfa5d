"""What each policy costs beside FCFS: ``python -m schedlab.experiments.bench.policy_shares``.

Every policy runs the same requests in turn with `fcfs`, in one process; its share is the CPU
seconds of `fcfs` over its own, the median over rounds of what neighbours in time took. Beside it
stands the share that it would have if its plans cost what those of `fcfs` do: what is missing up to
that is the policy's own work, what is missing from there to 1 are plans that it makes more often.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from schedlab import core
from schedlab.experiments.bench.bench import workloads
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies import registry

_BASE = "fcfs"


class Share(NamedTuple):
    """What a policy costs."""

    policy: str
    share: float
    """Requests a CPU second, over those of FCFS."""
    share_by_plans: float
    """Plans of FCFS over its own."""
    num_plans: int
    cpu_s: float
    """Least over the rounds."""


def measure(policies: Sequence[str], num_requests: int, rounds: int) -> Iterator[Share]:
    """Yield the share of each policy.

    Parameters
    ----------
    policies : sequence of str
        Names; who needs a prediction is given the oracle's.
    num_requests : int
        Requests of the preset azure-conv, at 6 a second on the server of `make bench`.
    rounds : int
        Runs of each policy, each between two of FCFS.
    """
    for name in (_BASE, *policies):
        _run(name, 50)  # imports and tables
    for name in policies:
        base_s, plans = _run(_BASE, num_requests)
        shares, own_s = [], []
        for _ in range(rounds):
            seconds, own_plans = _run(name, num_requests)
            next_s, _ = _run(_BASE, num_requests)
            shares.append((base_s + next_s) / 2 / seconds)
            own_s.append(seconds)
            base_s = next_s
        yield Share(name, median(shares), plans / own_plans, own_plans, min(own_s))


def _run(name: str, num_requests: int) -> tuple[float, int]:
    """Return the CPU seconds of a run with its metrics, and the number of its plans."""
    spec = workloads(None)["6 req/s"]
    policy = {"name": name}
    if registry.make(name).needs_prediction:
        policy["predictor"] = "oracle"
    workload = {**spec["workload"], "num_requests": num_requests}
    made = make_spec({**spec, "workload": workload, "policy": policy})
    begun_s = time.process_time()
    result = run(made)
    result.metrics()
    seconds, num_plans = time.process_time() - begun_s, result.provenance["num_plans"]
    assert isinstance(num_plans, int)
    return seconds, num_plans


def main(argv: list[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description="Measure what policies cost beside fcfs.")
    parser.add_argument("policies", nargs="*", default=registry.names(), help="all by default")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    print(f"core: {core.running()}; {options.requests:,} requests, {options.rounds} rounds in turn")
    print(f"{'policy':20} {'share of fcfs':>13} {'by plans':>9} {'plans':>9} {'CPU s':>7}")
    for row in measure(options.policies, options.requests, options.rounds):
        print(f"{row.policy:20} {row.share:13.2f} {row.share_by_plans:9.2f} {row.num_plans:9,}"
              f" {row.cpu_s:7.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
