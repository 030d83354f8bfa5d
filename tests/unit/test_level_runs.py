"""The level at which steps stand beside measured runs, and simulations that are priced at it."""

import json
from dataclasses import asdict, astuple, replace
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.experiments.comparing import compare as comparison
from schedlab.experiments.comparing import (
    compare_figures,
    comparison_files,
    level_runs,
    measured_runs,
)
from schedlab.experiments.comparing.comparison_files import SHOWN, level_rows, markdown, to_data
from schedlab.experiments.comparing.level_runs import (
    Level,
    LevelLoad,
    check_level,
    level_of,
    level_requests,
    levels_of,
    load_beside,
    serve_level_requests,
)
from schedlab.experiments.comparing.measured_runs import MeasuredRun, MeasuredRuns, run_identity
from schedlab.experiments.figures import style
from schedlab.experiments.running.resolved import make_cost_model
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.plan_log import RecordedStep
from schedlab.sim.cost.fitted import FittedCostModel
from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.cost.profile import Fit, FitError, Regime, RunLevel, write_fit
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.cost.step_spread import StepSpread
from schedlab.sim.errors import SpecError

META = {
    "model": "schedlab-tiny", "hardware": "cpu", "dtype": "fp32", "tensor_parallel_size": 1,
    "scheduling_overhead": {"base_s": 1e-4, "per_running_s": 1e-5},
}  # fmt: skip
NONE = FitError(0.0, 0.0, 0.0, 0.0, 0)
FIT = Fit(
    Regime((1, 256), (0.002, 0.020), {"decode_context_sum_tokens": 1e-7}),
    None,
    {"new_tokens": (1.0, 256.0)},
    NONE,
    NONE,
    RunLevel(0.9, 1.1, 5e-5),
    StepSpread((0.9, 1.1), (0.8, 1.2), num_alike=2),
)
SPEC = {
    "name": "beside",
    "seed": 3,
    "model": "schedlab-tiny",
    "hardware": "cpu",
    "engine": {
        "dtype": "fp32", "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256,
        "num_gpu_blocks_override": 60,
    },
    "workload": {
        "prompt_tokens": {"distribution": "uniform", "low": 4, "high": 60},
        "output_tokens": {"distribution": "uniform", "low": 2, "high": 40},
        "num_requests": 40,
    },
    "real": {"repeats": 2, "level_requests_per_client": 4},
    "sweep": {
        "policy": ["fcfs", "prefill_first"],
        "workload.request_rate": [20, "inf"],
    },
}  # fmt: skip
SLOWER = {"decode_steps": 1.3, "prompt_steps": 1.1, "overhead": 1.5}


@pytest.fixture
def profile(tmp_path):
    write_fit(tmp_path / "profile", META, FIT)
    return str(tmp_path / "profile")


def spec_of(profile, scatters=False, **changed):
    cost_model = {"profile": profile, "scatters": scatters}
    return make_spec({**SPEC, "cost_model": cost_model, **changed})


def without_sweep(**changed):
    rest = {key: value for key, value in SPEC.items() if key != "sweep"}
    return {**rest, "workload": {**SPEC["workload"], "request_rate": 20}, **changed}


def slow_step(model, shape, decodes=1.3, prompts=1.1, overhead=1.5, more_s=0.0):
    """Return a step that takes so many times as long as it is priced, longer with a prompt."""
    beside_ns = model.scheduling_overhead.ns(shape.num_running, shape.num_waiting)
    times, more_ns = (prompts, more_s * 1e9) if shape.chunks else (decodes, 0.0)
    model_ns = round(model.step_ns(shape)[0] * times + more_ns)
    beside_ns = round(beside_ns * overhead + more_ns / 10)
    return RecordedStep(0, {}, (), shape, model_ns + beside_ns, beside_ns)


def shapes():
    decodes = [BatchShape(n, 50 * n, 50, num_running=n) for n in (1, 2, 3, 5)] * 8
    prompts = [
        BatchShape(2, 80, 50, chunks=((q, 0),), num_running=3) for q in (10, 30, 60, 100)
    ] * 8
    return decodes + prompts


