"""How much load KV memory allows, in closed form, and the engine on both sides of it.

Nie, Si, Zhou (ICML 2026, arXiv:2605.04595), theorems 4.1 and 4.2: a request of prompt s and output
o takes up g(s, o) of memory over its life, in tokens times steps. With M tokens of memory and steps
of b seconds no schedule serves more than mu = M / (b E[g]) requests a second; any that is never
idle serves every load below mu (1 - delta), where delta is the largest request's share of memory.
The theorems are quoted after summaries of the paper, g is that of this engine: while a step runs, a
request holds what was computed before and what the step computes. Time is in steps that all take
equally long, memory in blocks of one token.
"""

import numpy as np
import pytest

from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.rng import stream
from tests import laws
from tests.laws import arrival

STEP_NS = 1_000
EQUAL_STEPS = laws.LinearCost(base_ns=STEP_NS, token_ns=0, context_ns=0)
MEMORY = 2_000
LONGEST = 100
DELTA = 2 * LONGEST / MEMORY
REQUESTS = 1_500


def area(prompt, output, chunk):
    """Return g: what a request holds in each step of its life, summed."""
    chunks = -(-prompt // chunk)
    held = sum(min(i * chunk, prompt) for i in range(1, chunks + 1))
    return held + sum(prompt + token for token in range(1, output))


def lengths(seed, num_requests=REQUESTS):
    rng = stream(seed, "lengths")
    return [rng.integers(1, LONGEST + 1, num_requests).tolist() for _ in range(2)]


def serve(policy, load, seed, chunk, memory=MEMORY, num_requests=REQUESTS, **knobs):
    """Serve Poisson arrivals at `load` times mu; return the log and mu in requests a step."""
    prompts, outputs = lengths(seed, num_requests)
    mean_area = np.mean([area(s, o, chunk) for s, o in zip(prompts, outputs, strict=True)])
    mu = MEMORY / mean_area
    gaps = stream(seed, "arrivals").exponential(STEP_NS / (load * mu), num_requests)
    at_ns = np.cumsum(gaps).astype(int).tolist()
    work = [
        arrival(i, at_ns[i], prompts[i], outputs[i], predicted_tokens=float(outputs[i]))
        for i in range(num_requests)
    ]
    config = EngineConfig(
        num_blocks=memory, block_size=1, max_model_len=2 * LONGEST, max_num_seqs=num_requests,
        max_num_batched_tokens=1_000_000, long_prefill_token_threshold=chunk,
    )  # fmt: skip
    log = laws.run(registry.make(policy, **knobs), work, config, EQUAL_STEPS, prove=False)
    return log, mu


def served_per_step(log):
    """Return the requests finished a step over the second half of the arrivals."""
    requests = log.requests()
    end_ns = requests["arrival_ns"].max()
    late = (requests["finish_ns"] > end_ns / 2) & (requests["finish_ns"] <= end_ns)
    return np.count_nonzero(late) / (end_ns / 2 / STEP_NS)


def mean_waits(log):
    """Return the mean wait of each quarter of the requests, in steps."""
    requests = log.requests()
    waits = (requests["first_scheduled_ns"] - requests["arrival_ns"]) / STEP_NS
    return [quarter.mean() for quarter in np.array_split(waits[requests["id"].argsort()], 4)]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [LONGEST, 16])
def test_memory_held_over_a_life_is_the_closed_form(chunk):
    log, _ = serve("fcfs", 0.5, seed=0, chunk=chunk, memory=100 * MEMORY, num_requests=400)
    expected = sum(area(s, o, chunk) for s, o in zip(*lengths(0, 400), strict=True))
    assert int(log.steps()["kv_allocated_tokens"].sum()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [LONGEST, 16])
@pytest.mark.parametrize(
    ("policy", "knobs"), [("fcfs", {}), ("srtf", {}), ("mc_sf", {"margin": 0.0})]
)
def test_no_policy_serves_more_than_memory_allows(policy, knobs, chunk):
    # Theorem 4.1, with what is served up to any time: its area cannot exceed M times the steps.
    # An inequality without chance: a few hundred requests show it as well as thousands.
    log, mu = serve(policy, 1.3, seed=1, chunk=chunk, num_requests=500, **knobs)
    steps, requests = log.steps(), log.requests()
    prompts, outputs = lengths(1, 500)
    needed = np.array([area(s, o, chunk) for s, o in zip(prompts, outputs, strict=True)])
    for end_ns in np.quantile(requests["finish_ns"], [0.25, 0.5, 1.0]):
        done = requests["id"][requests["finish_ns"] <= end_ns]
        num_steps = np.count_nonzero(steps["end_ns"] <= end_ns)
        assert needed[done].sum() <= MEMORY * num_steps
    assert log.num_steps >= 500 / mu


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [LONGEST, 16])
@pytest.mark.parametrize("policy", ["fcfs", "sarathi"])
def test_queue_is_stable_below_the_rate_of_memory_and_grows_above_it(policy, chunk):
    knobs = {"chunk_size": 1_000_000} if policy == "sarathi" else {}
    below, _ = serve(policy, 0.95 * (1 - DELTA), seed=2, chunk=chunk, **knobs)
    waits = mean_waits(below)
    assert max(waits) < LONGEST / 4, "nobody waits for as long as a quarter of the longest answer"

    load = 1.5
    above, mu = serve(policy, load, seed=2, chunk=chunk, **knobs)
    assert 1 - DELTA <= served_per_step(above) / mu <= 1 + 2 / np.sqrt(REQUESTS)
    # If a share p of mu is served, who comes behind a quarter more of the requests waits longer by
    # what these bring less what is served meanwhile; p is between 1 - delta and 1.
    least, most = (REQUESTS / 4 * (1 / p - 1 / load) / mu for p in (1.0, 1 - DELTA))
    growth = np.diff(mean_waits(above))
    assert (growth > 0).all()
    assert 0.85 * least <= growth.mean() <= 1.15 * most
