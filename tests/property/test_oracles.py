"""Whole runs, step by step, against naive schedulers written from the sources of the policies."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from random import Random

import pytest

from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.request import Slo, Turn
from tests import laws
from tests.property.oracles.server import serve
from tests.property.oracles.sessions import serve_sessions

CASES = {
    "continuum": 150,
    "hygen": 60,
    "infercept": 60,
    "magnus": 60,
    "mc_sf": 60,
    "multi_bin": 60,
    "past_future": 45,
    "prompt_buckets": 60,
    "qoserve": 60,
    "scorpio": 60,
    "tensorrt_llm": 60,
    "tgi": 60,
    "tgi3": 60,
    "wait": 60,
}
"""How many workloads decide of each policy."""


TARGETS_MS = (None, None, 0.0011, 0.003, 0.01, 0.05, 0.2)


class Cost(laws.LinearCost):
    """A price linear in tokens, in what is read of the cache and in the longest context read.

    It is no less than that of reading the weights.
    """

    def __init__(self, base_ns, token_ns, context_ns, longest_ns, weights_ns):
        super().__init__(base_ns, token_ns, context_ns)
        self.longest_ns, self.weights_ns = longest_ns, weights_ns

    def step_ns(self, shape, k=1):
        tokens, contexts = shape.num_decodes, shape.decode_context_sum_tokens
        tokens += sum(n for n, _ in shape.chunks) + shape.padding_tokens
        contexts += sum(computed for _, computed in shape.chunks) + shape.padding_context_tokens
        longest = shape.decode_context_max_tokens
        return [
            self.price(tokens, contexts + j * shape.num_decodes, longest and longest + j)
            for j in range(k)
        ]

    def price(self, tokens, contexts, longest=0):
        """Return the time of a step in nanoseconds; the longest context is that of a decode."""
        computing_ns = max(self.token_ns * tokens, self.weights_ns)
        reading_ns = self.context_ns * contexts + self.longest_ns * longest
        return self.base_ns + computing_ns + reading_ns

    def __call__(self, tokens, padding=0, contexts=0, admitted=()):
        """Return the price of {request: tokens}, and of padding and what that reads.

        A token of who comes back is a chunk, even if the cache has all before it.
        """
        contexts += sum(state.computed for state in tokens)
        decodes = [state for state in tokens if state.decodes and state not in admitted]
        longest = max([state.computed for state in decodes], default=0)
        return self.price(padding + sum(tokens.values()), contexts, longest)


COSTS = ((1000, 0, 0, 0, 0), (1000, 10, 1, 0, 0), (300, 40, 7, 0, 0), (9, 70, 3, 40, 900))


class Told:
    """A policy that writes down which plans were carried out, for how many steps, and who left."""

    def __init__(self, policy):
        self._policy = policy
        self.steps, self.rejected = [], []

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def plan(self, view, builder):
        plan = self._policy.plan(view, builder)
        self._planned = (
            dict(plan.num_scheduled_tokens()),
            [state.id for state in plan.preempted],
            plan.padding_tokens,
        )
        return plan

    def on_tokens(self, plan, num_steps, now_ns):
        self.steps.append((*self._planned, num_steps, now_ns))
        if self._policy.on_tokens is not None:
            self._policy.on_tokens(plan, num_steps, now_ns)

    def on_reject(self, state, now_ns):
        self.rejected.append((state.id, now_ns))
        if self._policy.on_reject is not None:
            self._policy.on_reject(state, now_ns)


def limits(rng, block_size, longest, **more):
    """Draw limits of which memory is short more often than not."""
    least = -(-longest // block_size)
    return EngineConfig(
        num_blocks=least + rng.choice([0, 0, 1, 2, least // 2, least, 3 * least]),
        max_model_len=longest,
        block_size=block_size,
        max_num_seqs=rng.choice([1, 2, 3, 4, 5, 6, 8]),
        max_num_resident=rng.choice([None, None, None, 2, 4]),
        max_num_batched_tokens=rng.choice([4, 7, 9, 12, 16, 40, 200]),
        long_prefill_token_threshold=rng.choice([0, 0, 3, 7]),
        watermark=rng.choice([0.0, 0.0, 0.05, 0.3, 0.5]),
        scheduler_reserve_full_isl=rng.random() < 0.5,
        fast_forward=rng.random() < 0.6,
        **more,
    )


def workload(rng):
    """Draw requests of which some come at one instant, and some at the end of a step."""
    most_prompt, most_answer = rng.choice([4, 12, 40]), rng.choice([4, 12, 30])
    most_declared = rng.choice([most_answer // 2 + 1, most_answer + 20, 1 << 20])
    now_ns, work = 0, []
    for i in range(rng.randint(5, 40)):
        now_ns += rng.choice([0, 0, 1, 500, 1000, 3000, rng.randint(0, 20_000)])
        answer = rng.randint(1, most_answer)
        # Of a quarter of a token, so that sums of them are exact.
        predicted = answer * rng.choice([1.0, 1.0, rng.randint(2, 8) / 4])
        work.append(
            laws.arrival(
                i,
                now_ns,
                rng.randint(1, most_prompt),
                answer,
                max_tokens=rng.choice([answer, answer + rng.randint(0, 20), most_declared]),
                predicted_tokens=predicted,
                priority=rng.choice([0, 0, 1, 2]),
                tenant=rng.choice("abc"),
                prefix_hash_ids=tuple(rng.choices((1, 2), k=rng.randint(0, 2))),
                application=rng.choice(["chat", "code"]),
                slo=rng.choice([None, Slo(*(rng.choice(TARGETS_MS) for _ in range(3)))]),
            )
        )
    return work


def sessions(rng, block_size, scale):
    """Draw sessions whose prompts quote what was said before; `scale` stretches all times.

    No prompt fills its last block: what is computed of one twice is not found twice.
    """
    start_ns, work = 0, []
    most_turns, tools = rng.choice([1, 3, 5, 8]), rng.choice(["a", "aab", "abc"])
    for number in range(rng.randint(2, 9)):
        start_ns += scale * rng.choice([0, 0, 500, 3000, rng.randint(0, 10_000)])
        first, turns = len(work), []
        for i in range(rng.choice([most_turns, rng.randint(1, most_turns)])):
            # Most go on with the last turn; some with one before, or need all answers.
            quoted = rng.choice([i - 1, i - 1, i - 1, rng.randrange(i)]) if i else 0
            parents = rng.choice([[quoted], [quoted], [quoted], range(i)]) if i else []
            names = turns[quoted][1] if i and quoted == i - 1 else []
            prompt = (turns[quoted][0] if i else 0) + rng.randint(1, 15)
            prompt += prompt % block_size == 0
            if prompt > 50:
                break
            answer = rng.randint(1, 12)
            fresh = range(len(names), (prompt + answer) // block_size)
            names = names + [10_000 * number + 100 * i + j for j in fresh]
            turns.append((prompt + answer, names))
            turn = Turn(
                tuple(first + parent for parent in parents),
                scale * rng.choice([0, 1, 1000, 3000, 6000, rng.randint(0, 30_000)]) if i else 0,
                tuple(names[prompt // block_size :]),
                rng.choice([None, *tools, *tools]),
            )
            asked = laws.arrival(
                first + i,
                start_ns,
                prompt,
                answer,
                session=f"s{number}",
                prefix_hash_ids=tuple(names[: prompt // block_size]),
            )
            work.append(replace(asked, turn=turn))
    return work


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_policy_decides_as_its_source_says(name):
    for seed in range(CASES[name]):
        decide_alike(name, seed)


def decide_alike(name, seed):
    """Require that a policy and its oracle take the same steps on a drawn workload."""
    oracle = import_module(f"tests.property.oracles.{name}")
    rng = Random(f"{name} {seed}")
    keeps_memory = hasattr(oracle, "keeps_until")
    block_size = rng.choice([2, 4, 8] if keeps_memory else [1, 2, 4, 16])
    # Tools of which nothing is known are thought to work for a second.
    scale = rng.choice([1, 1, 1_000_000]) if keeps_memory else 1
    work = sessions(rng, block_size, scale) if keeps_memory else workload(rng)
    most_tokens = max(a.request.prompt_tokens for a in work) + 31
    if keeps_memory and rng.random() < 0.2:
        most_tokens = max(most_tokens // 2, min(a.request.prompt_tokens for a in work) + 12)
    config = limits(rng, block_size, most_tokens, enable_prefix_caching=keeps_memory)
    cost = Cost(*(scale * part for part in rng.choice(COSTS)))
    knobs = oracle.knobs(rng)
    told = Told(registry.make(name, **knobs))
    laws.run(told, work, config, cost)
    if keeps_memory:
        anew = getattr(oracle, "keeps_longer", lambda server, state: server.now_ns)
        server = serve_sessions(work, config, cost, partial(oracle.keeps_until, **knobs), anew)
    else:
        server = serve(partial(oracle.decide, **knobs), work, config, cost)
    case = f"{name} with {knobs}, seed {seed}"
    same(told.steps, server.steps, case)
    assert told.rejected == [(state.id, state.end_ns) for state in server.rejected], case


def same(told, steps, case):
    """Require the same batches, victims and instants."""
    at = 0
    for tokens, preempted, padding, num_steps, end_ns in told:
        for k in range(num_steps):
            assert at < len(steps), f"{case}: {tokens} in step {at}, which nobody asked for"
            step = steps[at]
            said = tokens, [] if k else preempted, padding
            assert said == (step.tokens, step.preempted, step.padding), (
                f"{case}: step {at} is {said}, not {step}"
            )
            at += 1
        assert end_ns == steps[at - 1].end_ns, f"{case}: step {at - 1} ends"
    assert at == len(steps), f"{case}: {steps[at]} is missing"