def test_level_makes_the_sums_of_each_kind_of_step_and_of_the_overhead_those_measured():
    model = FittedCostModel(FIT, META, scatters=True, draw=7)
    steps = [slow_step(model, shape) for shape in shapes()]
    level = level_of(model, steps)
    assert level.decode_steps == pytest.approx(1.3, rel=1e-6)
    assert level.prompt_steps == pytest.approx(1.1, rel=1e-6)
    assert level.overhead == pytest.approx(1.5, rel=1e-2)  # its prompts cost nothing more
    assert level.num_steps == len(steps)
    assert level.run_level.decode_row_s == 5e-5
    there = level.of(model)
    for has_prompts in (False, True):
        some = [step for step in steps if bool(step.shape.chunks) == has_prompts]
        measured_ns = sum(step.duration_ns - step.overhead_ns for step in some)
        assert sum(there.step_ns(s.shape)[0] for s in some) == pytest.approx(measured_ns, rel=1e-6)
    assert there.scheduling_overhead.base_s == pytest.approx(1e-4 * level.overhead)
    assert there.scheduling_overhead.per_running_s == pytest.approx(1e-5 * level.overhead)
    assert there.scheduling_overhead.per_prefill_step_s == pytest.approx(0.0, abs=1e-7)
    assert (there.draw, there.source, there.mismatches) == (7, model.source, [])
    assert there.step_spread is not None


def test_levels_of_rounds_share_what_a_decode_adds_to_steps_without_prompts():
    model = FittedCostModel(FIT, META)
    times, row_ns = {3: 1.4, 0: 1.1}, -20_000

    def steps_of(level):
        for shape in shapes():
            slow = slow_step(model, shape, decodes=level)
            fewer_ns = 0 if shape.chunks else row_ns * shape.num_decodes
            yield slow._replace(duration_ns=slow.duration_ns + fewer_ns)

    levels = levels_of(model, {repeat: list(steps_of(level)) for repeat, level in times.items()})
    assert list(levels) == [0, 3]
    for repeat, level in levels.items():
        # Decodes' own 50 us of the profile are made longer by their level as well.
        more_s = [50e-6 * (times[repeat] - 1) for repeat in times]
        assert level.run_level.lone_row_s == pytest.approx(-20e-6 + sum(more_s) / 2, rel=0.2)
        priced = sum(level.of(model).step_ns(s.shape)[0] for s in steps_of(times[repeat]))
        measured = sum(s.duration_ns - s.overhead_ns for s in steps_of(times[repeat]))
        assert priced == pytest.approx(measured, rel=1e-4)
        assert (
            level.of(model).meta["level"]["run_level"]["lone_row_s"] == level.run_level.lone_row_s
        )
    assert levels[0].run_level.lone_row_s == levels[3].run_level.lone_row_s
    assert levels[0].run_level.decode_steps < levels[3].run_level.decode_steps


def test_level_tells_what_a_step_takes_longer_to_schedule_while_anybody_waits():
    model = FittedCostModel(FIT, META)
    still = [slow_step(model, shape, more_s=2e-3) for shape in shapes()]  # 0.2 ms more of a prompt
    queued = [
        step._replace(
            shape=replace(step.shape, num_waiting=7),
            overhead_ns=step.overhead_ns + 70_000,
            duration_ns=step.duration_ns + 70_000,
        )
        for step in still
    ]
    overhead = scaled(model.scheduling_overhead, 1.5, 2e-4)
    expected = replace(overhead, per_queued_step_s=7e-5)
    assert astuple(level_of(model, still + queued).scheduling_overhead) == pytest.approx(
        astuple(expected), rel=1e-4
    )
    few = level_of(model, still + queued[::3])
    assert few.scheduling_overhead.per_queued_step_s == 0.0
    stated = replace(model.scheduling_overhead, per_queued_step_s=5e-5)
    knowing = FittedCostModel(FIT, {**META, "scheduling_overhead": asdict(stated)})
    nobody = level_of(knowing, still).scheduling_overhead
    assert nobody.per_queued_step_s == pytest.approx(1.5 * 5e-5)
    told = level_of(knowing, still + queued).scheduling_overhead
    assert told.per_queued_step_s == pytest.approx(7e-5, rel=1e-4)
    always = level_of(knowing, queued).scheduling_overhead
    assert always.per_queued_step_s == 0.0
    assert always.base_s > 1.5e-4


def test_level_tells_what_each_step_with_prompts_takes_longer_from_what_all_their_tokens_do():
    model = FittedCostModel(FIT, META)
    level = level_of(model, [slow_step(model, shape, more_s=2e-3) for shape in shapes()])
    rows_s = 2 * 5e-5 * (1.1 - 1)  # of two decodes, which the level leaves as they are
    expected = RunLevel(level.run_level.decode_steps, 1.1 * 1.1, 5e-5, 2e-3 + rows_s, 0.0)
    assert astuple(level.run_level) == pytest.approx(astuple(expected), rel=1e-4)
    assert level.prompt_steps > 1.2
    overhead = scaled(model.scheduling_overhead, 1.5, 2e-4)
    assert astuple(level.scheduling_overhead) == pytest.approx(astuple(overhead), rel=1e-6)
    assert level.of(model).scheduling_overhead == level.scheduling_overhead
    assert level.overhead > 1.5


