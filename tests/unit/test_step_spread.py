"""Steps that scatter: the factors, who draws them, and that skipping ahead changes none."""

from dataclasses import replace

import numpy as np
import pytest

from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.gpu_backend import calibration_fit
from schedlab.gpu_backend.calibration_fit import MeasuredBatch, predictions, step_spread
from schedlab.policies import registry
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.speculative_executor import SpeculativeExecutor
from schedlab.sim.cost.fitted import FittedCostModel
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.profile import Fit, FitError, Regime, read_fit, write_fit
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.cost.step_spread import Scatter, StepSpread
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.errors import SpecError
from schedlab.sim.speculation.acceptance import DrawnAcceptance
from schedlab.sim.speculation.drafters import NgramDrafter
from tests import laws
from tests.traced import limits

SPREAD = StepSpread((0.5, 1.5), (0.8, 0.9, 1.3), num_alike=3)
META = {
    "model": "llama-3-8b", "hardware": "a100-80gb", "dtype": "bf16", "tensor_parallel_size": 1
}  # fmt: skip
LONG = limits(num_blocks=100, max_model_len=300)
NONE = FitError(0.0, 0.0, 0.0, 0.0, 0)
FIT = Fit(
    Regime((1, 4096), (0.02, 0.5), {}),
    None,
    {"new_tokens": (1.0, 4096.0)},
    NONE,
    NONE,
)


def test_scatter_multiplies_each_step_by_the_factor_of_its_stretch_and_kind():
    drawn = Scatter(SPREAD, seed=1, draw=0, engine=0)
    decodes = drawn.scattered([1000] * 300, 0, has_prompts=False)
    assert set(decodes) == {500, 1500}
    stretches = np.array(decodes).reshape(-1, 3)
    assert (stretches == stretches[:, :1]).all()
    prompts = drawn.scattered([1000] * 300, 0, has_prompts=True)
    assert set(prompts) == {800, 900, 1300}
    # One number stands for a place among either: who is slow as a decode is so as a prompt.
    assert {d for d, p in zip(decodes, prompts, strict=True) if p == 1300} == {1500}
    assert {d for d, p in zip(decodes, prompts, strict=True) if p == 800} == {500}


@pytest.mark.slow
def test_scatter_depends_on_the_number_of_the_step_alone():
    whole = Scatter(SPREAD, 1, 0, 0).scattered([1000] * 9000, 0, has_prompts=False)
    piecewise = Scatter(SPREAD, 1, 0, 0)
    backwards = [piecewise.scattered([1000], i, False)[0] for i in reversed(range(9000))]
    assert backwards[::-1] == whole
    assert abs(np.mean(whole) - 1000) < 30


@pytest.mark.parametrize("other", [(2, 0, 0), (1, 1, 0), (1, 0, 1)])
def test_scatter_of_another_seed_draw_or_engine_is_another(other):
    one = Scatter(SPREAD, 1, 0, 0).scattered([1000] * 100, 0, has_prompts=False)
    assert Scatter(SPREAD, *other).scattered([1000] * 100, 0, has_prompts=False) != one


def test_step_is_never_shorter_than_a_nanosecond():
    tiny = StepSpread((0.001, 1.999), (1.0,))
    assert set(Scatter(tiny, 1, 0, 0).scattered([1] * 50, 0, has_prompts=False)) == {1, 2}


@pytest.mark.parametrize("policy", ["fcfs", "srtf", "fastserve"])
def test_run_that_scatters_is_the_same_step_by_step_and_cut_at_arrivals(policy):
    work = [
        laws.arrival(i, 3_000 * i, 5 + i % 7, 3 + i % 11, predicted_tokens=float(3 + i % 11))
        for i in range(25)
    ]

    def make_executor(pricing):
        gpu = SimExecutor(pricing)
        gpu.scatter = Scatter(SPREAD, 4, 0, 0)
        return gpu

    few = limits(num_blocks=12, seats=4)

    def signature(config, **more):
        made = registry.make(policy)
        return laws.signature(laws.run(made, work, config, make_executor=make_executor, **more))

    fast = signature(few)
    assert signature(laws.slow(few)) == fast
    assert signature(few, drive=laws.cut_at_arrivals) == fast
    plain = laws.signature(laws.run(registry.make(policy), work, few))
    assert plain != fast


class Ranged(laws.LinearCost):
    """Was measured up to 60 tokens of context in all, and up to two decodes."""

    def outside(self, shape, k=1):
        found = {}
        if shape.num_decodes > 2:
            found["num_decodes"] = list(range(k))
        sums = [shape.decode_context_sum_tokens + i * shape.num_decodes for i in range(k)]
        if late := [i for i, tokens in enumerate(sums) if tokens > 60]:
            found["decode_context_sum_tokens"] = late
        return found


