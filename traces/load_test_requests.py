"""The requests of a load test that is known by rates and quantiles, as its generator made them.

Source: kubernetes-sigs/inference-perf (commits 3b6f82a, November 2025, to 4ad7d4b, February 2026),
shared_prefix_datagen.py and load_timer.py. Every user of a group has one prompt, a system prompt
shared by the group and a question of its own, with one output length; the prompts are shuffled once
and then sent in turn, again and again. The load type "constant" draws exponential gaps and scales
them so that they fill the duration: bursts, as of a Poisson process whose number of arrivals is
known.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from schedlab.sim.rng import stream
from schedlab.traces.load_tests import LoadTest, Quantiles, SharedPrompts, Stage
from schedlab.traces.prefix_hashes import PrefixHashes
from schedlab.traces.read_report import ReadReport
from schedlab.traces.trace import Trace

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

BLOCK_TOKENS = 16
_NS_PER_S = 1e9


def load_test_requests(test: LoadTest, seed: int = 0) -> Trace:
    """Return requests like those of a load test.

    Parameters
    ----------
    test : LoadTest
        What is known of it.
    seed : int
        Seed of the experiment; the stream is ``"load test"``.

    Returns
    -------
    Trace
        Arrivals, lengths, declared output limits and shared prompt blocks; `application` says the
        stage, ``"stage 0"`` and so on. A stage begins when twice the duration of the one before it
        is over, so that nothing of that is left.

    Notes
    -----
    A client that tokenises what it received does not count what was generated. Its tokenizer begins
    with a token of its own, which is taken off (inference-perf no longer counts it: commit 5857b59
    of August 2026). And random text does not survive it: the counts have a tail of short answers
    that nobody asked for, so below the median a quantile is taken to lie no farther from it than
    the one opposite: ``q(p) >= 2 q(1/2) - q(1 - p)``.
    """
    rng = stream(seed, "load test")
    parts = []
    start_s = 0.0
    which_user = None if test.shared is None else rng.permutation(test.shared.num_prompts)
    extra = int(test.counts_begin_token)
    for stage in test.stages:
        duration_s = stage.num_requests / stage.rate
        gaps = rng.standard_exponential(stage.num_requests)
        arrival_s = start_s + np.cumsum(gaps) * (duration_s / gaps.sum())
        parts.append((arrival_s, *_lengths(stage, which_user, extra, rng)))
        start_s += 2 * duration_s
    arrival_s, prompt, output, users = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    prefix = None if test.shared is None else _prefixes(test.shared, users, prompt)
    sizes = [stage.num_requests for stage in test.stages]
    labels = np.array([f"stage {i}" for i in range(len(sizes))], dtype=object)
    return Trace(
        prompt_tokens=prompt,
        output_tokens=output,
        max_tokens=output,
        arrival_ns=np.rint(arrival_s * _NS_PER_S).astype(np.int64),
        application=np.repeat(labels, sizes),
        prefix=prefix,
        report=_report(test),
    )


def _lengths(
    stage: Stage, order: Int64 | None, extra: int, rng: np.random.Generator
) -> tuple[Int64, Int64, Int64]:
    """Return prompt tokens, output tokens and user of each request of a stage."""
    n = stage.num_requests
    if order is None:
        prompt = stage.prompt.at(rng.random(n))
        users = np.arange(n)
    else:
        users = np.resize(order, n)
        # The same prompts in every stage: user i has the i-th of as many quantiles.
        prompt = stage.prompt.at((users + 0.5) / len(order))
    output = _as_requested(stage.output).at(rng.random(n)) - extra
    return _whole(prompt), _whole(output), users.astype(np.int64)


def _as_requested(counted: Quantiles) -> Quantiles:
    """Return output lengths without the short answers that tokenising text again makes up."""
    p = np.array(counted.probabilities)
    values = np.array(counted.values)
    opposite = 2 * counted.at(0.5) - counted.at(1 - p)
    raised = np.where(p < 0.5, np.maximum(values, opposite), values)
    return Quantiles(counted.mean, counted.probabilities, tuple(np.maximum.accumulate(raised)))


def _whole(tokens: Float64) -> Int64:
    return np.maximum(1, np.rint(tokens)).astype(np.int64)


def _prefixes(shared: SharedPrompts, users: Int64, prompt_tokens: Int64) -> PrefixHashes:
    """Return the ids of the full blocks: those of the group first, then the user's own."""
    longest = int(prompt_tokens.max()) // BLOCK_TOKENS + 1
    of_group = shared.system_prompt_tokens // BLOCK_TOKENS
    num_blocks = prompt_tokens // BLOCK_TOKENS
    offsets = np.zeros(len(users) + 1, dtype=np.int64)
    np.cumsum(num_blocks, out=offsets[1:])
    row = np.repeat(np.arange(len(users)), num_blocks)
    block = np.arange(offsets[-1]) - offsets[row]
    group = users[row] % shared.num_groups
    owner = np.where(block < of_group, group, shared.num_groups + users[row])
    return PrefixHashes(owner * longest + block, offsets, BLOCK_TOKENS)


def _report(test: LoadTest) -> ReadReport:
    report = ReadReport(
        format="load test",
        path=test.id,
        time_zero="the first stage",
        tokens="drawn from the quantiles of a client's counts",
    ).noted("gaps are exponential, scaled to the duration of each stage")
    if test.shared is not None:
        shared = test.shared
        report = report.noted(
            f"{shared.num_prompts} prompts are sent in turn, which begin with "
            f"{shared.num_groups} system prompts of {shared.system_prompt_tokens} tokens"
        )
        if shared.note:
            report = report.noted(shared.note)
    if test.ignored:
        report = report.noted(f"keys ignored: {', '.join(test.ignored)}")
    return report