def test_level_scatters_as_its_own_steps_do_and_as_the_profile_where_they_are_few():
    model = FittedCostModel(FIT, META, scatters=True)
    even = [slow_step(model, shape) for shape in shapes()]
    spread = level_of(model, even).of(model).step_spread
    assert max(spread.prompt_steps) < 1.01
    assert max(spread.decode_steps) < 1.05
    few = level_of(model, [*even[:4], *even[-4:]])
    assert few.step_spread is None
    assert few.of(model).step_spread == FIT.step_spread
    still = FittedCostModel(FIT, META)
    assert level_of(still, even).of(still).step_spread is None


def test_level_of_a_profile_without_spread_and_overhead_adds_neither():
    model = FittedCostModel(
        replace(FIT, step_spread=None), {k: v for k, v in META.items() if "sched" not in k}
    )
    steps = [
        RecordedStep(0, {}, (), shape, 2 * model.step_ns(shape)[0] + 10, 10) for shape in shapes()
    ]
    level = level_of(model, steps)
    assert (level.overhead, level.step_spread) == (1.0, None)
    assert level.of(model).scheduling_overhead is None
    assert level.decode_steps == pytest.approx(2.0)


def test_level_of_a_profile_that_states_overhead_of_the_first_step_alone_keeps_it():
    stated = SchedulingOverhead(first_step_s=0.5)
    model = FittedCostModel(FIT, {**META, "scheduling_overhead": asdict(stated)})
    level = level_of(model, [RecordedStep(0, {}, (), s, 9_000_000, 10) for s in shapes()])
    assert (level.scheduling_overhead, level.overhead) == (stated, 1.0)


@pytest.mark.parametrize("part", [slice(None, 32), slice(32, None)])
def test_level_of_steps_of_one_kind_is_refused(part):
    model = FittedCostModel(FIT, META)
    with pytest.raises(SpecError, match=r"real\.level_requests_per_client: .*serve more requests"):
        level_of(model, [slow_step(model, shape) for shape in shapes()[part]])


def test_level_where_there_is_none_to_measure_is_refused(profile):
    check_level(spec_of(profile))
    modelled = {"level_requests_per_client": 5, "clock": "modelled"}
    with pytest.raises(
        SpecError, match=r"real\.level_requests_per_client: by real\.clock modelled"
    ):
        check_level(spec_of(profile, real=modelled))
    check_level(spec_of(profile, real={"clock": "modelled"}))
    for clock in ("virtual", "wall", "reference"):
        check_level(spec_of(profile, real={"level_requests_per_client": 5, "clock": clock}))
    with pytest.raises(SpecError, match="leave it out with cost_model roofline"):
        check_level(make_spec(SPEC))
    with pytest.raises(SpecError, match="leave it out with cost_model roofline"):
        comparison.compare(make_spec(SPEC))


def test_level_runs_are_as_large_as_the_thirds_of_the_simulation_and_its_contexts(profile):
    spec = make_spec(without_sweep(cost_model={"profile": profile}))
    steps = run(spec).log.steps()
    load = load_beside(spec)
    assert load.clients == tuple(np.quantile(steps["num_running"], [1 / 6, 1 / 2, 5 / 6]).round())
    rows = np.repeat(
        steps["decode_context_sum_tokens"] / np.maximum(steps["num_decodes"], 1),
        steps["num_decodes"],
    )
    assert load.context_tokens == pytest.approx(rows.mean())
    crowd = spec.model_copy(
        update={"workload": spec.workload.model_copy(update={"request_rate": float("inf")})}
    )
    assert load_beside(crowd).clients[-1] == 8
    assert load.queue == np.median(steps["num_waiting"]) == 0
    waiting = run(crowd).log.steps()["num_waiting"]
    assert load_beside(crowd).queue == min(8, int(np.median(waiting))) > 0


def served_by(monkeypatch, spec, load, number):
    """Return the task that a level run is for its backend."""
    tasks = []

    def serve(task):
        task.record.extend(range(32))
        tasks.append(task)

    monkeypatch.setattr(
        level_runs, "open_backend", lambda spec, kinds: SimpleNamespace(serve=serve)
    )
    assert serve_level_requests(spec, load, number) == [30, 31], "those of a settled engine"
    return tasks[0]


