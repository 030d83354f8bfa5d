"""Engines that run every step together: data parallelism over shared experts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from schedlab.sim.core.audit import stalled
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor, Steps, Work
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import Arrival

_WAITING_WEIGHT = 4


class LockstepExecutor(SimExecutor):
    """A GPU of several that wait for each other at every step.

    Parameters
    ----------
    pricing : Pricing
        What steps take, by their own batch and by the tokens of all engines.
    """

    def __init__(self, pricing: Pricing) -> None:
        super().__init__(pricing)
        self.shape = BatchShape(0, 0, 0)

    def execute(self, work: Work, max_steps: int, horizon_ns: int) -> Steps:
        """Price one step, and keep its shape for `simulate_lockstep`."""
        self.shape = work.shape
        return super().execute(work, 1, horizon_ns)

    def reprice_ns(self, own_ns: int, gathered_tokens: int) -> int:
        """Return what the step takes if `gathered_tokens` of all engines meet at the experts."""
        shape, cost_model = self.shape, self.pricing.cost_model
        alone = cost_model.step_ns(shape)[0]
        together = cost_model.step_ns(shape._replace(gathered_tokens=gathered_tokens))[0]
        return own_ns - alone + together


def simulate_lockstep(
    engines: Sequence[Engine],
    executors: Sequence[LockstepExecutor],
    arrivals: Iterable[Arrival],
) -> RunLog:
    """Run a workload on engines whose steps begin and end together.

    Parameters
    ----------
    engines, executors : sequence
        Fresh engines, and the executor of each.
    arrivals : iterable of Arrival
        In order of `ready_ns`.

    Returns
    -------
    RunLog
        The logs of all engines in one; steps of different engines overlap.

    Raises
    ------
    Stalled
        If requests wait and nothing can ever happen.

    Notes
    -----
    A request goes to the engine with the least ``4 * waiting + running`` requests, in turn among
    equals, as in vLLM's data-parallel load balancer, but with counts that are never stale. A step
    takes as long as that of the slowest engine. An engine without work waits for the others' step
    to end before it begins one.
    """
    source = iter(arrivals)
    coming = next(source, None)
    now_ns = turn = 0

    def submit_until(end_ns: int) -> None:
        nonlocal coming, turn
        while coming is not None and coming.ready_ns <= end_ns:
            order = [*engines[turn:], *engines[:turn]]
            chosen = min(order, key=_load)
            chosen.submit(coming, coming.ready_ns)
            turn = (engines.index(chosen) + 1) % len(engines)
            coming = next(source, None)

    while True:
        submit_until(now_ns)
        begun = [
            (e, x, e.begin(now_ns, now_ns + 1)) for e, x in zip(engines, executors, strict=True)
        ]
        active = [(e, x, segment) for e, x, segment in begun if segment is not None]
        if not active:
            next_ns = min(engine.wait_until_ns for engine in engines)
            if coming is not None:
                next_ns = min(next_ns, coming.ready_ns)
            if next_ns < FOREVER:
                now_ns = next_ns
                continue
            for engine in engines:
                if engine.requests.num_in_flight:
                    raise stalled(engine, "the policy waits and nothing is left to happen")
            break
        tokens = sum(executor.shape.num_new_tokens for _, executor, _ in active)
        duration_ns = max(x.reprice_ns(s.steps.durations_ns[0], tokens) for _, x, s in active)
        submit_until(now_ns + duration_ns)
        for engine, _, segment in active:
            segment.steps = segment.steps._replace(durations_ns=[duration_ns])
            engine.commit()
        now_ns += duration_ns
    log = engines[0].log
    for engine in engines[1:]:
        log.absorb(engine.log)
    return log


def _load(engine: Engine) -> int:
    return _WAITING_WEIGHT * engine.requests.num_waiting + len(engine.requests.running)