class Nearsighted:
    """An engine that begins no step later than some time from now."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def begin(self, now_ns):
        return self._engine.begin(now_ns, now_ns + 5_500)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.filterwarnings("ignore:cost model")
def test_steps_cut_off_when_somebody_comes_are_counted_neither_outside_nor_by_the_scatter(drafts):
    work = [laws.arrival(i, 4_000 * i, 5 + i % 7, 20 + i % 11) for i in range(12)]
    config = limits(num_blocks=40, seats=4, num_speculative_tokens=drafts)

    def told(config, **more):
        made = []

        def make_executor(pricing):
            if drafts:
                rates = DrawnAcceptance([0.6])
                made.append(SpeculativeExecutor(pricing, config, rates, NgramDrafter(0.0)))
            else:
                made.append(SimExecutor(pricing))
            made[0].scatter = Scatter(SPREAD, 4, 0, 0)
            return made[0]

        log = laws.run(
            registry.make("fcfs"), work, config, Ranged(), make_executor=make_executor, **more
        )
        pricing = made[0].pricing
        by_feature = {name: n for name, n in pricing.extrapolated_by_feature.items() if n}
        return laws.signature(log), pricing.extrapolated_steps, by_feature

    ahead = told(config)
    assert ahead[1] > 20
    assert len(ahead[2]) == 2
    assert told(laws.slow(config)) == ahead
    assert told(config, drive=laws.cut_at_arrivals) == ahead
    both = told(config, drive=lambda engine, work: laws.cut_at_arrivals(Nearsighted(engine), work))
    assert both == ahead


def test_scattering_changes_what_a_step_takes_and_not_what_it_is_estimated_at():
    gpu = SimExecutor(Pricing(laws.LinearCost()))
    before = gpu.estimate_step_ns(BatchShape(2, 20, 12))
    gpu.scatter = Scatter(SPREAD, 1, 0, 0)
    assert gpu.estimate_step_ns(BatchShape(2, 20, 12)) == before
    log = simulate(Engine(LONG, registry.make("fcfs"), gpu), [laws.arrival(0, 0, 4, 200)])
    plain = simulate(
        Engine(LONG, registry.make("fcfs"), SimExecutor(Pricing(laws.LinearCost()))),
        [laws.arrival(0, 0, 4, 200)],
    )
    share = np.diff(log.token_times(0)) / np.diff(plain.token_times(0))
    assert set(np.round(share, 1)) == {0.5, 1.5}


# -- what is measured --------------------------------------------------------------------------


def steps(factors, chunks=()):
    shapes = [BatchShape(2, 100 + i, 60, chunks=chunks) for i in range(len(factors))]
    priced = predictions(FIT, [MeasuredBatch(s, 0.0) for s in shapes])
    return [
        MeasuredBatch(s, p * f) for s, p, f in zip(shapes, priced.tolist(), factors, strict=True)
    ]


def test_spread_of_steps_is_their_factors_in_shares_of_the_time_with_mean_one():
    rng = np.random.default_rng(2)
    decodes = rng.permutation(np.repeat([0.5, 1.0, 1.5], 1000))
    prompts = rng.permutation(np.repeat([0.9, 1.1], 50))
    found = step_spread(FIT, [*steps(decodes), *steps(prompts, ((9, 0),))])
    assert len(found.decode_steps) == 100
    some = [found.decode_steps[i] for i in (0, 50, 99)]
    assert some == pytest.approx([0.5, 1.0, 1.5], rel=1e-6)
    assert np.mean(found.decode_steps) == pytest.approx(1)
    assert len(found.prompt_steps) == 20
    assert found.prompt_steps[0] == pytest.approx(0.9, rel=1e-6)
    assert found.prompt_steps[-1] == pytest.approx(1.1, rel=1e-6)
    assert found.num_alike == 1


def test_steps_that_are_slow_in_stretches_are_told_by_their_length():
    rng = np.random.default_rng(3)
    factors = np.repeat(rng.choice([0.8, 1.2], 500), 4)
    found = step_spread(FIT, [*steps(factors), *steps(factors[:400], ((9, 0),))])
    assert found.num_alike == 4


def test_too_few_steps_say_nothing_of_their_spread():
    assert step_spread(FIT, steps([1.0] * 50)) is None
    assert step_spread(FIT, [*steps([1.0] * 50), *steps([1.0] * 9, ((9, 0),))]) is None


# -- in a profile, and in an experiment --------------------------------------------------------


def test_profile_keeps_the_spread(tmp_path):
    write_fit(tmp_path, META, replace(FIT, step_spread=SPREAD))
    assert read_fit(tmp_path).step_spread == SPREAD
    write_fit(tmp_path, META, FIT)
    assert read_fit(tmp_path).step_spread is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decode_steps": ()}, "decode_steps: give numbers > 0"),
        ({"prompt_steps": (1.0, -1.0, 3.0)}, "prompt_steps: give numbers > 0"),
        ({"prompt_steps": (1.0, 1.1)}, "prompt_steps: the mean must be 1"),
        ({"num_alike": 0}, "num_alike must be at least 1"),
    ],
)
def test_spread_that_is_none_is_refused(change, message):
    with pytest.raises(SpecError, match=message):
        replace(SPREAD, **change)


def test_model_scatters_only_if_asked_and_if_its_profile_can():
    assert FittedCostModel(replace(FIT, step_spread=SPREAD), META).step_spread is None
    asked = FittedCostModel(replace(FIT, step_spread=SPREAD), META, scatters=True, draw=3)
    assert (asked.step_spread, asked.draw) == (SPREAD, 3)
    assert asked.describe()["draw"] == 3
    with pytest.raises(SpecError, match="the-profile does not say how steps scatter"):
        FittedCostModel(FIT, META, "the-profile", scatters=True)


def experiment(folder, **cost_model):
    return make_spec({
        "name": "scattering", "hardware": "a100-80gb",
        "cost_model": {"profile": str(folder), **cost_model},
        "workload": {"num_requests": 30, "request_rate": 20.0, "prompt_tokens": 50,
                     "output_tokens": 20},
    })  # fmt: skip


def test_experiment_draws_other_step_times_a_draw_and_the_same_ones_again(tmp_path):
    write_fit(tmp_path, META, replace(FIT, step_spread=SPREAD))

    def times(**cost_model):
        return run(experiment(tmp_path, **cost_model)).requests["finish_ns"].tolist()

    first = times(scatters=True)
    assert first == times(scatters=True, draw=0)
    assert first != times(scatters=True, draw=1)
    assert times() == times(scatters=False, draw=5)
    assert first != times()


def test_engines_of_a_fleet_scatter_each_in_its_own_way(tmp_path):
    write_fit(tmp_path, META, replace(FIT, step_spread=SPREAD))
    spec = experiment(tmp_path, scatters=True)
    two = make_spec({**spec.to_data(), "cluster": {"count": 2, "router": "round_robin"},
                     "workload": {"num_requests": 2, "request_rate": float("inf"),
                                  "prompt_tokens": 50, "output_tokens": 90}})  # fmt: skip
    took = run(two).requests["finish_ns"].tolist()
    assert took[0] != took[1]


def test_engines_in_lockstep_do_not_scatter(tmp_path):
    write_fit(tmp_path, META, replace(FIT, step_spread=SPREAD))
    spec = experiment(tmp_path, scatters=True)
    chosen = {"data_parallel_size": 2, "data_parallel_lockstep": True}
    together = make_spec({**spec.to_data(), "engine": chosen})
    with pytest.raises(SpecError, match=r"cost_model\.scatters: engines in lockstep"):
        run(together)


def batches_of(ratios, predicted, is_prompt=False):
    """Return batches whose measured time is so many times what is predicted, and the latter."""
    chunks = ((5, 0),) if is_prompt else ()
    shape = BatchShape(0 if is_prompt else 2, 0, 0, chunks)
    return [
        MeasuredBatch(shape, ratio * ns) for ratio, ns in zip(ratios, predicted, strict=True)
    ], list(predicted)


@pytest.fixture
def predicted(monkeypatch):
    """A table of what each batch is predicted to take, in place of a fit."""
    table = {}
    monkeypatch.setattr(
        calibration_fit, "predictions", lambda fit, steps: np.array([table[id(s)] for s in steps])
    )
    return lambda steps, seconds: table.update(zip(map(id, steps), seconds, strict=True))


def test_share_of_steps_is_of_equal_predicted_time_and_their_mean_is_one(monkeypatch, predicted):
    monkeypatch.setattr(calibration_fit, "_SHARES", 3)
    monkeypatch.setattr(calibration_fit, "_STEPS_A_SHARE", 2)
    # Sorted: 1 s at 0.5 and 2 at 1, 1 at 1 and 1 at 2, 2 at 4 and 2 at 8: thirds of nine seconds
    # by the middle of each.
    steps, seconds = batches_of([8, 1, 0.5, 4, 1, 2], [2, 2, 1, 2, 1, 1])
    predicted(steps, seconds)
    factors = np.array([(0.5 + 2) / 3, (1 + 2) / 2, (8 + 16) / 4])
    assert calibration_fit._shares(None, steps) == pytest.approx(factors / factors.mean())
    # Of four steps there are two shares.
    assert len(calibration_fit._shares(None, steps[:4])) == 2


@pytest.mark.parametrize(
    ("ratios", "num_alike"),
    [
        ([1, 2] * 40, 1), (np.exp(np.arange(80) / 10), 100),
        # Stretches of four alike, up and down by turns: of 79 pairs 19 differ.
        ([1, 1, 1, 1, 2, 2, 2, 2] * 10, 2),
    ],
)  # fmt: skip
def test_steps_are_alike_in_stretches_that_their_correlation_tells(
    monkeypatch, predicted, ratios, num_alike
):
    monkeypatch.setattr(calibration_fit, "_STEPS_A_SHARE", 5)
    decodes, seconds = batches_of(ratios, [3.0] * 80)
    prompts, more = batches_of([ratios[-1]] * 10, [7.0] * 10, is_prompt=True)
    predicted(decodes + prompts, seconds + more)
    found = step_spread(None, decodes + prompts)
    assert found.num_alike == num_alike
    assert found.prompt_steps == (1.0,) * len(found.prompt_steps)
    assert np.mean(found.decode_steps) == pytest.approx(1.0)
    assert step_spread(None, decodes + prompts[:9]) is None
    assert step_spread(None, decodes[:9] + prompts) is None
    assert step_spread(None, decodes[:10] + prompts) is not None