def test_level_run_serves_other_requests_by_fcfs_more_of_them_where_clients_are_more(
    monkeypatch, profile
):
    spec = make_spec(without_sweep(cost_model={"profile": profile}, policy="prefill_first"))
    load = LevelLoad((2, 3, 5), 40.0)
    before, after, again = (served_by(monkeypatch, spec, load, number) for number in (0, 2, 3))
    for task, clients, num_requests in ((before, 2, 8), (after, 5, 20), (again, 2, 8)):
        assert task.spec.policy.name == "fcfs"
        assert task.spec.workload.max_concurrency == clients
        assert len(task.arrivals) == num_requests
        assert {one.request.arrival_ns for one in task.arrivals} == {0}
        assert task.spec.engine == spec.engine
    lengths = [
        [(one.request.prompt_tokens, one.output_tokens) for one in task.arrivals]
        for task in (before, again)
    ]
    assert lengths[0] != lengths[1]
    queue = served_by(monkeypatch, spec, load._replace(queue=6), 1)
    assert (queue.spec.workload.max_concurrency, len(queue.arrivals)) == (9, 18)
    other = served_by(monkeypatch, spec.model_copy(update={"seed": 4}), load, 0)
    assert lengths[0] != [(a.request.prompt_tokens, a.output_tokens) for a in other.arrivals]


def test_warm_up_serves_as_many_requests_as_keep_a_device_busy_of_nobody(monkeypatch, profile):
    spec = make_spec(without_sweep(cost_model={"profile": profile}, policy="prefill_first"))
    served = []

    def serve(task):
        served.append(task)

    monkeypatch.setattr(
        level_runs, "open_backend", lambda spec, kinds: SimpleNamespace(serve=serve)
    )
    level_runs.warm_up(spec)
    (task,) = served
    assert task.spec.policy.name == "fcfs"
    assert task.spec.workload.max_concurrency == 48
    assert len(task.arrivals) >= 48


def test_level_requests_leave_the_contexts_asked_for_within_the_limits():
    config = EngineConfig(num_blocks=1000, max_model_len=2000, max_num_batched_tokens=256)
    some = level_requests(config, 12_000, 130.0, seed=1)
    prompts, answers = np.array([(a.request.prompt_tokens, a.output_tokens) for a in some]).T
    assert (answers.min(), answers.max()) == (4, 28)
    contexts = np.repeat(prompts + answers / 2, answers)  # of each step of each request
    assert contexts.mean() == pytest.approx(130, rel=0.03)
    assert np.median(prompts) == pytest.approx(122 / np.exp(0.32), rel=0.05)
    short = EngineConfig(num_blocks=10, max_model_len=150, max_num_batched_tokens=20)
    assert max(
        a.request.prompt_tokens + a.output_tokens for a in level_requests(short, 200, 130.0, 1)
    ) == 150  # fmt: skip
    assert all(a.request.prompt_tokens >= 1 for a in level_requests(short, 20, 0.0, seed=1))


def scaled(overhead, times, more_s=0.0):
    terms = {key: value * times for key, value in asdict(overhead).items()}
    return SchedulingOverhead(**{**terms, "per_prefill_step_s": more_s})


def machine_at(monkeypatch, of_round):
    """Let the real backend be the simulation with steps that take longer, by round."""
    asked = []

    def measured(spec, repeat=0, level_load=None):
        profile = make_cost_model(spec)
        level = Level(
            RunLevel(
                0.9 * of_round[repeat]["decode_steps"],
                1.1 * of_round[repeat]["prompt_steps"],
                5e-5,
                prompt_step_s=1e-3 * repeat,
            ),
            None,
            scheduling_overhead=scaled(profile.scheduling_overhead, of_round[repeat]["overhead"]),
            **of_round[repeat],
            num_steps=0,
        )
        slow = level.of(profile)
        on_sim = spec.model_copy(update={"backend": "sim"})
        steps = []
        result = run(on_sim, record=steps, cost_model=slow)
        result.provenance["real"] = {"device": "cpu", "clock": "virtual"}
        asked.append((spec.policy.name, repeat, level_load))
        some = []
        if level_load is not None:
            beside = on_sim.model_copy(update={"seed": 99})
            run(beside, record=some, cost_model=slow)
        return MeasuredRun(result, steps, "here", some)

    def at_level(spec, level_load, repeat):
        found = measured(spec, 0, level_load).level_steps
        asked[-1] = "level", repeat, level_load
        return found

    monkeypatch.setattr(comparison, "measure", measured)
    monkeypatch.setattr(comparison, "steps_at_level", at_level)
    monkeypatch.setattr(comparison, "machine_name", lambda device: "here")
    monkeypatch.setattr(comparison, "check_profile", lambda *arguments: None)
    return asked


ROUNDS = [SLOWER, {"decode_steps": 1.1, "prompt_steps": 1.0, "overhead": 1.0}]


