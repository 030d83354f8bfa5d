"""At what level the steps of a run stand at some time: short runs beside those that are compared.

A profile says at what level steps stood when it was measured, its `run_level`. On a machine that is
shared that drifts, within minutes, and beyond what a reference computation sees. So before and
after each measured run requests of another workload are served by the same engine, and the
simulation of a round of measured runs is priced at the level that their steps tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np

from schedlab.experiments.comparing.calibrated_engine import fitting
from schedlab.experiments.running.backend import Task, open_backend
from schedlab.experiments.running.fleet import resolve_fleet
from schedlab.experiments.running.resolved import make_cost_model
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.policy import PolicySpec
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.plan_log import RecordedStep
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.fitted import FittedCostModel
from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.cost.profile import RunLevel
from schedlab.sim.cost.step_spread import StepSpread
from schedlab.sim.errors import SpecError
from schedlab.sim.request import Arrival
from schedlab.sim.result import RunResult
from schedlab.sim.rng import stream
from schedlab.traces.lengths import independent, lognormal, uniform
from schedlab.traces.synthetic import synthesize

POLICY = "fcfs"
"""Serves level runs."""

_SHARES = 1 / 6, 1 / 2, 5 / 6
"""Of a point's steps, ordered by who runs: the middles of three equal shares stand for all."""

NUM_RUNS = len(_SHARES)
"""So many level runs go with a measured one, the last of them after it."""

SETTLING_STEPS = 30
"""First steps of a level run that tell nothing: they are a tenth slower than later ones, of which a
measured run has a thousand."""

_WARMING, _WARMING_CONTEXT_TOKENS = 48, 512.0
"""Clients of a warm-up, and the mean context of their requests."""

_LONGEST_QUEUE = 8
"""So many requests wait in a level run at most: what matters is whether anybody does."""

_FEWEST_QUEUED_STEPS = 30
"""Fewer do not tell what the queue adds to the scheduling of a step."""

_SIGMA = 0.8
"""Of the logarithm of prompt lengths."""

_SHORTEST, _LONGEST = 4, 28
"""Tokens of an answer: so alike that at the end of a run few requests are left over for long."""


@dataclass(frozen=True)
class Level:
    """At what level steps stood while some level runs were served.

    Attributes
    ----------
    run_level : RunLevel
        In the place of the profile's.
    step_spread : StepSpread or None
        In the place of the profile's; that stays if None, because there is none in the profile or
        there were too few steps.
    scheduling_overhead : SchedulingOverhead or None
        In the place of the profile's; None if that states none.
    decode_steps, prompt_steps, overhead : float
        How many times as long as by the profile steps without prompt tokens took, the others, and
        what the engine spends beside the model.
    num_steps : int
        Of these runs.
    """

    run_level: RunLevel
    step_spread: StepSpread | None
    scheduling_overhead: SchedulingOverhead | None
    decode_steps: float
    prompt_steps: float
    overhead: float
    num_steps: int

    def of(self, profile: FittedCostModel) -> FittedCostModel:
        """Return a profile at this level; what it says of itself tells so."""
        meta: dict[str, object] = {
            **profile.meta,
            "level": {
                "times_as_long_as_profile": {
                    key: getattr(self, key) for key in ("decode_steps", "prompt_steps", "overhead")
                },
                "run_level": asdict(self.run_level),
                "run_level_of_profile": asdict(profile.fit.run_level),
                "level_steps": self.num_steps,
            },
        }
        if self.scheduling_overhead is not None:
            meta["scheduling_overhead"] = asdict(self.scheduling_overhead)
        spread = self.step_spread or profile.fit.step_spread
        return FittedCostModel(
            replace(profile.fit, run_level=self.run_level, step_spread=spread),
            meta,
            profile.source,
            profile.mismatches,
            scatters=profile.step_spread is not None,
            draw=profile.draw,
        )


def check_level(spec: ExperimentSpec) -> None:
    """Refuse level runs where there is no level to measure.

    Raises
    ------
    SpecError
        If steps take what the cost model says, or that is no profile.
    """
    if spec.real.level_requests_per_client is None:
        return
    if spec.real.clock == "modelled":
        raise SpecError(
            "real.level_requests_per_client: by real.clock modelled steps take what the cost model "
            "says; leave it out, or measure by virtual, wall or reference"
        )
    if not isinstance(make_cost_model(spec), FittedCostModel):
        raise SpecError(
            "real.level_requests_per_client: the level is that of a profile that schedlab "
            "calibrate measures; leave it out with cost_model "
            f"{spec.cost_model.name or spec.cost_model.profile}"
        )


def at_level(cost_model: CostModel, level: Level | None) -> CostModel:
    """Return a cost model at a level, if there is one; only a profile has any."""
    if level is None:
        return cost_model
    assert isinstance(cost_model, FittedCostModel)
    return level.of(cost_model)


