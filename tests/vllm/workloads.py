"""Random engines and workloads on which two schedulers must take the same steps."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import NamedTuple

from schedlab.sim.config import EngineConfig
from schedlab.sim.core.track import Outcome, verify_one_by_one
from schedlab.sim.request import Arrival, Request, Slo
from tests import laws

STEP_NS = 1000
"""What every step takes; arrivals have offsets of their own, so none comes as a step ends."""


class Drafts:
    """Drafts of any length, some of them right: drawn by request and place in the answer."""

    def __init__(self, seed: int, rate: float, always: bool) -> None:
        self._seed = seed
        self._rate = rate
        self._always = always

    def outcome(self, request: Request, output_tokens: int) -> Outcome:
        """Return what becomes of the drafts of a request; see `Acceptance`."""
        return _OfRequest(f"{self._seed} {request.id}", self._rate, self._always)


class _OfRequest:
    def __init__(self, name: str, rate: float, always: bool) -> None:
        self._name = name
        self._rate = rate
        self._always = always

    def verify(self, place: int, most: int) -> tuple[int, int]:
        """Draft as many as asked for, or fewer, and accept those before the first wrong one."""
        rng = Random(f"{self._name} {place}")
        drafted = most if self._always else min(most, rng.randint(0, 6))
        accepted = 0
        while accepted < drafted and rng.random() < self._rate:
            accepted += 1
        return drafted, accepted

    def verify_on(self, place: int, most: int, stop: int) -> tuple[bytes, bytes]:
        """Verify time after time; see `Outcome`."""
        return verify_one_by_one(self, place, most, stop)


class Workload(NamedTuple):
    """Limits, requests, and the policy that serves them."""

    config: EngineConfig
    arrivals: list[Arrival]
    policy: str
    aborts: tuple[tuple[int, int], ...] = ()
    """When whose client goes away, in order of time."""
    drafts: Drafts | None = None
    """What becomes of drafts, where the engine speculates."""
    shares: tuple[int, ...] = (10,)
    """What each stage of the pipeline takes of a step, in tenths."""

    @property
    def kind(self) -> str:
        """Say which switches are on."""
        config = self.config
        switches = {
            "priority": self.policy == "priority",
            "async": config.async_scheduling,
            "prefix": config.enable_prefix_caching,
            "threshold": config.long_prefill_token_threshold > 0,
            "watermark": config.watermark > 0,
        }
        return "+".join(name for name, on in switches.items() if on) or "plain"


def draw(seed: int, switches: dict[str, bool], has_watermark: bool) -> Workload:
    """Draw one; `switches` are those of the engine's profile that are not drawn."""
    rng = Random(seed)
    block_size = rng.choice((2, 4, 8, 16))
    longest = rng.choice((24, 60, 120))
    seats = rng.choice((2, 3, 5, 8, 16))
    chunked = rng.random() < 0.85
    budget = rng.choice((seats, 17, 33, 64, 200))
    budget = max(budget, seats) if chunked else max(budget, longest, seats)
    config = EngineConfig(
        num_blocks=-(-longest // block_size) + rng.choice((0, 1, 3, 6, 12, 25, 100)),
        null_blocks=1,
        max_model_len=longest,
        block_size=block_size,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=rng.choice((0, 0, 3, 10, 25)),
        watermark=rng.choice((0.0, 0.02, 0.1, 0.3)) if has_watermark else 0.0,
        scheduler_reserve_full_isl=rng.random() < 0.5,
        enable_prefix_caching=rng.random() < 0.6,
        async_scheduling=rng.random() < 0.5,
        arrivals_between_steps=True,
        **switches,
    )
    policy = rng.choice(("fcfs", "priority"))
    return Workload(config, _arrivals(rng, config), policy)


def speculate(workload: Workload, seed: int, ahead: bool = False) -> Workload:
    """Let the engine draft, and perhaps plan ahead.

    Who plans ahead takes as many tokens for drafted as are asked for. Then no sequence comes near
    the longest, where vLLM lets it wait for what is under way.
    """
    rng = Random(f"speculate {seed}")
    most = rng.choice((1, 2, 4, 6))
    config = replace(
        workload.config,
        async_scheduling=ahead,
        overrun_at_stop=ahead and workload.config.overrun_at_stop,
        num_speculative_tokens=most,
        num_lookahead_tokens=rng.choice((0, most)),
    )
    if ahead:
        longest = config.max_model_len + 2 * most + 3
        more_blocks = -(-longest // config.block_size) - config.max_model_len // config.block_size
        config = replace(
            config,
            max_model_len=longest,
            num_blocks=config.num_blocks + more_blocks,
            max_num_batched_tokens=max(config.max_num_batched_tokens, longest),
        )
    drafts = Drafts(seed, rng.choice((0.0, 0.5, 0.8, 1.0)), ahead or rng.random() < 0.5)
    return workload._replace(config=config, drafts=drafts)


def divide(workload: Workload, seed: int, ahead: bool = False) -> Workload:
    """Let the GPUs be the stages of a pipeline, and perhaps plan batches ahead."""
    rng = Random(f"divide {seed}")
    shares = tuple(rng.choice((3, 10, 10, 10, 17)) for _ in range(rng.choice((2, 2, 3, 4))))
    config = replace(
        workload.config,
        async_scheduling=ahead,
        overrun_at_stop=ahead and workload.config.overrun_at_stop,
        pipeline_parallel_size=len(shares),
        chunked_pipeline_parallelism=True,
    )
    return workload._replace(config=config, shares=shares)


def cut_short(workload: Workload, seed: int, may_abort: bool) -> Workload:
    """Let most answers end by a token before their limit, and a few clients go away."""
    rng = Random(f"cut short {seed}")
    arrivals, aborts = [], []
    for arrival in workload.arrivals:
        request = arrival.request
        left = workload.config.max_model_len - request.prompt_tokens - arrival.output_tokens
        limit = arrival.output_tokens + rng.choice((0, 1, 5, 40)) if left > 0 else 0
        limit = max(arrival.output_tokens, min(limit, arrival.output_tokens + left))
        arrivals.append(replace(arrival, request=replace(request, max_tokens=limit)))
        if may_abort and rng.random() < 0.2:
            stays_ns = rng.choice((1, STEP_NS, 5 * STEP_NS, 40 * STEP_NS))
            aborts.append((request.arrival_ns + stays_ns, request.id))
    config = replace(workload.config, overrun_at_stop=workload.config.async_scheduling)
    aborts = tuple(sorted(aborts))
    return workload._replace(config=config, arrivals=arrivals, aborts=aborts)


def _arrivals(rng: Random, config: EngineConfig) -> list[Arrival]:
    """Draw requests in bursts; prompts begin with a few common documents."""
    gaps = rng.choice(((0,), (0, 1), (0, 0, 0, 5, 40), (2, 3, 8)))
    offsets = sorted(rng.sample(range(1, STEP_NS), rng.randint(1, 40)))
    documents = rng.randint(1, 3)
    step, arrivals = 0, []
    for i, offset in enumerate(offsets):
        step += rng.choice(gaps)
        prompt = rng.randint(1, config.max_model_len - 1)
        output = rng.randint(1, min(config.max_model_len - prompt, rng.choice((3, 20, 90))))
        document = rng.randrange(documents)
        shared = rng.choice((0, prompt // 2, prompt))
        ids = tuple(
            document * 1000 + j if (j + 1) * config.block_size <= shared else (i + 10) * 1000 + j
            for j in range(prompt // config.block_size)
        )
        arrivals.append(
            laws.arrival(
                i, step * STEP_NS + offset, prompt, output, max_tokens=output,
                priority=rng.randrange(3), prefix_hash_ids=ids, predicted_tokens=float(output),
                slo=Slo(30 * STEP_NS / 1e6, 3 * STEP_NS / 1e6), tenant=rng.choice("ab"),
            )
        )  # fmt: skip
    return arrivals