@pytest.mark.slow
def test_comparison_priced_at_the_level_of_its_rounds_holds_where_the_profiles_own_is_off(
    monkeypatch, profile
):
    asked = machine_at(monkeypatch, ROUNDS)
    beside = comparison.compare(spec_of(profile), check=False)
    sizing = [one for one in asked if one[0] == "level"]
    assert [repeat for _, repeat, _ in sizing] == [2, 2]  # of each load, and of no measured run
    assert len(asked) == 8 + 2
    assert all(isinstance(load, LevelLoad) for _, _, load in asked)
    asked.clear()
    alone = comparison.compare(spec_of(profile, real={"repeats": 2}), check=False)
    assert {clients for _, _, clients in asked} == {None}
    for found, other in zip(beside, alone, strict=True):
        off, on = (
            {row.metric: row.error for row in one.rows}["mean_e2el_ms"] for one in (other, found)
        )
        assert off < -0.09
        assert abs(on) < 0.01
        assert abs(found.steps["bias"]) < 0.005 < -other.steps["bias"]
        assert list(found.levels) == [0, 1]
        assert found.num_simulated == 2  # once at the level of each round
        assert (other.levels, other.num_simulated) == ({}, 1)
        first, second = (found.levels[repeat].run_level for repeat in (0, 1))
        assert first.decode_steps == pytest.approx(0.9 * 1.3, rel=2e-3)
        assert first.prompt_steps == pytest.approx(1.1 * 1.1, rel=2e-3)
        assert second.decode_steps == pytest.approx(0.9 * 1.1, rel=2e-3)
        assert second.prompt_steps == pytest.approx(1.1, rel=2e-3)
        assert first.prompt_step_s == pytest.approx(0.0, abs=5e-5)
        assert second.prompt_step_s == pytest.approx(1e-3, abs=5e-5)


@pytest.mark.slow
def test_level_runs_on_a_machine_slower_than_its_profile_are_as_large_as_its_runs(
    monkeypatch, profile
):
    slow = {"decode_steps": 3.0, "prompt_steps": 3.0, "overhead": 3.0}
    asked = machine_at(monkeypatch, [slow, slow])
    real = {"repeats": 2, "level_requests_per_client": 4}
    spec = make_spec(without_sweep(cost_model={"profile": profile}, real=real))
    (found,) = comparison.compare(spec, check=False)
    (_, _, by_profile), *others = asked
    running = found.measured.log.steps()["num_running"]
    as_measured = tuple(np.quantile(running, [1 / 6, 1 / 2, 5 / 6]).round())
    assert {load.clients for _, _, load in others} == {as_measured}
    assert by_profile.clients[-1] < as_measured[-1]


@pytest.mark.slow
def test_comparison_says_how_the_level_was_taken_and_what_the_profiles_was(monkeypatch, profile):
    machine_at(monkeypatch, ROUNDS)
    monkeypatch.setattr(comparison, "_DRAWS", 8)  # fewer would tell no chance
    spec = spec_of(profile, scatters=True)
    spec = spec.model_copy(
        update={"real": spec.real.model_copy(update={"throughput_bar": 0.02, "latency_bar": 0.07})}
    )
    found = comparison.compare(spec, check=False)
    assert [point.num_simulated for point in found] == [8] * 4
    assert {row.bar for row in found[0].rows} == {0.02, 0.07}
    assert markdown(found[:1], spec).startswith(f"# {spec.name}: measured against simulated\n")
    text = markdown(found, spec)
    assert "ok: within 2% (throughput) or 7% (latency), or inside the spread." in text
    chances = [row.off_by_chance for point in found for row in point.rows if row.metric in SHOWN]
    off = sum(not row.holds for point in found for row in point.rows if row.metric in SHOWN)
    told = f"{off} of {len(chances)} figures below are off. Were the measured runs drawn from the "
    assert f"{told}simulation themselves, {sum(chances):.1f} would be, by chance." in text
    assert text.count("% by chance |") == off
    assert "4 sent one after the other by each of as many clients" in text
    assert "the profile's own level is 0.900 without prompts, 1.100 with, and 50 µs more" in text
    assert "for each request that decodes and 0 µs more for a step with prompts." in text
    assert text.count("each at the level of its round") == 4
    rows = level_rows(found)
    assert [row[:2] for row in rows] == [
        ("request_rate=20", "1"), ("request_rate=20", "2"),
        ("request_rate=inf", "1"), ("request_rate=inf", "2"),
    ]  # fmt: skip
    assert float(rows[0][2]) == pytest.approx(1.29, abs=0.01)
    row_s = found[0].levels[0].run_level.lone_row_s
    assert {row[3] for row in rows[:2]} == {f"{row_s * 1e6:+.0f} µs"}
    data = to_data(found, spec)
    assert data["bars"] == {"throughput": 0.02, "latency": 0.07}
    told = data["points"][0]["metrics"][0]
    assert told["deviations"] == (told["simulated"] - told["measured"]) / told["deviation"]
    assert data["levels"]["by_load"]["request_rate=20"]["2"]["num_steps"] == int(rows[1][-1])
    told = data["provenance"]["cost_model"]["meta"]["level"]
    assert told["run_level_of_profile"] == {
        "decode_steps": 0.9, "prompt_steps": 1.1, "decode_row_s": 5e-5, "prompt_step_s": 0.0,
        "lone_row_s": 0.0,
    }  # fmt: skip
    assert told["times_as_long_as_profile"]["decode_steps"] == pytest.approx(1.3, abs=0.05)
    plain_spec = spec_of(profile, real={"repeats": 2})
    plain = comparison.compare(plain_spec, check=False)
    assert "level" not in markdown(plain, plain_spec)
    assert "by chance" not in markdown(plain, plain_spec)
    assert "levels" not in to_data(plain, plain_spec)


