"""What view and ledger tell a policy at every plan, beside what comes of the plan in the end.

A run shows what was granted. Here is kept what a policy sees before it asks and after each answer:
who runs, waits, loads and is kept, what is left of the budgets, who was denied what and why. It
asks for what no shipped policy asks for, too: copies ahead of need, victims who might make room.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

from schedlab.policies.step_load import StepLoad
from schedlab.sim.config import KVTier
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.speculative_executor import SpeculativeExecutor
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.speculation.acceptance import DrawnAcceptance
from schedlab.sim.speculation.drafters import NgramDrafter
from tests import laws
from tests.golden import combined, small_runs, wild
from tests.staged_cost import StagedCost

_TIERED = replace(
    wild.LIMITS["mixed, cached"], threshold_spares_lone_request=False, kv_load="always",
    kv_tiers=(KVTier("cpu", 14, 1e9, 1e9, 3, 0, "back"), KVTier("disk", 60, 1e8, 1e9, 9, 2)),
)  # fmt: skip
_CONNECTED = replace(
    _TIERED, offloading_connector=True,
    kv_tiers=(replace(_TIERED.kv_tiers[0], write="through"), _TIERED.kv_tiers[1]),
)  # fmt: skip
LIMITS = {
    "mixed": replace(wild.LIMITS["mixed"], cudagraph_capture_sizes=(1, 2, 4, 8)),
    "mixed, ahead": wild.LIMITS["mixed, ahead"],
    "mixed, cached": wild.LIMITS["mixed, cached"],
    "whole prompts": wild.LIMITS["mixed, whole prompts"],
    "contiguous": wild.LIMITS["contiguous"],
    "tiers": _TIERED,
    "tiers, no seats": replace(_TIERED, load_takes_seat=False, scheduler_reserve_full_isl=True),
    "tiers, whole prompts": replace(
        _TIERED, load_takes_seat=False, enable_chunked_prefill=False, max_num_batched_tokens=100,
        long_prefill_token_threshold=0,
    ),
    "connector": replace(_CONNECTED, null_blocks=1),
    "connector, no seats": replace(_CONNECTED, load_takes_seat=False, kv_load="when_faster"),
    "overrun": replace(
        wild.LIMITS["mixed, ahead"], overrun_at_stop=True, preempt_in_order=True, watermark=0.0,
        enable_prefix_caching=True, free_uncached_first=True,
    ),
    "sessions": wild.LIMITS["mixed, cached"],
    "sessions with tiers": _TIERED,
    "drafts": replace(
        wild.LIMITS["mixed"], num_speculative_tokens=3, num_lookahead_tokens=2,
        long_prefill_token_threshold=0,
    ),
    "short drafts": replace(
        wild.LIMITS["mixed"], block_size=2, num_blocks=68, swap_space_blocks=30,
        num_speculative_tokens=5, long_prefill_token_threshold=3,
    ),
    "drafts named at once": replace(
        wild.LIMITS["mixed, cached"], num_speculative_tokens=4, names_accepted_drafts=True,
        preempt_in_order=True, serve_behind_preempted=True,
    ),
    **small_runs.PIPELINES,
}  # fmt: skip
_SHAPES = (BatchShape(0, 0, 0, ((7, 0),)), BatchShape(3, 40, 20))
_LEFT = ("tokens_left", "rows_left", "residents_left", "seats_left", "swap_blocks_left")


class _Extremes(laws.LinearCost):
    """Prices the shortest and the longest context of a step as well."""

    def step_ns(self, shape: BatchShape, k: int = 1) -> list[int]:
        most, least = shape.decode_context_max_tokens, shape.decode_context_min_tokens
        return [ns + 3 * (most + i) - least - i for i, ns in enumerate(super().step_ns(shape, k))]


class _Asked:
    """A builder that writes down what it is asked and answers."""

    def __init__(self, builder: Any, note: Callable[[str, Any], None]) -> None:
        self._builder = builder
        self._note = note

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._builder, name)
        if not callable(found) or name in ("running", "serves"):
            return found

        def asked(*args: Any, **named: Any) -> Any:
            answer = found(*args, **named)
            who = [a.id if hasattr(a, "request") else a for a in args if not isinstance(a, list)]
            told = answer.max_steps if name == "build" else answer
            denied = self._builder.denied
            self._note(
                name,
                (who, told, [getattr(self._builder, left) for left in _LEFT],
                 denied and (denied[0].id, denied[1]), self._builder.has_chunks),
            )  # fmt: skip
            return answer

        return asked

    def preempt(self, state: Any, mode: str | None = None) -> None:
        """Swap out by the other way to say so, where there is one."""
        if mode != "swap" or not self.offload(state):
            self.__getattr__("preempt")(state, mode)

    def build(self, **promised: Any) -> Any:
        """Hold nobody where several batches are in flight, which is refused."""
        if self._builder._config.pipeline_parallel_size > 1:
            promised |= {"finished": "leave", "pad_finished": False}
        return self.__getattr__("build")(**promised)


class Telling(wild.Wild):
    """Does by chance whatever a plan may do, and writes down what it is told."""

    can_pipeline = True
    seats_loaded = True

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._text = hashlib.sha256()
        self._count: Counter[str] = Counter()

    def _note(self, what: str, told: Any) -> None:
        self._count[what] += 1
        self._text.update(f"{what} {told!r}\n".encode())

    def told(self) -> tuple[str, dict[str, int]]:
        """Return a digest of all of it, and how often there was what."""
        return self._text.hexdigest()[:12], dict(sorted(self._count.items()))

    def plan(self, view: Any, builder: Any) -> Any:
        """Note the view before, do what `Wild` does, and note what became of it."""
        self._look(view)
        self._loaded = list(view.loaded)
        asked = _Asked(builder, self._note)
        for state in list(view.kept):
            if (state.id + view.now_ns) % 5 == 0:
                asked.preempt(state)
        plan = super().plan(view, asked)
        there = (*view.running, *view.waiting)
        self._note("serves", [s.id for s in there if builder.serves(s)])
        self._note("defers", [s.id for s in view.waiting if builder.defers(s)])
        self._note("cached", sorted(builder.cached_tokens.items()))
        return plan

    def on_arrival(self, state: Any, now_ns: int) -> None:
        self._note("arrival", (state.id, now_ns, _known(state)))

    def on_tokens(self, plan: Any, num_steps: int, now_ns: int) -> None:
        chunks = [(state.id, tokens) for state, tokens in plan.chunks]
        self._note("tokens", (num_steps, now_ns, chunks))

    def on_finish(self, state: Any, now_ns: int) -> None:
        self._note("finish", (state.id, now_ns, _known(state)))

    def on_reject(self, state: Any, now_ns: int) -> None:
        self._note("reject", (state.id, now_ns, _known(state)))

    def keeps_until(self, state: Any, now_ns: int) -> int:
        """Keep the memory of two answers in three."""
        self._note("keeps", (state.id, now_ns, state.tool, _known(state)))
        return now_ns + (0, 3_000, 40_000)[state.id % 3]

    def _admit_some(self, builder: Any, waiting: list[Any], draw: Random) -> None:
        """Seat who was loaded; load some ahead of need, and ask who else would fit."""
        for state in self._loaded:
            builder.grant(state, draw.choice((None, 1)))
        running = list(builder.running())
        rest = []
        for state in waiting:
            if builder.serves(state):
                continue
            victims = draw.sample(running, min(2, len(running)))
            builder.fits_without(victims[: draw.randrange(3)], state)
            if draw.random() > 0.3 or not builder.prefetch(state):
                rest.append(state)
        super()._admit_some(builder, rest, draw)

    def _look(self, view: Any) -> None:
        for name in ("seated", "running", "prefilling", "decoding", "held", "kept", "loading",
                     "loaded", "in_pipeline"):  # fmt: skip
            there = [
                (s.id, s.num_computed_tokens, s.num_output_tokens) for s in getattr(view, name)
            ]
            if there:
                self._note(name, there)
        numbers = [
            view.now_ns, view.num_waiting, view.num_decodes, view.num_paused, view.has_swapped,
            view.free_blocks, view.num_blocks, view.free_tokens, view.capacity_tokens,
        ]  # fmt: skip
        if view.num_decodes:
            numbers += view.decode_contexts()
        self._note("numbers", numbers)
        self._note("waiting", [(s.id, view.cached_tokens(s)) for s in view.waiting])
        self._note("estimates", [view.estimate_step_ns(shape) for shape in _SHAPES])
        if self._count["numbers"] % 3 == 0:
            self._note("loads", list(self._loads(view)))

    def _loads(self, view: Any) -> Iterator[Any]:
        """Form batches by and by, and ask how much more fits into times that are met exactly."""
        decodes, load = view.decoding, StepLoad(view)
        prompts = [*view.prefilling, *view.waiting][:2]
        for number, state in enumerate((*prompts[:1], *decodes[1:3])):
            load.add(state, 1 if state.is_decoding else 1 + number)
            for ns in (0, 1_010, 1_020, 1_030, 1_100, 2 * FOREVER):
                yield load.is_empty, load.is_within(ns), load.steps_within(ns)
                yield load.decodes_within(decodes[:1], ns), load.decodes_within(decodes[3:], ns)
                for prompt in prompts[1:]:
                    yield load.chunk_within(prompt, 7, ns)
        for some in (decodes, decodes[:2], []):
            load = StepLoad(view).with_decodes(some)
            yield [load.steps_within(ns) for ns in (1_010, 1_020, 1_030, 1_050, 1_100)]


def _known(state: Any) -> list[Any]:
    """Return what is known of a request and of its session."""
    facts = [state.served_ns, state.queued_ns, state.num_preemptions, state.recomputed_tokens]
    if (session := state.session) is not None:
        facts += [
            session.num_sent, session.num_answered, session.num_in_flight, session.last_gap_ns,
            session.attained_ns, session.waited_ns, session.critical_ns, state.critical_ns,
            session.generated_tokens, session.tool,
        ]  # fmt: skip
    return facts


def told(case: str) -> dict[str, Any]:
    """Run it once; a digest of what it was told, how often of what, and what came of it."""
    limits, _, seed = case.rpartition(" ")
    config = LIMITS[limits]
    work = wild.workload("swap" if "drafts" in limits or "tiers" in limits else limits)
    if "sessions" in limits:
        work = combined._in_sessions(combined._Draw(case), 8 + int(seed), config.block_size, 9)
    options: dict[str, Any] = {}
    if config.num_speculative_tokens:
        acceptance = DrawnAcceptance([0.9, 0.5, 0.1], 0.0, seed=3)
        options["make_executor"] = lambda p: SpeculativeExecutor(
            p, config, acceptance, NgramDrafter(1e-8)
        )
    cost: CostModel = _Extremes(1000, 10, 0)
    if limits in small_runs.PIPELINES:
        cost = StagedCost((10, 15, 5), link_ns=100, link_token_ns=1)
    policy = Telling(int(seed))
    log = laws.run(policy, work, config, cost, prove=False, **options)
    text, count = policy.told()
    return {"told": text, "came": combined.digest(log), "counts": count}


CASES = {
    f"told {limits} {seed}": (told, f"{limits} {seed}") for limits in LIMITS for seed in (0, 1)
}
