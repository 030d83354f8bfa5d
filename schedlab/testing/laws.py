"""The laws that every finished run obeys, whatever the policy, and how to run one to its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from schedlab.sim.config import EngineConfig
from schedlab.sim.core.audit import check_conservation
from schedlab.sim.core.draft_length import DraftLength
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.pipeline_executor import PipelineExecutor
from schedlab.sim.core.pipelined_engine import PipelinedEngine
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.scheduling import SchedulingPolicy
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.record.columns import (
    REJECTED,
    TRUNCATED,
    Columns,
    Ints,
    completed,
    pairs,
    whole_numbers,
)
from schedlab.sim.record.copies import CopyTable
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import Arrival, Request


class LinearCost(CostModel):
    """A cost model simple enough to compute by hand.

    Parameters
    ----------
    base_ns, token_ns, context_ns : int
        Time of a step: in any case, for each token computed, and for each token in the cache that
        a decode or a chunk reads.
    """

    name = "linear"

    def __init__(self, base_ns: int = 1000, token_ns: int = 10, context_ns: int = 1) -> None:
        self.base_ns, self.token_ns, self.context_ns = base_ns, token_ns, context_ns

    def __repr__(self) -> str:
        return f"LinearCost({self.base_ns}, {self.token_ns}, {self.context_ns})"

    def step_ns(self, shape: BatchShape, k: int = 1) -> list[int]:
        """Return the durations of `k` steps."""
        tokens = shape.num_decodes + sum(n for n, _ in shape.chunks) + shape.padding_tokens
        context = shape.decode_context_sum_tokens + shape.padding_context_tokens
        context += sum(computed for _, computed in shape.chunks)
        require(k == 1 or not (shape.chunks or shape.swapped_bytes), "only decodes repeat")
        return [
            self.base_ns
            + self.token_ns * tokens
            + self.context_ns * (context + shape.num_decodes * j)
            + shape.swapped_bytes
            for j in range(k)
        ]

    def describe(self) -> dict[str, object]:
        """Return its name."""
        return {"name": self.name}


_OF_SOMEBODY = (
    "running", "prefilling", "paused", "held", "unanswered", "leaving", "overrun", "untold",
    "fetching", "arrived", "loading", "holding", "come", "handed_over", "kept", "kept_until_ns",
    "turns", "resident_tokens", "held_tokens", "needs_less",
)  # fmt: skip
"""What an engine's `requests` keep of those who are there: nothing, when all have left."""


def require(holds: object, law: str) -> None:
    """Raise AssertionError with the words of the law if it does not hold, also under ``-O``."""
    if not holds:
        raise AssertionError(law)


def arrival(
    request_id: int,
    at_ns: int = 0,
    prompt: int = 1,
    output: int = 1,
    **fields: Any,  # noqa: ANN401 - fields of a request
) -> Arrival:
    """Write a request down in one line: when it comes, its lengths, and fields of `Request`."""
    fields.setdefault("max_tokens", 1 << 20)
    return Arrival(Request(request_id, at_ns, prompt, **fields), output, at_ns)


def run(
    policy: SchedulingPolicy,
    workload: Sequence[Arrival],
    config: EngineConfig,
    cost: CostModel | None = None,
    overhead: SchedulingOverhead | None = None,
    observer: Callable[[Engine], None] | None = None,
    prove: bool = True,
    drive: Callable[..., RunLog] = simulate,
    make_executor: Callable[[Pricing], SimExecutor] = SimExecutor,
    draft_length: DraftLength | None = None,
    **options: Any,  # noqa: ANN401 - those of `drive`
) -> RunLog:
    """Simulate to the end, proving conservation after every committed segment unless told not to.

    Raises
    ------
    AssertionError
        If requests, tokens or blocks are lost, or the run ends with work left.
    """

    def observe(engine: Engine) -> None:
        if prove:
            check_conservation(engine)
        if observer is not None:
            observer(engine)

    kind: type[Engine] = Engine
    if config.pipeline_parallel_size > 1:
        kind = PipelinedEngine
        if make_executor is SimExecutor:
            make_executor = PipelineExecutor
    executor = make_executor(Pricing(cost or LinearCost(), overhead))
    engine = kind(config, policy, executor, observer=observe, draft_length=draft_length)
    log = drive(engine, workload, **options)
    check_conservation(engine)
    require(engine.requests.num_in_flight == 0, "the run ended with requests in flight")
    require(engine.kv.free_blocks == engine.kv.num_blocks, "the run ended with blocks held")
    for name in _OF_SOMEBODY:
        require(not getattr(engine.requests, name), f"the run ended with somebody in `{name}`")
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


