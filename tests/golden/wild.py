"""A policy that does by chance whatever a plan may do: what no shipped policy asks of the engine.

It decides the same at the same instant, so that it can be asked again, and always gets on in the
end: what it leaves out today it serves tomorrow.
"""

from dataclasses import replace
from random import Random
from typing import Any

from schedlab.policies.policy import Policy
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.plan import FOREVER
from tests import laws
from tests.golden import small_runs

SEEDS = range(6)
_MIXED = EngineConfig(
    num_blocks=34, max_model_len=100, block_size=4, max_num_seqs=6, max_num_batched_tokens=40,
    preemption_mode="swap", swap_space_blocks=14, kv_block_bytes=70, max_num_resident=7,
    watermark=0.06, long_prefill_token_threshold=11, threshold_spares_lone_request=True,
)  # fmt: skip
LIMITS = {
    **small_runs.LIMITS,
    "mixed": _MIXED,
    "mixed, ahead": replace(
        _MIXED, async_scheduling=True, arrivals_between_steps=True, first_launch_ns=700
    ),
    "mixed, cached": replace(_MIXED, enable_prefix_caching=True, watermark=0.0),
    "mixed, whole prompts": replace(
        _MIXED, max_num_batched_tokens=100, enable_chunked_prefill=False,
        long_prefill_token_threshold=0, scheduler_reserve_full_isl=True,
    ),
}  # fmt: skip


class Wild(Policy):
    """Serves, preempts, pads, pauses, rejects and waits by chance."""

    pauses = True

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def key(self, state: Any, now_ns: int) -> int:
        """Return a place in the queue that has nothing to do with the arrival."""
        return (state.id * 7919 + self.seed) % 13

    def horizon(self, view: Any) -> tuple[int, int]:
        """Promise nothing."""
        return 1, FOREVER

    def plan(self, view: Any, builder: Any) -> Any:
        """Decide anything."""
        running = list(view.running)
        so_far = sum(state.num_preemptions for state in (*running, *view.waiting))
        draw = Random(f"{self.seed} {view.now_ns} {len(running)} {so_far}")
        for state in running:
            if len(running) > 1 and draw.random() < 0.05:
                builder.preempt(state, draw.choice((None, "recompute", "swap")))
        waiting = []
        for state in view.waiting:
            if draw.random() < 0.006 and view.now_ns - state.request.arrival_ns > 20_000:
                builder.reject(state, "by chance")
            else:
                waiting.append(state)
        draw.choice((self._in_order, self._decodes_first, self._picked, self._admitted))(
            view, builder, waiting, draw
        )
        if draw.random() < 0.1 and builder.tokens_left > 3:
            builder.pad(draw.randint(0, 3))
        until_ns = view.now_ns + draw.choice((700, 5_000))
        return builder.build(
            max_steps=draw.choice((1, 1, 3)),
            until_ns=until_ns,
            finished=draw.choice(("leave", "leave", "hold", "hold_answer")),
            pad_finished=draw.random() < 0.5,
        )

    def _in_order(self, view: Any, builder: Any, waiting: list[Any], draw: Random) -> None:
        while not builder.grant_running():
            builder.preempt(draw.choice(list(builder.running())))
        self._admit_some(builder, waiting, draw)

    def _decodes_first(self, view: Any, builder: Any, waiting: list[Any], draw: Random) -> None:
        while not builder.grant_decodes():
            builder.preempt(next(builder.running()))
        for state in view.prefilling:
            if state not in builder.preempted:
                builder.grant(state, draw.choice((None, 1, 5)))
        self._admit_some(builder, waiting, draw)

    def _picked(self, view: Any, builder: Any, waiting: list[Any], draw: Random) -> None:
        for state in view.running:
            if state not in builder.preempted and draw.random() < 0.7:
                builder.grant(state, draw.choice((None, 3)))
        if len(view.running) > 2 and draw.random() < 0.2:  # what it was granted is there again
            builder.preempt(draw.choice(list(builder.running())))
        self._admit_some(builder, waiting, draw)

    def _admitted(self, view: Any, builder: Any, waiting: list[Any], draw: Random) -> None:
        decodes = [s for s in view.running if s.is_decoding and s not in builder.preempted]
        builder.grant_all(decodes)
        if view.config.enable_prefix_caching:
            self._admit_some(builder, waiting, draw)
            return
        for state in waiting[:3]:
            if state.swapped or not builder.admit(state):
                break
            if not view.running or draw.random() < 0.7:
                builder.grant(state, draw.choice((None, 2)))

    def _admit_some(self, builder: Any, waiting: list[Any], draw: Random) -> None:
        for state in waiting:
            if not builder.grant(state, draw.choice((None, None, 4))):
                break


def workload(limits: str) -> list[Any]:
    """Draw the small runs' requests anew: some are cut off, and prompts are a few documents'."""
    found = []
    for one in small_runs.workload("swap" if "mixed" in limits else limits):
        number, output_tokens = one.request.id, one.output_tokens
        most = {0: output_tokens, 1: max(output_tokens - 2, 1), 2: 1}.get(number % 5, 1000)
        names = tuple(number % 3 * 1000 + i for i in range(one.request.prompt_tokens // 4))
        request = replace(one.request, max_tokens=most, prefix_hash_ids=names)
        # Too long for any engine, if it were not cut off; or too long all the same.
        longer = {6: 200, 21: 300}.get(number, output_tokens)
        found.append(replace(one, request=request, output_tokens=longer))
    return found


def digests(limits: str) -> dict[str, str]:
    """Run it with each seed under one kind of limits, proving conservation after every step."""
    work, config = workload(limits), LIMITS[limits]
    return {str(seed): small_runs.digest_of(laws.run(Wild(seed), work, config)) for seed in SEEDS}


CASES = {f"wild {limits}": (digests, limits) for limits in LIMITS}
