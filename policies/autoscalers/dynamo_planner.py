"""The SLA planner of NVIDIA Dynamo: load over what an engine does within its targets."""

from collections.abc import Sequence
from math import ceil

from schedlab.policies.autoscalers.autoscaler import Autoscaler
from schedlab.policies.autoscalers.registry import register
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.pool_state import Answer, PoolState
from schedlab.sim.sums import in_order

_LARGEST_BATCH = 4096


@register("dynamo_planner")
class DynamoPlanner(Autoscaler):
    """As many engines as the load of the last interval needs, if each holds its targets.

    An engine of prompts does ``prompt / step(prompt)`` tokens a second. An engine of answers does
    ``batch / step(batch)`` tokens a second, with the largest batch whose step holds the target, at
    contexts of a prompt and half an answer. The steps are estimated by the calibrated cost model,
    where Dynamo interpolates measurements. What was measured since the last time over what was
    expected corrects both: queueing and cache hits show in it. Expected of answers is the step of
    as many as an engine had in the mean of the interval, by Little's law ``came / engines *
    duration / interval``, and no more than fit in memory; a request's duration is that of the
    whole, as Dynamo's front end measures it. Measured is the mean over all gaps between tokens. An
    engine that serves requests whole is counted as the sum of both loads, which is ours.

    Parameters
    ----------
    ttft_ms : float
        Target of the first token, > 0.
    itl_ms : float
        Target of the time between tokens, > 0.
    """

    source = (
        "ai-dynamo/dynamo, planner/utils/planner_core.py, make_adjustments() and "
        "_compute_replica_requirements(), constant predictor; load * min(1, TTFT correction) / "
        "throughput, ITL target / ITL correction"
    )

    def __init__(self, ttft_ms: float = 1000.0, itl_ms: float = 50.0) -> None:
        if not (ttft_ms > 0 and itl_ms > 0):
            raise ValueError(f"targets must be > 0, got {ttft_ms!r} and {itl_ms!r}")
        self.ttft_ms = ttft_ms
        self.itl_ms = itl_ms

    def num_engines(self, pool: PoolState) -> int:
        """Divide the load by what one engine does."""
        if not (pool.came and pool.answers and pool.engines):
            return pool.num_engines
        engine, rate = pool.engines[0], len(pool.came) / pool.interval_s
        prompt = _mean([request.prompt_tokens for request in pool.came])
        output = _mean([answer.output_tokens for answer in pool.answers])
        needed = 0.0
        if pool.role != "decode":
            needed += rate * prompt / self._prompt_tokens_per_s(pool, engine, prompt)
        if pool.role != "prefill":
            needed += rate * output / self._output_tokens_per_s(pool, engine, prompt + output / 2)
        return max(ceil(needed), 1)

    def _prompt_tokens_per_s(self, pool: PoolState, engine: EngineState, prompt: float) -> float:
        expected_ms = _prompt_ms(engine, prompt)
        correction = _mean([answer.ttft_ms for answer in pool.answers]) / expected_ms
        # As Dynamo has it: fewer tokens than expected lower the load, queueing does not raise it.
        return prompt / expected_ms * 1e3 / min(1.0, correction)

    def _output_tokens_per_s(self, pool: PoolState, engine: EngineState, context: float) -> float:
        holds = max(int(engine.num_blocks * engine.block_size / max(context, 1.0)), 1)
        took_ms = _mean_gap_ms(pool.answers)
        target_ms = self.itl_ms
        if took_ms:
            batch = min(max(round(_mean_concurrency(pool)), 1), holds)
            target_ms /= took_ms / _step_ms(engine, batch, context)
        low, high = 1, min(holds, _LARGEST_BATCH)
        while low < high:
            middle = (low + high + 1) // 2
            if _step_ms(engine, middle, context) <= target_ms:
                low = middle
            else:
                high = middle - 1
        return low / _step_ms(engine, low, context) * 1e3


def _mean_concurrency(pool: PoolState) -> float:
    """Return how many requests an engine had in the mean of the interval, by Little's law."""
    durations_ms = [a.ttft_ms + a.tpot_ms * (a.output_tokens - 1) for a in pool.answers]
    came_per_ms = len(pool.came) / len(pool.engines) / (pool.interval_s * 1e3)
    return came_per_ms * _mean(durations_ms)


def _mean_gap_ms(answers: Sequence[Answer]) -> float:
    """Return the mean over all gaps between tokens, 0 if there was none."""
    num_gaps = sum([answer.output_tokens - 1 for answer in answers])
    if not num_gaps:
        return 0.0
    return in_order([a.tpot_ms * (a.output_tokens - 1) for a in answers]) / num_gaps


def _mean(values: Sequence[float]) -> float:
    return in_order(values) / len(values) if values else 0.0


def _prompt_ms(engine: EngineState, prompt: float) -> float:
    shape = BatchShape(0, 0, 0, ((max(round(prompt), 1), 0),), rows_sampled=1, num_running=1)
    return engine.estimate_step_ns(shape) / 1e6


def _step_ms(engine: EngineState, batch: int, context: float) -> float:
    mean = round(context)
    shape = BatchShape(
        batch, batch * mean, mean, (),
        rows_sampled=batch, num_running=batch, decode_context_min_tokens=mean,
    )  # fmt: skip
    return engine.estimate_step_ns(shape) / 1e6
