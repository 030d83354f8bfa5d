"""The laws every run obeys, whatever the policy: shared by all tests."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from schedlab.policies import Policy
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.audit import check_conservation
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.record.columns import FINISHED, REJECTED
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import Arrival, Request


class LinearCost(CostModel):
    """A cost model simple enough to compute by hand, in nanoseconds."""

    name = "linear"

    def __init__(self, base_ns=1000, token_ns=10, context_ns=1):
        self.base_ns, self.token_ns, self.context_ns = base_ns, token_ns, context_ns

    def step_ns(self, shape: BatchShape, k: int = 1) -> list[int]:
        tokens = shape.num_decodes + sum(n for n, _ in shape.chunks) + shape.padding_tokens
        context = shape.decode_context_sum_tokens + shape.padding_context_tokens
        assert k == 1 or not (shape.chunks or shape.swapped_bytes)
        return [
            self.base_ns
            + self.token_ns * tokens
            + self.context_ns * (context + shape.num_decodes * j)
            + shape.swapped_bytes
            for j in range(k)
        ]

    def describe(self) -> dict[str, object]:
        return {"name": self.name}


def arrival(request_id, at_ns=0, prompt=1, output=1, **fields) -> Arrival:
    """Write a request down in one line."""
    fields.setdefault("max_tokens", 1 << 20)
    return Arrival(Request(request_id, at_ns, prompt, **fields), output, at_ns)


def run(
    policy: Policy,
    workload: Sequence[Arrival],
    config: EngineConfig,
    cost=None,
    overhead: SchedulingOverhead | None = None,
    observer: Callable[[Engine], None] | None = None,
    prove: bool = True,
    drive: Callable[..., RunLog] = simulate,
    **options,
) -> RunLog:
    """Simulate, proving conservation after every committed segment unless told not to."""

    def observe(engine: Engine) -> None:
        if prove:
            check_conservation(engine)
        if observer is not None:
            observer(engine)

    executor = SimExecutor(Pricing(cost or LinearCost(), overhead))
    engine = Engine(config, policy, executor, observer=observe)
    log = drive(engine, workload, **options)
    check_conservation(engine)
    assert engine.requests.num_in_flight == 0, "the run ended with requests in flight"
    assert engine.kv.free_blocks == engine.kv.num_blocks, "the run ended with blocks held"
    return log


def cut_at_arrivals(engine: Engine, workload: Sequence[Arrival]) -> RunLog:
    """Drive an engine without telling it who comes next: segments are cut when somebody does."""
    coming = deque(workload)
    now_ns = 0
    while True:
        while coming and coming[0].ready_ns <= now_ns:
            engine.submit(coming.popleft(), now_ns)
        segment = engine.begin(now_ns)
        if segment is None:
            now_ns = min(engine.wait_until_ns, coming[0].ready_ns if coming else FOREVER)
            if now_ns == FOREVER:
                return engine.log
            continue
        if coming and coming[0].ready_ns < segment.end_ns:
            engine.cut(coming[0].ready_ns)
        while coming and coming[0].ready_ns <= segment.end_ns:
            arrived = coming.popleft()
            engine.submit(arrived, arrived.ready_ns)
        engine.commit()
        now_ns = engine.now_ns


def check(log: RunLog, workload: Sequence[Arrival], config: EngineConfig, may_wait=False) -> None:
    """Assert every law that a finished run must obey."""
    requests, steps = log.requests(), log.steps()
    done = requests["status"] == FINISHED
    ids = [a.request.id for a in workload]
    assert requests["id"].tolist() == sorted(ids), "each request leaves the engine exactly once"
    assert (done | (requests["status"] == REJECTED)).all()
    assert set(log.reject_reasons) == set(requests["id"][requests["status"] == REJECTED].tolist())

    # Causality, and a monotone clock.
    order = [
        "arrival_ns", "queued_ns", "first_scheduled_ns", "first_token_ns", "last_token_ns",
        "finish_ns",
    ]  # fmt: skip
    for before, after in pairwise(order):
        assert (requests[before][done] <= requests[after][done]).all(), f"{before} > {after}"
    assert (steps["end_ns"] > steps["start_ns"]).all()
    assert (steps["start_ns"][1:] >= steps["end_ns"][:-1]).all(), "steps overlap"

    # Token sums: what was generated, what was computed, and when tokens came out.
    assert (requests["generated_tokens"][done] == requests["output_tokens"][done]).all()
    computed = int((steps["num_decodes"] + steps["prefill_tokens"]).sum())
    needed = requests["prompt_tokens"] + requests["output_tokens"] - 1
    reused = int(requests["cached_tokens"].sum())
    assert computed == int(needed[done].sum() + requests["recomputed_tokens"].sum()) - reused
    assert int(requests["recomputed_tokens"].sum()) == int(steps["recomputed_tokens"].sum())
    assert int(requests["num_preemptions"].sum()) == int(steps["num_preempted"].sum())
    gone = log.preemptions()
    assert (gone["evicted_ns"] <= gone["resumed_ns"]).all()
    assert np.array_equal(
        np.bincount(gone["id"], minlength=max(ids) + 1)[requests["id"]],
        requests["num_preemptions"],
    )
    times = {i: log.token_times(i) for i in ids}
    for row in np.flatnonzero(done):
        token_ns = times[int(requests["id"][row])]
        assert len(token_ns) == requests["output_tokens"][row]
        assert (np.diff(token_ns) > 0).all(), "two tokens of a request at one instant"
        assert token_ns[0] == requests["first_token_ns"][row]
        assert token_ns[-1] == requests["last_token_ns"][row]
    gaps, counts = log.token_gaps()
    expected = np.sort(np.concatenate([np.diff(t) for t in times.values()] or [[]]))
    assert np.array_equal(np.sort(np.repeat(gaps, counts)), expected)
    at_ns, out = log.token_counts()
    all_ns = np.sort(np.concatenate(list(times.values())))
    assert np.array_equal(np.repeat(at_ns, out), all_ns)

    # Limits, and memory.
    budget = steps["num_decodes"] + steps["prefill_tokens"]
    assert (budget <= config.max_num_batched_tokens).all()
    assert (steps["num_running"] <= config.max_num_seqs).all()
    capacity = config.num_blocks * config.block_size
    assert (steps["kv_allocated_tokens"] <= capacity).all()
    for part in ("kv_tokens", "kv_reserved_unused_tokens", "kv_fragmentation_tokens"):
        assert (steps[part] >= 0).all(), part
    if not may_wait:
        check_never_idle(requests, steps)


def check_never_idle(requests, steps) -> None:
    """Assert that the GPU idles only when the system is empty."""
    idle = np.flatnonzero(steps["start_ns"][1:] > steps["end_ns"][:-1])
    accepted = requests["status"] != REJECTED
    arrived, finished = requests["arrival_ns"][accepted], requests["finish_ns"][accepted]
    for i in idle:
        start, end = steps["end_ns"][i], steps["start_ns"][i + 1]
        present = (arrived < end) & (finished > start)
        assert not present.any(), f"idle from {start} to {end} with {present.sum()} requests"


def signature(log: RunLog) -> bytes:
    """Return every bit of a run's outcome that must not depend on how fast it was computed."""
    requests, steps = log.requests(), log.steps()
    parts = [requests[name].tobytes() for name in sorted(requests)]
    parts += [steps[name].tobytes() for name in sorted(steps)]
    parts += [log.token_times(int(i)).tobytes() for i in requests["id"]]
    return b"".join(parts)


def slow(config: EngineConfig) -> EngineConfig:
    """Return the same limits without skipping ahead: the oracle."""
    return replace(config, fast_forward=False)
