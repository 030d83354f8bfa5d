"""Run a policy on a small workload and write down its exact batches."""

from schedlab.policies import Policy, registry
from schedlab.sim.config import EngineConfig
from tests import laws


class Recorder:
    """A policy that writes down every plan of the one it wraps."""

    def __init__(self, policy):
        self._policy = policy
        self.batches = []

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def plan(self, view, builder):
        plan = self._policy.plan(view, builder)
        tokens = dict(sorted(plan.num_scheduled_tokens().items()))
        gone = [s.id for s in plan.preempted]
        self.batches.append(
            (tokens, plan.padding_tokens)
            if plan.padding_tokens
            else (tokens, gone)
            if gone
            else tokens
        )
        return plan


class AsksOnce(Policy):
    """Lets prompts be computed, then leaves so many tokens of a step, tells `answer`, and stops."""

    def __init__(self, left):
        self.left = left

    def plan(self, view, builder):
        if view.waiting:
            for state in view.waiting:
                builder.grant(state)
            return builder.build()
        builder.pad(builder.tokens_left - self.left)
        raise RuntimeError(self.answer(view, builder))


def batches(name, work, config, **params):
    """Run step by step and return each plan as {request: tokens}; with preempted ids or padding."""
    recorder = Recorder(registry.make(name, **params))
    log = laws.run(recorder, work, laws.slow(config))
    return [b for b in recorder.batches if b != {}], log


def limits(num_blocks=100, seats=8, budget=16, block_size=4, **more):
    more.setdefault("max_model_len", min(100, num_blocks * block_size))
    return EngineConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        **more,
    )


def wasted_tokens(batches, state):
    """Return what each of queued batches would read for nothing, with one more request."""
    return batches._waste(state.request.prompt_tokens, state.request.predicted_tokens).tolist()