def check(
    log: RunLog, workload: Sequence[Arrival], config: EngineConfig, may_wait: bool = False
) -> None:
    """Require every law of time, tokens, memory and limits of a finished run (AssertionError).

    With `may_wait` the GPU may idle although somebody is there.
    """
    requests, steps = log.requests(), log.steps()
    done = completed(requests)
    ids = [a.request.id for a in workload]
    require(requests["id"].tolist() == sorted(ids), "each request leaves the engine exactly once")
    require((done | (requests["status"] == REJECTED)).all(), "each request is finished or rejected")
    require(
        set(log.reject_reasons) == set(requests["id"][requests["status"] == REJECTED].tolist()),
        "every rejection, and nothing else, has a reason",
    )

    # Causality, and a monotone clock.
    order = [
        "arrival_ns", "queued_ns", "first_scheduled_ns", "first_token_ns", "last_token_ns",
        "finish_ns",
    ]  # fmt: skip
    for before, after in pairwise(order):
        early, late = (whole_numbers(requests, name)[done] for name in (before, after))
        require((early <= late).all(), f"{before} > {after}")
    require((steps["end_ns"] > steps["start_ns"]).all(), "every step takes time")
    depth = config.pipeline_parallel_size
    if depth > 1 and config.async_scheduling:  # one is planned ahead
        depth += 1
    require(
        (steps["start_ns"][depth:] >= steps["end_ns"][:-depth]).all(),
        "no more steps overlap than batches may be in flight",
    )
    require((np.diff(steps["end_ns"]) > 0).all(), "steps end in the order in which they began")

    # Token sums: what was generated, what was computed, and when tokens came out.
    may_say = {a.request.id: a.request.max_tokens for a in workload}
    answers = np.minimum(requests["output_tokens"], [may_say[i] for i in requests["id"].tolist()])
    require(
        (requests["generated_tokens"][done] == answers[done]).all(),
        "each answer is as long as it is, or as it may be",
    )
    is_cut = answers < requests["output_tokens"]
    require(
        ((requests["status"] == TRUNCATED) == is_cut)[done].all(),
        "who may say no more, and nobody else, is cut off",
    )
    computed = int((steps["num_decodes"] + steps["prefill_tokens"] + _accepted(steps)).sum())
    lengths = [requests[name][done] for name in ("prompt_tokens", "generated_tokens")]
    needed = sum(int(column.sum()) for column in lengths) - int(done.sum())
    reused = int(requests["cached_tokens"].sum())
    require(
        computed == needed + int(requests["recomputed_tokens"].sum()) - reused,
        "tokens computed are those needed, and those recomputed, less those reused",
    )
    recomputed = requests["recomputed_tokens"]
    # What a rejected request had in host memory was thrown away, but no step did it.
    low, high = int(recomputed[done].sum()), int(recomputed.sum())
    require(
        low <= int(steps["recomputed_tokens"].sum()) <= high,
        "recomputed tokens of requests and of steps are the same",
    )
    require(
        int(requests["num_preemptions"].sum()) == int(steps["num_preempted"].sum()),
        "preemptions of requests and of steps are the same",
    )
    gone = log.preemptions()
    back = gone["resumed_ns"] >= 0
    require(
        (gone["evicted_ns"] <= gone["resumed_ns"])[back].all(),
        "nobody resumes before being evicted",
    )
    lost = gone["id"][~back].tolist()
    require(
        len(lost) == len(set(lost)) and set(lost).isdisjoint(requests["id"][done].tolist()),
        "evictions are as many as resumptions, and requests rejected while they were evicted",
    )
    require(
        np.array_equal(
            np.bincount(gone["id"], minlength=max(ids) + 1)[requests["id"]],
            requests["num_preemptions"],
        ),
        "every preemption has a row",
    )
    times = {i: log.token_times(i) for i in ids}
    for row in np.flatnonzero(done):
        token_ns = times[int(requests["id"][row])]
        require(len(token_ns) == answers[row], "each output token has a time")
        alone = (np.diff(token_ns) > 0).all() or config.num_speculative_tokens
        require(alone, "two tokens of a request at one instant")
        require(
            token_ns[0] == requests["first_token_ns"][row],
            "the first token comes at first_token_ns",
        )
        require(
            token_ns[-1] == requests["last_token_ns"][row], "the last token comes at last_token_ns"
        )
    gaps, counts = pairs(log.token_gaps())
    expected = np.sort(np.concatenate([np.diff(np.unique(t)) for t in times.values()]))
    require(
        np.array_equal(np.sort(np.repeat(gaps, counts)), expected),
        "gaps between tokens are those of token times",
    )
    at_ns, out = pairs(log.token_counts())
    all_ns = np.sort(np.concatenate(list(times.values())))
    require(
        np.array_equal(np.repeat(at_ns, out), all_ns), "tokens by instant are those of token times"
    )

    # Limits, and memory.
    budget = steps["num_decodes"] + steps["prefill_tokens"]
    if config.num_speculative_tokens:
        budget = budget + steps["draft_tokens"]
        require(
            (_accepted(steps) <= steps["draft_tokens"]).all(), "no more is accepted than drafted"
        )
    require((budget <= config.max_num_batched_tokens).all(), "no step exceeds the token budget")
    rows = steps["num_decodes"] + steps["num_prefills"]
    require((rows <= config.max_num_seqs).all(), "no step computes more requests than rows")
    if config.max_num_resident is not None:
        resident = steps["num_running"] <= config.max_num_resident
        require(resident.all(), "nobody holds memory without a seat")
    capacity = config.num_blocks * config.block_size
    require(
        (steps["kv_allocated_tokens"] <= capacity).all(), "no step holds more memory than there is"
    )
    for part in ("kv_tokens", "kv_reserved_unused_tokens", "kv_fragmentation_tokens"):
        require((steps[part] >= 0).all(), f"{part} is never negative")
    if not may_wait:
        check_never_idle(log)


