"""Small workloads, drawn from a seed, that reach the corners: and smaller ones that still fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from schedlab.sim.config import EngineConfig
from schedlab.sim.request import Arrival, Request, Slo
from schedlab.testing.laws import LinearCost, arrival

LONGEST_TOKENS = 100
_MAX_TRIES = 150
_FIELDS = (
    "max_tokens", "priority", "tenant", "application", "slo", "predicted_tokens", "session",
    "prefix_hash_ids", "predicted_session_tokens",
)  # fmt: skip
_USUAL = ("max_tokens", 1 << 20), ("priority", 0), ("prefix_hash_ids", ())
"""What is not written down of a request."""


@dataclass(frozen=True)
class Case:
    """A workload with the limits and the step times it runs under.

    Attributes
    ----------
    workload : tuple of Arrival
        In order of arrival; request i has id i.
    limits : EngineConfig
        The limits of the engine.
    cost : LinearCost
        How long steps take.
    """

    workload: tuple[Arrival, ...]
    limits: EngineConfig
    cost: LinearCost = LinearCost()  # noqa: RUF009 - it has no state that changes

    def __str__(self) -> str:
        """Write it down as code that gives it again."""
        requests = "".join(f"        {_as_code(a)},\n" for a in self.workload)
        return f"Case(\n    (\n{requests}    ),\n    {_limits(self.limits)},\n    {self.cost!r},\n)"


def random_cases(seed: int = 0, num_cases: int = 20) -> Iterator[Case]:
    """Draw workloads and limits: the same ones for the same seed.

    Lengths lie on block edges and beside them, requests arrive together, within a step, at the
    end of one and long after; there are tenants, priorities, targets and predictions; memory
    ranges from plenty to barely enough for one request. Every second case is in milliseconds, as a
    real server is, the others in microseconds.
    """
    for i in range(num_cases):
        yield _case(random.Random(f"{seed} {i}"), 10_000 if i % 2 else 1)


def _case(draw: random.Random, slower: int) -> Case:
    cost = LinearCost(1000 * slower, 10 * slower, slower)
    block_size = draw.choice((1, 4, 16))
    workload, now_ns, prompt = [], 0, 1
    for i in range(draw.randint(1, 24)):
        gap_ns = draw.choice((0, 0, 1, 700, 3_000, 40_000)) * slower
        # At the very end of a step that computes nothing but the prompt before.
        gap_ns = draw.choice((gap_ns, gap_ns, cost.base_ns + cost.token_ns * prompt))
        now_ns += gap_ns
        edge = block_size * draw.randint(1, max(48 // block_size, 1))
        prompt = draw.choice((draw.randint(1, 60), edge, max(edge - 1, 1), edge + 1))
        output = draw.choice((draw.randint(1, 39), 1, 2, min(edge, 39)))
        workload.append(
            arrival(
                i,
                now_ns,
                prompt,
                output,
                max_tokens=draw.choice((1 << 20, output, output + 5)),
                priority=draw.randint(0, 2),
                tenant=draw.choice("abc"),
                application=draw.choice(("chat", "code", None)),
                slo=draw.choice((None, Slo(0.02 * slower), Slo(None, 0.004 * slower))),
                predicted_tokens=output * draw.choice((1.0, draw.uniform(0.3, 3.0))),
            )
        )
    swap_space_blocks = draw.choice((0, 0, 3, 500))
    limits = EngineConfig(
        num_blocks=-(-LONGEST_TOKENS // block_size) + draw.choice((0, 1, 3, 20, 400)),
        max_model_len=LONGEST_TOKENS,
        block_size=block_size,
        max_num_seqs=draw.choice((1, 2, 5, 16)),
        max_num_batched_tokens=draw.choice((3, 17, 64, 500)),
        long_prefill_token_threshold=draw.choice((0, 0, 8)),
        watermark=draw.choice((0.0, 0.05)),
        scheduler_reserve_full_isl=draw.choice((False, True)),
        preemption_mode=draw.choice(("recompute", "swap")) if swap_space_blocks else "recompute",
        swap_space_blocks=swap_space_blocks,
        kv_block_bytes=100,
        max_num_resident=draw.choice((None, None, None, 1, 3, 30)),
    )
    return Case(tuple(workload), limits, cost)


def smallest(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Return a smaller case that fails as well: fewer requests, then shorter ones.

    Parameters
    ----------
    case : Case
        One that fails.
    fails : callable
        Whether a case fails; it is asked at most `_MAX_TRIES` times.
    """
    tries, smaller = 0, True
    while smaller:
        smaller = False
        for candidate in _smaller(case):
            tries += 1
            if tries > _MAX_TRIES:
                return case
            if fails(candidate):
                case, smaller = candidate, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    work = case.workload
    half = len(work) // 2
    for kept in (work[:half], work[half:]) if half else ():
        yield _renumbered(case, kept)
    for i in range(len(work) - 1, -1, -1):
        if len(work) > 1:
            yield _renumbered(case, work[:i] + work[i + 1 :])
    for i, one in enumerate(work):
        request, output = one.request, one.output_tokens
        if output > 1:
            yield _changed(case, i, request, output // 2)
        if request.prompt_tokens > 1:
            prompt = request.prompt_tokens // 2
            names = request.prefix_hash_ids[: prompt // case.limits.block_size]
            shorter = replace(request, prompt_tokens=prompt, prefix_hash_ids=names)
            yield _changed(case, i, shorter, output)


def _changed(case: Case, i: int, request: Request, output: int) -> Case:
    changed = replace(case.workload[i], request=request, output_tokens=output)
    return replace(case, workload=(*case.workload[:i], changed, *case.workload[i + 1 :]))


def _renumbered(case: Case, kept: tuple[Arrival, ...]) -> Case:
    numbered = (replace(a, request=replace(a.request, id=i)) for i, a in enumerate(kept))
    return replace(case, workload=tuple(numbered))


def _as_code(a: Arrival) -> str:
    request = a.request
    text = f"arrival({request.id}, {request.arrival_ns}, {request.prompt_tokens}, {a.output_tokens}"
    for name in _FIELDS:
        value = getattr(request, name)
        if value is not None and (name, value) not in _USUAL:
            text += f", {name}={value!r}"
    others = f", ready_ns={a.ready_ns}" * (a.ready_ns != request.arrival_ns)
    others += f", turn={a.turn!r}" * (a.turn is not None)
    return f"replace({text}){others})" if others else text + ")"


def _limits(limits: EngineConfig) -> str:
    changed = (
        f"{field.name}={getattr(limits, field.name)!r}"
        for field in fields(limits)
        if getattr(limits, field.name) != field.default
    )
    return f"EngineConfig({', '.join(changed)})"
