"""What a scheduling decision costs, by policy, queue depth and batch size.

The queue is held at its depth: a finished request is replaced by a new one. Skipping ahead is off,
so that every step is decided; the figure is the CPU time of a whole step of the simulation (plan,
accounting, cost model, log), of which the parts other than the plan do not depend on the depth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.roofline import RooflineCostModel
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.models import model
from schedlab.sim.request import Arrival, Request
from schedlab.sim.rng import stream

DEPTHS = (100, 1_000, 10_000)
BATCH, LARGE_BATCH = 64, 256

KNOBS: dict[str, dict[str, Any]] = {
    "multi_bin": {"bin_edges": [64, 128, 256]},
    "nested_wait": {"output_edges": [64, 256], "total_limit": 64},
    "wait": {"output_edges": [64, 256], "total_limit": 64},
    "prompt_buckets": {"bucket_edges": [128, 512]},
}
"""Knobs without a default."""

_WARM_UP, _DECISIONS = 30, 200


class Cost(NamedTuple):
    """What one policy's decisions cost, in microseconds of CPU a step."""

    policy: str
    by_depth_us: tuple[float, ...]
    """At `DEPTHS`, with `BATCH` sequences running."""
    large_batch_us: float
    """At the first depth with `LARGE_BATCH` sequences."""

    @property
    def slope(self) -> float:
        """Log-log slope between the two largest depths: 0 constant, 1 linear."""
        low, high = self.by_depth_us[-2:]
        return math.log(high / low) / math.log(DEPTHS[-1] / DEPTHS[-2])


def measure(policies: Sequence[str] | None = None) -> Iterator[Cost]:
    """Yield the cost of every registered policy, or of those named."""
    for name in policies or registry.names():
        by_depth = tuple(step_us(name, depth, BATCH) for depth in DEPTHS)
        yield Cost(name, by_depth, step_us(name, DEPTHS[0], LARGE_BATCH))


def step_us(name: str, depth: int, batch: int, decisions: int = _DECISIONS) -> float:
    """Return the CPU time of a step with `depth` requests waiting, in microseconds.

    Parameters
    ----------
    name : str
        A registered policy.
    depth, batch : int
        Requests waiting, and seats.
    decisions : int
        Steps to average over.
    """
    config = EngineConfig(
        num_blocks=batch * 64, max_model_len=4096, max_num_seqs=batch, fast_forward=False
    )
    pricing = Pricing(RooflineCostModel(Deployment(model("llama-3-8b"), gpu("a100-80gb"))))
    engine = Engine(config, registry.make(name, **KNOBS.get(name, {})), SimExecutor(pricing))
    requests = _requests()
    now_ns = 0
    begun_s = time.process_time()
    for number in range(_WARM_UP + decisions):
        if number == _WARM_UP:
            begun_s = time.process_time()
        while engine.requests.num_waiting + len(engine.requests.running) < depth + batch:
            engine.submit(next(requests)(now_ns), now_ns)
        if engine.begin(now_ns) is None:
            now_ns = engine.wait_until_ns
        else:
            engine.commit()
            now_ns = engine.now_ns
    return (time.process_time() - begun_s) / decisions * 1e6


def _requests() -> Iterator[Callable[[int], Arrival]]:
    """Yield requests of chat-like lengths, each to be sent at a time that is not known yet."""
    rng = stream(0, "decision_bench")
    number = 0
    while True:
        prompts = rng.integers(1, 512, 1024)
        # Predictions say nothing: else a deeper queue would mean shorter answers, and more of them.
        predictions, outputs = rng.geometric(1 / 128, (2, 1024)).clip(1, 1024)
        columns = (prompts.tolist(), predictions.tolist(), outputs.tolist())
        for prompt, predicted, output in zip(*columns, strict=True):
            number += 1
            request = Request(
                number, 0, prompt, max_tokens=1024, predicted_tokens=float(predicted),
                priority=number % 4, tenant=f"tenant {number % 8}",
            )  # fmt: skip

            def sent(now_ns: int, request: Request = request, output: int = output) -> Arrival:
                return Arrival(replace(request, arrival_ns=now_ns), output, now_ns)

            yield sent