def simulated_at(level: Level | None, spec: ExperimentSpec) -> RunResult:
    """Return a simulated run of a point at a level, at the profile's own if that is None."""
    cost_model = None if level is None else at_level(make_cost_model(spec), level)
    on_sim = spec.model_copy(update={"backend": "sim", "replications": 1})
    return run(on_sim, cost_model=cost_model)


class LevelLoad(NamedTuple):
    """What level runs are like beside the runs of a point, by its simulation.

    Of batches as large as its own, over contexts as long, the level is told best.

    Attributes
    ----------
    clients : tuple of int
        How many clients send requests in each of the level runs, one after the other each: as many
        as run in the middle step of the third of steps with the fewest, of all, and of the third
        with the most.
    context_tokens : float
        Mean context of a request that decodes.
    queue : int
        So many clients more send requests, for whom there is no room: as many as wait there half
        of the time.
    """

    clients: tuple[int, ...]
    context_tokens: float
    queue: int = 0


def load_beside(spec: ExperimentSpec, level: Level | None = None) -> LevelLoad:
    """Return what level runs are like beside the runs of a point.

    Parameters
    ----------
    spec : ExperimentSpec
        The point.
    level : Level, optional
        At which it is simulated, as near to that of its runs as is known: where steps take longer,
        more requests run. The profile's by default.
    """
    steps = simulated_at(level, spec).log.steps()
    running, waiting, decodes, contexts = (
        np.asarray(steps[name], dtype=np.float64)
        for name in ("num_running", "num_waiting", "num_decodes", "decode_context_sum_tokens")
    )
    clients = tuple(max(1, round(float(np.quantile(running, share)))) for share in _SHARES)
    queue = min(_LONGEST_QUEUE, int(np.median(waiting)))
    return LevelLoad(clients, float(contexts.sum() / max(1.0, decodes.sum())), queue)


def level_run_numbers(repeat: int) -> range:
    """Return the numbers of the level runs that go with a repeat of a measured run."""
    return range(NUM_RUNS * repeat, NUM_RUNS * (repeat + 1))


def serve_level_requests(spec: ExperimentSpec, load: LevelLoad, number: int) -> list[RecordedStep]:
    """Serve a level run where an experiment's measured runs are served, and return its steps.

    None of the experiment's requests, lengths, seeds and policies is in it. Its first steps, until
    the engine has settled, are not returned.

    Parameters
    ----------
    spec : ExperimentSpec
        A point that is measured; `real.level_requests_per_client` says how many, so that runs have
        as many steps whatever their number of clients.
    load : LevelLoad
        That of the point: `load_beside`.
    number : int
        Counts the level runs of a point; each has requests of its own, and its number of clients.
    """
    clients = load.clients[number % NUM_RUNS]
    num_requests = (spec.real.level_requests_per_client or 1) * clients + load.queue
    served = spec.model_copy(
        update={
            "policy": PolicySpec(name=POLICY),
            "workload": spec.workload.model_copy(update={"max_concurrency": clients + load.queue}),
        }
    )
    kinds = resolve_fleet(served)
    seed = int(stream(spec.seed, f"level run {number} beside {spec.policy.name}").integers(2**31))
    steps: list[RecordedStep] = []
    config = kinds[0].point.config
    requests = level_requests(config, num_requests, load.context_tokens, seed)
    open_backend(served, kinds).serve(Task(served, kinds, requests, record=steps))
    return steps[SETTLING_STEPS:]


def warm_up(spec: ExperimentSpec) -> None:
    """Serve a level run that tells nothing, so that no measured run is the first on a device.

    A GPU's kernels are loaded, and the host has seen the way of a step, when time begins to count.
    """
    serve_level_requests(spec, LevelLoad((_WARMING,) * NUM_RUNS, _WARMING_CONTEXT_TOKENS), 0)


def level_requests(
    config: EngineConfig, num_requests: int, context_tokens: float, seed: int
) -> Sequence[Arrival]:
    """Return requests all at once: prompts that leave such a mean context, short answers."""
    prompt_tokens = max(1.0, context_tokens - (_SHORTEST + _LONGEST) / 4)
    prompts = lognormal(math.log(prompt_tokens) - _SIGMA**2 / 2, _SIGMA)
    lengths = independent(prompts, uniform(_SHORTEST, _LONGEST))
    trace = synthesize(num_requests, lengths=lengths, rate=math.inf, seed=seed)
    return fitting(trace, config)


def levels_of(
    profile: FittedCostModel, rounds: Mapping[int, Sequence[RecordedStep]]
) -> dict[int, Level]:
    """Return the level of each round of a load, and for all the same that a decode adds.

    Parameters
    ----------
    profile : FittedCostModel
        What prices the steps.
    rounds : mapping of int to sequence of RecordedStep
        The steps of the level runs of each, in their order.

    Raises
    ------
    SpecError
        If a round does not have both steps with prompt tokens and steps without.
    """
    from schedlab.gpu_backend.calibration_fit import lone_row, without_overhead

    batches = [without_overhead(steps) for steps in rounds.values()]
    row_s = lone_row(profile.fit, batches, profile.fit.run_level.decode_row_s)
    return {repeat: level_of(profile, steps, row_s) for repeat, steps in sorted(rounds.items())}