def _accepted(steps: Columns) -> Ints:
    """Return how many drafted tokens came out of each step."""
    if "accepted_tokens" in steps:
        return whole_numbers(steps, "accepted_tokens")
    return np.zeros_like(whole_numbers(steps, "num_decodes"))


def check_never_idle(log: RunLog) -> None:
    """Require that the GPU idles only when the system is empty (AssertionError)."""
    requests, steps = log.requests(), log.steps()
    before = np.concatenate([[0], steps["end_ns"][:-1]])
    idle = np.flatnonzero(steps["start_ns"] > before)
    accepted = requests["status"] != REJECTED
    arrived, finished = requests["arrival_ns"][accepted], requests["finish_ns"][accepted]
    for i in idle:
        start, end = before[i], steps["start_ns"][i]
        present = (arrived < end) & (finished > start)
        require(not present.any(), f"idle from {start} to {end} with {present.sum()} requests")


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


def difference(one: RunLog, other: RunLog, names: tuple[str, str]) -> str | None:
    """Say where two runs first differ.

    Parameters
    ----------
    one, other : RunLog
        Two runs of the same work, the first of them perhaps not to its end.
    names : tuple of str
        How a message calls them, e.g. ``("by single steps", "ahead")``.

    Returns
    -------
    str or None
        The first step, or else the first request or copy between tiers, with the columns that
        differ; `None` if all that `one` did is the same in `other`.
    """
    steps, others = one.steps(), other.steps()
    n = min(one.num_steps, other.num_steps)
    first = min(
        (i for name in steps for i in _unequal(steps[name][:n], others[name][:n])), default=None
    )
    if first is not None:
        return f"step {first}: " + "; ".join(
            f"{name} {steps[name][first]} {names[0]}, {others[name][first]} {names[1]}"
            for name in steps
            if steps[name][first] != others[name][first]
        )
    if one.num_steps > n:
        return f"step {n}, which comes only {names[0]}"
    requests, rows = one.requests(), other.requests()
    ids, here, there = np.intersect1d(requests["id"], rows["id"], return_indices=True)
    for name in requests:
        for i in _unequal(requests[name][here], rows[name][there]):
            return (
                f"request {ids[i]}: {name} {requests[name][here[i]]} {names[0]}, "
                f"{rows[name][there[i]]} {names[1]}"
            )
    return _first_other_copy(one.copies.columns(), other.copies.columns(), names)


def _first_other_copy(one: CopyTable, other: CopyTable, names: tuple[str, str]) -> str | None:
    num_copies, num_others = len(one["issued_ns"]), len(other["issued_ns"])
    n = min(num_copies, num_others)
    for name in one:
        for i in _unequal(one[name][:n], other[name][:n]):
            return f"copy {i}: {name} {one[name][i]} {names[0]}, {other[name][i]} {names[1]}"
    return f"copy {n}, which comes only {names[0]}" if num_copies > n else None


def _unequal(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> Iterator[int]:
    """Yield the first place where two columns differ, if there is one; NaN equals NaN."""
    both_nan = (one != one) & (other != other)
    yield from np.flatnonzero((one != other) & ~both_nan)[:1].tolist()
