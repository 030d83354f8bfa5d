"""Every policy where targets are about as long as steps: what is quicker must come out the same.

Policies have quick ways for the steps in which nobody has to wait. Which way is taken is decided by
times a few nanoseconds beside each other, by rows, tokens and blocks that just suffice, and by
targets that are equal or not; random work rarely comes near. Here targets lie within a tenth of a
step of what steps take, contexts grow across them, and limits are met exactly.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.policies.static import Static
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.engine import Engine
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import Arrival, Slo
from tests import laws
from tests.golden import digest_table
from tests.golden.small_runs import digest_of
from tests.policy_cases import CASES, PARAMS, make

KEPT = Path(__file__).with_name("paced.json")
LONGEST = 48
TURNS = range(2)
MORE_TURNS = range(6)
LIMITS = {
    # Steps of decodes alone, and prompts of a few tokens beside them.
    "roomy": EngineConfig(
        num_blocks=200, max_model_len=LONGEST, block_size=4, max_num_seqs=16,
        max_num_batched_tokens=64,
    ),
    # As many rows, or tokens, as there are requests at times.
    "narrow": EngineConfig(
        num_blocks=60, max_model_len=LONGEST, block_size=4, max_num_seqs=4, max_num_resident=7,
        max_num_batched_tokens=6,
    ),
    # The same where prices never fall, so that what surely ends in time is granted unseen.
    "rising": EngineConfig(
        num_blocks=90, max_model_len=LONGEST, block_size=4, max_num_seqs=16,
        max_num_batched_tokens=30,
    ),
    # Blocks run out while everybody decodes.
    "full": EngineConfig(
        num_blocks=16, max_model_len=LONGEST, block_size=4, max_num_seqs=6,
        max_num_batched_tokens=20,
    ),
    "swapping": EngineConfig(
        num_blocks=14, max_model_len=LONGEST, block_size=4, max_num_seqs=5, max_num_resident=6,
        max_num_batched_tokens=24, preemption_mode="swap", swap_space_blocks=9, kv_block_bytes=40,
        preempt_in_order=True, serve_behind_preempted=True,
    ),
}  # fmt: skip
CASES_OF_TIME = {
    "fair_batching/near": ("fair_batching", {"ttft_s": 4e-6, "tbt_s": 1.08e-6}),
    "scorpio/near": ("scorpio", {"ttft_s": 1e-4, "tbt_s": 1.4e-6, "ttft_margin_s": 0.0}),
    "scorpio/near, prompts first": (
        "scorpio", {"ttft_s": 1e-4, "tbt_s": 1.3e-6, "safety": 1.0, "prefill_first": True},
    ),
    "slai/near": ("slai", {"token_budget": 9, "tbt_s": 2.2e-6, "offset": 1, "memory_limit": 0.6}),
    "qoserve/near": ("qoserve", {
        "ttft_s": 3e-6, "tbt_s": 1.1e-6, "batch_tbt_s": 1.2e-6, "alpha_ms_per_token": 0.0,
        "safety": 1.0, "chunk_sizes": [2, 5, 6, 20], "scarce_chunk_sizes": [3, 4],
        "scarce_tokens": 30,
    }),
    "hygen/near": ("hygen", {"latency_budget_s": 1.09e-6, "chunk_size": 9}),
    "past_future/near": ("past_future", {
        "window": 8, "samples": 3, "initial_tokens": 9, "reserved": 0.1,
    }),
    "fastserve/near": ("fastserve", {
        "first_quantum_s": 1.05e-6, "starvation_s": 6e-6, "starvation_period": 3,
    }),
}  # fmt: skip
"""Knobs about as long as a step."""
NAMES = sorted({*CASES, *CASES_OF_TIME})


def shifted(work: Sequence[Arrival], by_ns: int) -> list[Arrival]:
    """Let everybody come so much later."""
    return [
        replace(
            one,
            ready_ns=one.ready_ns + by_ns,
            request=replace(one.request, arrival_ns=one.request.arrival_ns + by_ns),
        )
        for one in work
    ]


def since(log: RunLog, begin_ns: int) -> dict[str, list[Any]]:
    """Return requests, steps and preemptions of a run, with times counted from an instant on."""
    found: dict[str, list[Any]] = {}
    for name, table in (
        ("request", log.requests()), ("step", log.steps()), ("preemption", log.preemptions()),
    ):  # fmt: skip
        for key, column in table.items():
            values = np.asarray(column)
            if key.endswith("_ns") and key != "overhead_ns":
                values = np.where(values >= 0, values - begin_ns, values)
            found[f"{name} {key}"] = [None if x != x else x for x in values.tolist()]
    return found


class _Uneven(laws.LinearCost):
    """Charges the longest and the shortest context, rows, and what a chunk attends to, as well."""

    def step_ns(self, shape: laws.BatchShape, k: int = 1) -> list[int]:
        """Price a step, or some that follow each other."""
        more_ns = 3 * shape.rows_sampled + sum(2 * cached for _, cached in shape.chunks)
        longest, shortest = shape.decode_context_max_tokens, shape.decode_context_min_tokens
        return [
            time_ns + more_ns + 2 * longest + shortest + 3 * j
            for j, time_ns in enumerate(super().step_ns(shape, k))
        ]


def policy_of(case: str):
    """Return a fresh policy of a case."""
    from schedlab.policies import registry

    if case in CASES_OF_TIME:
        name, knobs = CASES_OF_TIME[case]
        return registry.make(name, **{**PARAMS.get(name, {}), **knobs})
    return make(case)


@cache
def workload(limits: str, turn: int) -> tuple[Arrival, ...]:
    """Draw bursts of requests, pauses between them, and targets beside the time of a step."""
    draw = random.Random(f"paced {limits} {turn}")
    now_ns, found = 0, []
    for number in range(18):
        now_ns += draw.choice((0, 0, 0, 1, 1_014, 9_000))
        output = draw.choice((1, 2, 6, 7, 20))
        paces = (None, 0.00104, 0.00106, 0.00108, 0.0012, 0.0024)
        if turn % 3 == 1:  # all alike at first, and then one that is not
            paces = (None, None, 0.0028) if number > 8 else (None,)
        elif turn % 3 == 2:
            paces = (None, 0.0021)
        pace_ms = draw.choice(paces)
        found.append(
            laws.arrival(
                number, now_ns, draw.choice((1, 3, 4, 5, 8, 13, 26)), output,
                tenant="ab"[draw.randrange(2)], application="xy"[draw.randrange(2)],
                priority=draw.randrange(3), predicted_tokens=output * draw.choice((0.5, 1.0, 1.5)),
                slo=Slo(draw.choice((None, 0.003, 0.02)), pace_ms, draw.choice((None, 0.03))),
            )
        )  # fmt: skip
    return tuple(found)


@lru_cache(maxsize=64)
def run(
    case: str, limits: str, turn: int, *, ahead: bool = True, later_ns: int = 0
) -> tuple[RunLog, int]:
    """Run a case under some limits, steps ahead or one by one; return how many plans it took, too.

    A promise that is too short changes nothing else. What the tests of one case look at is run
    once.
    """
    policy, config = policy_of(case), LIMITS[limits]
    if isinstance(policy, Static):
        config = replace(config, max_num_resident=None)
    config = config if ahead else laws.slow(config)
    cost = _Uneven() if limits in ("rising", "narrow") else laws.LinearCost()
    cost.never_falls = limits == "rising"
    plans = 0

    def count(engine: Engine) -> None:
        nonlocal plans
        plans = engine.num_plans

    work = shifted(workload(limits, turn), later_ns)
    log = laws.run(policy, work, config, cost, observer=count, prove=False)
    return log, plans


def _digest(log: RunLog, plans: int) -> str:
    return f"{digest_of(log)} {plans}\n"


def digests(case: str) -> dict[str, str]:
    """Return what came of a case under all limits."""
    turns = MORE_TURNS if case in CASES_OF_TIME else TURNS
    return {
        limits: hashlib.sha256(
            "".join(_digest(*run(case, limits, turn)) for turn in turns).encode()
        ).hexdigest()[:16]
        for limits in LIMITS
    }


def kept() -> dict[str, dict[str, str]]:
    """Read the digests."""
    return digest_table.read(KEPT)


def write() -> None:
    """Write them anew."""
    digest_table.write(KEPT, {case: digests(case) for case in NAMES})
