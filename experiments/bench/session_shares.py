"""What sessions cost: ``python -m schedlab.experiments.bench.session_shares``.

The sessions of `make bench` are served once. Then their requests, sent at the times when the
clients of those sessions sent them, by nobody who waits for answers, are served in turn with the
sessions in one process. Blocks of answers have no name there, so that a little less is found in the
cache and steps differ; what is compared is what the serving loop takes for a step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from schedlab import core
from schedlab.experiments.bench.bench import workloads
from schedlab.experiments.running.backend import SimBackend, Task
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.core.engine import Engine
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import Arrival


class Cost(NamedTuple):
    """What a step of sessions costs beside one of the same requests alone."""

    fast_forward: bool
    times: float
    """CPU seconds a step over those of the requests alone, the median over rounds."""
    step_us: float
    """Microseconds of CPU a step with sessions, the least over the rounds."""
    num_requests: int


class _Timed(SimBackend):
    """A simulated engine that says what serving took, perhaps requests without their sessions."""

    def __init__(self, pricing: Pricing, sent_ns: dict[int, int] | None) -> None:
        super().__init__(pricing)
        self._sent_ns = sent_ns
        self.step_s = 0.0

    def drive(
        self, engines: Sequence[Engine], task: Task, new_engine: Callable[[int], Engine]
    ) -> RunLog:
        """Serve, and measure that alone."""
        arrivals, sent_ns = list(task.arrivals), self._sent_ns
        if sent_ns is not None:
            arrivals = [_alone(arrival, sent_ns[arrival.request.id]) for arrival in arrivals]
            arrivals.sort(key=lambda arrival: arrival.ready_ns)
        begun_s = time.process_time()
        log = super().drive(engines, replace(task, arrivals=arrivals), new_engine)
        seconds = time.process_time() - begun_s
        assert isinstance(log, RunLog)
        self.step_s = seconds / log.num_steps
        return log


def _alone(arrival: Arrival, sent_ns: int) -> Arrival:
    request = replace(arrival.request, session=None, arrival_ns=sent_ns)
    return replace(arrival, request=request, ready_ns=sent_ns, turn=None)


def measure(num_sessions: int, rounds: int) -> Iterator[Cost]:
    """Yield the cost of sessions, skipping ahead and step by step.

    Parameters
    ----------
    num_sessions : int
        How many.
    rounds : int
        Runs of them, each between two of their requests.
    """
    row = workloads(None)["2,000 sessions"]
    drawn = {**row["workload"]["sessions"], "count": num_sessions}
    row = {**row, "workload": {**row["workload"], "sessions": drawn}}
    for fast_forward in (True, False):
        spec = make_spec({**row, "engine": {**row["engine"], "fast_forward": fast_forward}})
        _, sent_ns = _step_s(spec, None)
        before_s, _ = _step_s(spec, sent_ns)
        times, own_s = [], []
        for _ in range(rounds):
            step_s, _ = _step_s(spec, None)
            after_s, _ = _step_s(spec, sent_ns)
            times.append(2 * step_s / (before_s + after_s))
            own_s.append(step_s)
            before_s = after_s
        yield Cost(fast_forward, median(times), 1e6 * min(own_s), len(sent_ns))


def _step_s(spec: ExperimentSpec, sent_ns: dict[int, int] | None) -> tuple[float, dict[int, int]]:
    """Return the CPU seconds a step, and when each request was sent, in ns."""
    opened: list[_Timed] = []

    def timed(pricing: Pricing) -> _Timed:
        opened.append(_Timed(pricing, sent_ns))
        return opened[0]

    result = run(spec, opened=timed)
    times_ns = dict(
        zip(result.requests["id"].tolist(), result.requests["arrival_ns"].tolist(), strict=True)
    )
    return opened[0].step_s, times_ns


def main(argv: list[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description="Measure what sessions cost beside requests.")
    parser.add_argument("--sessions", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    print(f"core: {core.running()}; {options.sessions:,} sessions, {options.rounds} rounds in turn")
    print(f"{'':14} {'times the step of requests':>26} {'us a step':>9} {'requests':>9}")
    for cost in measure(options.sessions, options.rounds):
        how = "skipping ahead" if cost.fast_forward else "step by step"
        print(f"{how:14} {cost.times:26.2f} {cost.step_us:9.1f} {cost.num_requests:9,}", flush=True)


if __name__ == "__main__":
    main()