def level_of(
    profile: FittedCostModel, steps: Sequence[RecordedStep], lone_row_s: float = 0.0
) -> Level:
    """Return the level that the steps of level runs stand at.

    Parameters
    ----------
    profile : FittedCostModel
        What prices them.
    steps : sequence of RecordedStep
        In their order.
    lone_row_s : float
        What each request that decodes adds to steps without prompts beside what the profile says,
        told by more steps than these.

    Raises
    ------
    SpecError
        If there are not both steps with prompt tokens and steps without.

    Notes
    -----
    The level is what makes the sums of measured and priced times equal for each kind of step, and
    for those with prompts also the mean of their ratios, as far as a time that each of them takes
    longer can: see `schedlab.gpu_backend.calibration_fit.run_level`. What each request that decodes
    adds is given: the steps of a round do not tell it from the level. Of the scheduling overhead
    the terms are scaled alike, by steps without prompts while nobody waits; those with prompts
    tell what they add, and those with a queue what that does.
    """
    from schedlab.gpu_backend.calibration_fit import run_level, step_spread, without_overhead

    shapes = [step.shape for step in steps]
    has_prompts = np.array([bool(shape.chunks) for shape in shapes], dtype=bool)
    if has_prompts.all() or not has_prompts.any():
        raise SpecError(
            "real.level_requests_per_client: level runs must have steps with prompt tokens and "
            "steps without; serve more requests"
        )
    batches = without_overhead(steps)
    measured_s = np.array([batch.seconds for batch in batches])
    priced_s = np.array([profile.step_ns(shape)[0] for shape in shapes]) / 1e9
    level = run_level(profile.fit, batches, profile.fit.run_level.decode_row_s, lone_row_s)
    overhead, times = _overhead_of(profile.scheduling_overhead, steps)
    return Level(
        run_level=level,
        step_spread=None
        if profile.fit.step_spread is None
        else step_spread(replace(profile.fit, run_level=level), batches),
        scheduling_overhead=overhead,
        decode_steps=float(measured_s[~has_prompts].sum() / priced_s[~has_prompts].sum()),
        prompt_steps=float(measured_s[has_prompts].sum() / priced_s[has_prompts].sum()),
        overhead=times,
        num_steps=len(steps),
    )


def _overhead_of(
    stated: SchedulingOverhead | None, steps: Sequence[RecordedStep]
) -> tuple[SchedulingOverhead | None, float]:
    """Return the scheduling overhead of some steps, and how many times as long as stated it is."""
    if stated is None:
        return None, 1.0

    alone = replace(stated, per_prefill_step_s=0.0, per_queued_step_s=0.0)

    def spent_and_stated_ns(of_steps: Sequence[RecordedStep], by: SchedulingOverhead) -> list[int]:
        shapes = [step.shape for step in of_steps]
        stated_ns = [by.ns(s.num_running, s.num_waiting, bool(s.chunks)) for s in shapes]
        return [sum([step.overhead_ns for step in of_steps]), sum(stated_ns)]

    def more_s(of_steps: Sequence[RecordedStep], prompt_s: float = 0.0) -> float:
        """Return what one of some steps takes beside what all do, and those with prompts."""
        spent_ns, alone_ns = spent_and_stated_ns(of_steps, alone)
        prompts_s = prompt_s * sum([bool(step.shape.chunks) for step in of_steps])
        return max(0.0, ((spent_ns - times * alone_ns) / 1e9 - prompts_s) / len(of_steps))

    spent_ns, stated_ns = spent_and_stated_ns(steps, stated)
    if not stated_ns:  # it states none of a step, whatever it does of the first one
        return stated, 1.0
    queued = [step for step in steps if step.shape.num_waiting]
    is_told = _FEWEST_QUEUED_STEPS <= len(queued) <= len(steps) - _FEWEST_QUEUED_STEPS
    others = [step for step in steps if not (is_told and step.shape.num_waiting)]
    decodes_ns, alone_ns = spent_and_stated_ns([s for s in others if not s.shape.chunks], alone)
    times = decodes_ns / alone_ns if alone_ns else 1.0
    prompts = [step for step in others if step.shape.chunks]
    terms = {key: value * times for key, value in asdict(stated).items()}
    if prompts:
        terms["per_prefill_step_s"] = more_s(prompts)
    if is_told:
        terms["per_queued_step_s"] = more_s(queued, terms["per_prefill_step_s"])
    elif queued:  # hardly anybody waits, or hardly ever nobody: it is in the others
        terms["per_queued_step_s"] = 0.0
    return SchedulingOverhead(**terms), spent_ns / stated_ns