@pytest.mark.parametrize("scatters", [False, True])
@pytest.mark.parametrize("has_levels", [False, True])
@pytest.mark.parametrize("is_checked", [False, True])
def test_point_is_held_against_its_own_runs_levels_and_arrivals(
    monkeypatch, profile, scatters, has_levels, is_checked
):
    """Measured in the rounds 2 and 0, in this order; every part is told by what it was given."""
    told, priced = [], []

    def ran(spec, record):
        priced.append((spec.backend, spec.cost_model.model_dump().get("scatters")))
        record.append("simulated step")
        columns = {"id": [7, 4], "arrival_ns": [70, 40], "queued_ns": [71, 41]}
        return SimpleNamespace(requests={name: np.array(some) for name, some in columns.items()})

    def simulated_at(level, spec):
        return level, spec.backend, spec.cost_model.model_dump().get("draw")

    stand_ins = {
        "_DRAWS": 3,
        "run": ran,
        "make_cost_model": lambda spec: SimpleNamespace(step_spread="some" if scatters else None),
        "simulated_at": simulated_at,
        "at_level": lambda model, level: level,
        "first_difference": lambda own, simulated: SimpleNamespace(
            explain=lambda *given: (own, simulated, given)
        ),
        "teacher_forced": lambda steps, level: (
            np.array([len(steps), 0 if level is None else level.num_steps]),
            np.array([10 * len(steps), -1]),
        ),
        "compare_runs": lambda *given, **bars: (*given, bars),
        "step_errors": lambda predicted, measured: (predicted.tolist(), measured.tolist()),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(comparison, name, stand_in)
    sweep = {"policy": ["fcfs", "prefill_first"], "workload.request_rate": [20]}
    bars = {"throughput_bar": 0.06, "latency_bar": 0.07}
    spec = spec_of(profile, scatters=True, sweep=sweep, real={"clock": "virtual", **bars})
    point = comparison.points(spec)[1]
    measured = {
        2: MeasuredRun("result 2", ["a", "b", "c"], "here"),
        0: MeasuredRun("result 0", ["d"], "here"),
    }
    levels = {n: SimpleNamespace(num_steps=100 + n) for n in range(3)} if has_levels else {}
    checked = MeasuredRun("checked", ["e"], "here") if is_checked else None
    found = comparison._compared(point, measured, checked, levels, 31, told.append)
    assert told == [f"simulating {point.label}"]
    assert priced == [("sim", False)]
    at = [levels[2], levels[0]] if has_levels else [None, None]
    if scatters:
        simulated = [(at[0], "sim", 0), (at[1], "sim", 1), (at[0], "sim", 2)]
    else:
        simulated = [(level, "sim", None) for level in at]
    if scatters or has_levels:
        assert found.rows == (point.label, ["result 2", "result 0"], simulated, 31, bars)
        assert found.simulated == simulated[0]
        assert found.num_simulated == len(simulated)
    else:
        assert found.num_simulated == 1
        assert found.simulated.requests["id"].tolist() == [7, 4]
        kept = ["result 2", "result 0"]
        assert found.rows == (point.label, kept, [found.simulated], 31, bars)
    assert (found.label, found.policy, found.load) == (
        point.label,
        "prefill_first",
        "request_rate=20",
    )
    assert (found.num_runs, found.is_checked) == (2, is_checked)
    steps = ["simulated step"]
    assert found.modelled_difference == ((["e"], steps, ()) if is_checked else None)
    assert found.measured_difference == (["a", "b", "c"], steps, ({7: 70, 4: 40},))
    assert found.measured == "result 2"
    predicted = [3, 102, 1, 100] if has_levels else [3, 0, 1, 0]
    assert found.predicted_ns.tolist() == predicted
    assert found.measured_ns.tolist() == [30, -1, 10, -1]
    assert found.steps == (predicted, [30, -1, 10, -1])
    assert found.levels == ({2: levels[2], 0: levels[0]} if has_levels else {})


def test_level_is_told_with_its_policy_its_requests_and_the_steps_that_are_left_out(monkeypatch):
    monkeypatch.setattr(comparison_files, "SETTLING_STEPS", 77)
    monkeypatch.setattr(comparison_files, "LEVEL_POLICY", "some_policy")
    told = comparison_files.level_told(make_spec(SPEC))
    assert "were served by some_policy, 4 sent one after the other by each of as many" in told
    assert "Their steps, but for the first 77 of each, in which the engine settles" in told


def test_level_steps_are_kept_with_their_run(monkeypatch, tmp_path, profile):
    monkeypatch.setattr(measured_runs, "kernels", lambda *about: "some")
    spec = make_spec(without_sweep(cost_model={"profile": profile}, backend="real"))
    steps = []
    result = run(spec.model_copy(update={"backend": "sim"}), record=steps)
    result.provenance["real"] = {"estimates": 0}
    kept = MeasuredRuns(tmp_path / "kept")
    kept.keep(spec, 0, MeasuredRun(result, steps, "here", steps[5:9]))
    kept.keep(spec, 1, MeasuredRun(result, steps, "here"))
    assert kept.find(spec, 0).level_steps == steps[5:9]
    assert kept.find(spec, 1).level_steps == []
    alone = spec.model_copy(
        update={"real": spec.real.model_copy(update={"level_requests_per_client": None})}
    )
    assert run_identity(alone) != run_identity(spec)
    assert kept.find(alone, 0) is None


@pytest.mark.slow
def test_two_level_runs_go_before_a_measured_run_and_one_after_it(monkeypatch, profile):
    order = []

    def served(spec, load, number):
        order.append((load, number))
        return [number]

    monkeypatch.setattr(measured_runs, "serve_level_requests", served)
    monkeypatch.setattr(measured_runs, "run", lambda spec, record: order.append("run"))
    monkeypatch.setattr(measured_runs, "machine_name", lambda device: "here")
    spec = make_spec(without_sweep(cost_model={"profile": profile}))
    load = LevelLoad((1, 2, 3), 50.0)
    assert measured_runs.measure(spec, 2, load).level_steps == [6, 7, 8]
    assert order == [(load, 6), (load, 7), "run", (load, 8)]
    order.clear()
    assert measured_runs.measure(spec, 2).level_steps == []
    assert order == ["run"]


@pytest.mark.parametrize(("kind", "is_part"), [("fit.json", False), ("table.csv", True)])
def test_cost_model_is_what_it_is_read_from_and_no_figure_beside_a_fit(tmp_path, kind, is_part):
    def told():
        spec = SimpleNamespace(
            to_data=lambda: {"cost_model": {"name": "fitted", "profile": str(tmp_path)}},
            cost_model=SimpleNamespace(profile=str(tmp_path)),
        )
        return measured_runs._cost_model_hash(spec)

    (tmp_path / kind).write_text("1")
    (tmp_path / "meta.json").write_text("{}")
    first = told()
    assert told() == first
    (tmp_path / "figure.svg").write_text("for people")
    assert (told() != first) is is_part
    (tmp_path / "figure.svg").unlink()
    (tmp_path / kind).write_text("2")
    assert told() != first


def test_point_scatters_by_the_draw_that_is_asked_for_whatever_it_says_itself(profile):
    for own in (False, True):
        spec = make_spec(
            without_sweep(cost_model={"profile": profile, "scatters": own, "allow_mismatch": True})
        )
        for scatters, draw in ((False, 0), (True, 0), (True, 4)):
            found = comparison._scattering(spec, scatters, draw)
            said = {
                "profile": profile, "allow_mismatch": True, "scatters": scatters, "draw": draw,
            }  # fmt: skip
            told = found.cost_model.model_dump(exclude_none=True)
            assert {key: told[key] for key in said} == said
            assert found.model_copy(update={"cost_model": spec.cost_model}) == spec
    plain = make_spec(without_sweep())
    assert comparison._scattering(plain, True, 4) is plain


@pytest.mark.parametrize(
    ("clock", "estimates", "depends"),
    [
        ("virtual", 0, False), ("virtual", 3, True), ("reference", 0, True), ("reference", 3, True),
    ],
)  # fmt: skip
def test_measured_run_depends_on_its_cost_model_where_the_clock_or_the_policy_goes_by_it(
    monkeypatch, tmp_path, profile, clock, estimates, depends
):
    monkeypatch.setattr(measured_runs, "kernels", lambda backend, device: f"{backend} {device}")
    written = []
    result = SimpleNamespace(
        provenance={"real": {"estimates": estimates}},
        save=lambda folder: written.append(folder) or folder.mkdir(parents=True),
    )
    spec = make_spec(
        without_sweep(cost_model={"profile": profile}, backend="real", real={"clock": clock})
    )
    kept = MeasuredRuns(tmp_path / "kept")
    step = RecordedStep(5, {3: 1, 4: 7}, (9,), BatchShape(1, 5, 5, ((7, 2),)), 11, 2)
    other = step._replace(start_ns=6)
    kept.keep(spec, 4, MeasuredRun(result, [step], "here", [other]))
    (folder,) = (path for path in (tmp_path / "kept").iterdir() if path.is_dir())
    assert folder == kept._folder_of(spec, 4)
    assert folder.name == f"fcfs-{run_identity(spec)[:16]}-repeat-4"
    assert json.loads((folder / "run.json").read_text()) == {
        "machine": "here", "kernels": "real cpu",
        "cost_model": measured_runs._cost_model_hash(spec) if depends else None,
    }  # fmt: skip
    assert measured_runs._read_steps(folder / "plan_log.jsonl.gz") == [step]
    assert measured_runs._read_steps(folder / "level_log.jsonl.gz") == [other]
    assert kept.describe() == f"{tmp_path / 'kept'} holds 1 measured runs of kernels real cpu"


@pytest.mark.parametrize("changed", ["ours", "vllm"])
@pytest.mark.parametrize("backend", ["real", "vllm"])
def test_run_is_another_once_what_serves_it_is_another_and_no_other_does(
    monkeypatch, backend, changed
):
    releases, asked = {"ours": 1, "vllm": 1}, []

    def kernels(of, device):
        asked.append((of, device))
        return str(releases["vllm" if of == "vllm" else "ours"])

    monkeypatch.setattr(measured_runs, "kernels", kernels)
    spec = make_spec(without_sweep(real={"device": "cuda:1"}))
    spec = spec.model_copy(update={"backend": backend})
    before = run_identity(spec)
    releases[changed] += 1
    assert (run_identity(spec) != before) is ((backend == "vllm") is (changed == "vllm"))
    assert asked == [(backend, "cuda:1")] * 2


def test_comparison_is_written_as_data_as_text_and_as_three_figures(monkeypatch, tmp_path):
    spec = SimpleNamespace(name="the name")
    for name in ("step_figure", "cdf_figure", "frontier_figure"):
        monkeypatch.setattr(
            compare_figures, name, lambda found, title, name=name: (name, found, title)
        )
    saved = []
    monkeypatch.setattr(style, "save", lambda *given: saved.append(given))
    monkeypatch.setattr(comparison_files, "to_data", lambda found, spec: {"of": [*found]})
    monkeypatch.setattr(comparison_files, "markdown", lambda found, spec: f"text {found}\n")
    comparison_files.write(["a"], spec, tmp_path)
    assert saved == [
        (("step_figure", ["a"], "the name"), tmp_path / "steps"),
        (("cdf_figure", ["a"], "the name"), tmp_path / "latency_cdf"),
        (("frontier_figure", ["a"], "the name"), tmp_path / "throughput_p99"),
    ]
    assert json.loads((tmp_path / "comparison.json").read_text()) == {"of": ["a"]}
    assert (tmp_path / "comparison.md").read_text() == "text ['a']\n"


def test_levels_are_of_the_steps_of_all_policies_of_a_load_by_round_and_by_its_own_profile(
    monkeypatch,
):
    def point(policy, rate):
        settings = {"policy": policy, "workload.request_rate": rate}
        return SimpleNamespace(settings=settings, of=f"{policy} {rate}")

    def measured(*rounds):
        return {k: SimpleNamespace(level_steps=steps) for k, steps in enumerate(rounds)}

    monkeypatch.setattr(comparison, "_profile_of", lambda point: f"profile of {point.of}")
    monkeypatch.setattr(comparison, "levels_of", lambda *given: given)
    todo = [point("fcfs", "1"), point("fcfs", "2"), point("sjf", "2"), point("sjf", "3")]
    runs = [measured([1], [2]), measured([3], []), measured([4, 5], [6]), measured([], [])]
    assert comparison._levels(todo, runs) == {
        "request_rate=1": ("profile of fcfs 1", {0: [1], 1: [2]}),
        "request_rate=2": ("profile of fcfs 2", {0: [3, 4, 5], 1: [6]}),
    }
