import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.colors import to_hex
from typer.testing import CliRunner

from schedlab.experiments.commands.app import app
from schedlab.experiments.comparing import forced_replay as forced
from schedlab.experiments.comparing import recorded_replay
from schedlab.experiments.comparing.by_step_figures import step_time_figure
from schedlab.experiments.comparing.forced_replay import (
    _KINDS,
    StepExcess,
    _parts,
    forced_replay,
)
from schedlab.experiments.comparing.recorded_engines import RecordedRouter
from schedlab.experiments.comparing.recorded_replay import Contradiction, _Clock
from schedlab.experiments.comparing.validate import timeline
from schedlab.experiments.comparing.vllm_recording import Timeline, read_recording
from schedlab.experiments.figures.style import LOOKS
from schedlab.experiments.running.backend import SimBackend, Task
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import load_spec, make_spec
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.roofline import RooflineCostModel
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.models import model
from schedlab.sim.request import Arrival, Request, Turn
from tests.data_folder import data_folder

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
SWITCHES = {"max_num_seqs": 12, "async_scheduling": True, "arrivals_between_steps": True}


def workload(path, n=60):
    """Write requests that come in bursts, more than there are seats for."""
    rng = np.random.default_rng(3)
    with path.open("w") as file:
        for i in range(n):
            line = {
                "input_toks": int(rng.integers(20, 900)),
                "output_toks": int(rng.integers(5, 60)),
                "arrival_time_ns": int(i * 40e6 + rng.integers(0, 200e6) * (i % 7 == 0)),
            }
            file.write(json.dumps(line) + "\n")
    rows = sorted(path.read_text().splitlines(), key=lambda r: json.loads(r)["arrival_time_ns"])
    path.write_text("\n".join(rows) + "\n")


def record(result, path, shift_s=1000.0, scheduled=True):
    """Write what a run of ours would have looked like to a client with another clock."""
    seen, requests = timeline(result), result.requests
    with path.open("w") as file:
        for i in range(len(seen.queued_s)):
            row = {
                "request_id": f"bench-{i}",
                "input_toks": int(seen.prompt_tokens[i]),
                "output_toks": int(seen.output_tokens[i]),
                "queued_ts": shift_s + float(seen.queued_s[i]),
                "first_token_ts": shift_s + float(seen.first_token_s[i]),
                "last_token_ts": shift_s + float(seen.last_token_s[i]),
            }
            if scheduled:
                row["scheduled_ts"] = shift_s + float(requests["first_scheduled_ns"][i]) / 1e9
            file.write(json.dumps(row) + "\n")


def experiment(folder, **engine):
    return make_spec(
        {
            "model": "llama-3-8b",
            "hardware": "a100",
            "cost_model": "roofline",
            "engine": SWITCHES | engine,
            "workload": {"trace": str(folder / "trace.jsonl"), "format": "llmservingsim"},
            "validation": {"measured": str(folder / "requests.jsonl")},
        }
    )


@pytest.fixture(params=[True, False], ids=["scheduled", "without scheduled"])
def folder(tmp_path, request):
    workload(tmp_path / "trace.jsonl")
    truth = {"base_s": 0.0006, "per_prefill_step_s": 0.004}
    spec = experiment(tmp_path, scheduling_overhead=truth)
    record(run(spec), tmp_path / "requests.jsonl", scheduled=request.param)
    return tmp_path


def test_forced_replay_finds_what_the_cost_model_leaves_out(folder):
    found = forced_replay(experiment(folder))
    assert found.contradictions == []
    by_kind = {d.kind: d for d in found.differences}
    decodes = by_kind["9-16 decodes"]
    assert decodes.count > 100
    assert decodes.mean_ms == pytest.approx(0.6, abs=0.05)
    assert by_kind["a step with prompts"].mean_ms == pytest.approx(4.6, abs=0.3)
    assert by_kind["each further prompt in it"].mean_ms == pytest.approx(0, abs=0.3)


def test_forced_replay_of_the_right_cost_model_finds_no_difference(folder):
    truth = {"base_s": 0.0006, "per_prefill_step_s": 0.004}
    found = forced_replay(experiment(folder, scheduling_overhead=truth))
    assert found.contradictions == []
    assert all(abs(d.mean_ms) < 0.1 for d in found.differences)
    assert sum(step.num_times for step in found.steps) == 2 * 60
    stretches = found.stretches()
    assert len(stretches) == sum(step.num_times > 0 for step in found.steps) - 1
    assert stretches[:, 0] == pytest.approx(stretches[:, 1], rel=0.02)


def test_each_round_is_corrected_by_the_latest_errors_until_they_stay(monkeypatch):
    errors_ms = iter([1.0, 3.0, 2.0, 2.0, 9.0])
    corrections = []

    def replay(spec, recording, error_ms):
        corrections.append(float(error_ms.args[0][0]))
        return [], [], 0, None

    def fit(steps, parts):
        return np.full(len(_KINDS), next(errors_ms)), None, None

    monkeypatch.setattr(forced, "recording_of", lambda spec: None)
    monkeypatch.setattr(forced, "replay", replay)
    monkeypatch.setattr(forced, "_fit", fit)
    monkeypatch.setattr(forced, "_differences", lambda *_: [])
    spec = make_spec({"name": "forced", "workload": {"trace": "azure-conv", "num_requests": 1}})
    assert forced.forced_replay(spec).contradictions == []
    assert corrections == [0.0, 1.0, 3.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong", [{"async_scheduling": False}, {"max_num_seqs": 11}, {"max_num_batched_tokens": 512}]
)
def test_forced_replay_of_other_decisions_contradicts_the_recording(folder, wrong):
    found = forced_replay(experiment(folder, **wrong))
    assert len(found.contradictions) > 5
    assert "contradict" in found.lines()[0]
    assert "were recorded at" in found.lines()[1]


# -- several engines ---------------------------------------------------------------------------


LIKE_VLLM = {"base_s": 0.0006, "per_prefill_step_s": 0.004}


def stamp(path, result, apart_s=0.0004):
    """Stamp tokens a little later on each further engine, as engines of one joint step do."""
    engine = result.requests["engine"].astype(int)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, place in zip(rows, engine.tolist(), strict=True):
        for key in ("first_token_ts", "last_token_ts"):
            row[key] += apart_s * place
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return engine


def bursts(path, n=120):
    """Write requests that come ten at a time and whose answers often end together."""
    rng = np.random.default_rng(5)
    with path.open("w") as file:
        for i in range(n):
            line = {
                "input_toks": int(rng.integers(20, 300)),
                "output_toks": int(rng.choice([8, 16, 32])),
                "arrival_time_ns": i // 10 * 200_000_000,
            }
            file.write(json.dumps(line) + "\n")


@pytest.fixture
def engines(tmp_path):
    """A recording of two engines in lockstep, and where its requests were."""
    bursts(tmp_path / "trace.jsonl")
    setting = {"data_parallel_size": 2, "data_parallel_lockstep": True, "max_num_seqs": 4}
    result = run(experiment(tmp_path, scheduling_overhead=LIKE_VLLM, **setting))
    record(result, tmp_path / "requests.jsonl")
    place = stamp(tmp_path / "requests.jsonl", result)
    return tmp_path, setting, place


def test_engines_are_told_apart_by_the_times_of_their_tokens(engines):
    folder, _, place = engines
    router = RecordedRouter(read_recording(folder / "requests.jsonl"), 2)
    routed = []
    for i in range(120):
        # A router that would send everything to the engine where the request was not.
        loads = [SimpleNamespace(num_waiting=k == place[i], num_running=0) for k in range(2)]
        before = router.num_asked
        engine = router.route(SimpleNamespace(id=i), loads)
        if router.num_asked == before:
            routed.append(engine == place[i])
    assert router.num_doubtful == 0
    assert len(routed) > 60
    # Whom the router placed wrongly has taken along all who were with it, and none else.
    assert not any(routed)


@pytest.mark.slow
def test_forced_replay_of_several_engines_finds_decisions_and_errors(engines):
    folder, setting, _ = engines
    found = forced_replay(experiment(folder, **setting))
    assert found.contradictions == []
    assert sum(step.num_times for step in found.steps) == 240
    by_kind = {d.kind: d for d in found.differences}
    assert by_kind["1-4 decodes"].mean_ms == pytest.approx(0.6, abs=0.15)
    assert by_kind["a step with prompts"].mean_ms == pytest.approx(4.6, abs=0.6)
    assert "0 pairs do not fit" in found.lines()[1]
    assert found.to_data()["requests_placed_by_load"] < 60


def test_forced_replay_of_engines_on_their_own_is_refused(engines):
    folder, setting, _ = engines
    with pytest.raises(SpecError, match="data_parallel_lockstep: engines on their own"):
        forced_replay(experiment(folder, **setting | {"data_parallel_lockstep": False}))


@pytest.mark.slow
def test_forced_replay_of_too_many_engines_contradicts_the_recording(tmp_path):
    bursts(tmp_path / "trace.jsonl")
    setting = {"data_parallel_size": 2, "data_parallel_lockstep": True, "max_num_seqs": 4}
    result = run(experiment(tmp_path, **setting))
    record(result, tmp_path / "requests.jsonl")
    stamp(tmp_path / "requests.jsonl", result)
    wrong = forced_replay(experiment(tmp_path, **setting | {"data_parallel_size": 3}))
    assert len(wrong.contradictions) > 5


@pytest.mark.parametrize(("num_engines", "doubtful"), [(2, 1), (3, 0)])
def test_three_times_of_one_joint_step_need_three_engines(num_engines, doubtful):
    first, last = np.array([1.0, 1.0005, 1.001]), np.array([2.0, 3.0, 4.0])
    recording = Timeline(*[np.full(3, 4)] * 2, first - 0.5, first, last)
    router = RecordedRouter(recording, num_engines)
    idle = [SimpleNamespace(num_waiting=0, num_running=0)] * num_engines
    engines = [router.route(SimpleNamespace(id=i), idle) for i in range(3)]
    assert router.num_doubtful == doubtful
    assert len(set(engines)) == num_engines


def test_forced_replay_without_a_recording_is_refused():
    with pytest.raises(SpecError, match="validation: is required"):
        forced_replay(make_spec({"workload": {"trace": "azure-conv", "num_requests": 3}}))


@pytest.mark.slow
@pytest.mark.parametrize("folder", [True], ids=["scheduled"], indirect=True)
def test_validate_by_step_prints_decisions_and_differences(folder, tmp_path):
    spec = tmp_path / "spec.yaml"
    spec.write_text(json.dumps(experiment(folder).to_data()))
    told = CliRunner().invoke(app, ["validate", str(spec), "--by-step"])
    assert told.exit_code == 0, told.output
    assert "a step with prompts" in told.output
    assert "0 of these steps contradict the recording" in told.output
    told = CliRunner().invoke(app, ["validate", str(spec), "--by-step", "--json"])
    data = json.loads(told.output)
    assert data["contradictions"] == []
    assert data["recorded_times"] == 120
    drawn = ["validate", str(spec), "--by-step", "--figure", str(tmp_path / "drawn.png")]
    assert CliRunner().invoke(app, drawn).exit_code == 0
    assert {p.name for p in tmp_path.glob("drawn.*")} == {"drawn.png", "drawn.svg"}
    assert CliRunner().invoke(app, ["validate", str(spec), *drawn[3:]]).exit_code != 0
    both = ["validate", str(spec), "--by-step", "--fitted-on", str(spec)]
    assert CliRunner().invoke(app, both).exit_code != 0


@pytest.fixture(scope="module")
def replayed(profiles):
    """A recorded run of vLLM replayed, once a setting."""
    first_step_s = {"rtx4090": 0.46, "rtxpro6000": 0.067}
    known = {}

    def replay(name, *overrides):
        if (name, overrides) not in known:
            with pytest.MonkeyPatch.context() as environment:
                environment.setenv("SCHEDLAB_DATA", str(data_folder()))
                spec = load_spec(
                    EXPERIMENTS / f"validate-{name}-vllm.yaml",
                    [
                        f"cost_model={{profile: {profiles / name}, separate_prefills: true}}",
                        f"engine.scheduling_overhead.first_step_s={first_step_s[name]}",
                        *overrides,
                    ],
                )
                known[name, overrides] = forced_replay(spec)
        return known[name, overrides]

    return replay


@pytest.mark.slow
def test_every_decision_of_a_recorded_vllm_run_is_reproduced(replayed):
    found = replayed("rtxpro6000")
    assert found.contradictions == []
    assert sum(step.num_times > 0 for step in found.steps) > 450


@pytest.mark.slow
def test_decisions_of_a_memory_bound_vllm_run_are_nearly_all_reproduced(replayed):
    found = replayed("rtx4090")
    assert len(found.contradictions) <= 15
    assert sum(step.num_times > 0 for step in found.steps) > 450
    assert found.num_preemptions == 194


def further_prompt(found):
    return next(d for d in found.differences if d.kind == "each further prompt in it")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rtx4090", "rtxpro6000"])
def test_prompts_priced_one_by_one_cost_what_they_cost_in_real_steps(replayed, name):
    apart = further_prompt(replayed(name))
    assert abs(apart.mean_ms) < 2 * apart.standard_error_ms


@pytest.mark.slow
def test_prompts_priced_as_one_cost_less_than_they_do_in_real_steps(replayed):
    pooled = further_prompt(replayed("rtxpro6000", "cost_model.separate_prefills=false"))
    assert pooled.mean_ms < -5 * pooled.standard_error_ms


@pytest.mark.parametrize(
    ("num_decodes", "kind"),
    [
        (1, "1-4"),
        (4, "1-4"),
        (5, "5-8"),
        (128, "121-128"),
        (129, "129-160"),
        (513, "more than 512"),
    ],
)
def test_step_of_decodes_is_of_the_kind_that_ends_with_their_number(num_decodes, kind):
    parts = _parts(BatchShape(num_decodes, 0, 0))
    assert parts.sum() == 1
    assert _KINDS[int(parts.argmax())] == f"{kind} decodes"


@pytest.fixture
def clock():
    """The clock of a recording without boundaries but its start."""
    recording = Timeline(*np.array([[9], [3], [0.0], [1.0], [1.0]]))
    return _Clock(recording, lambda shape: 0.0)


MS = 1_000_000
DECODES = BatchShape(2, 20, 10)


@pytest.mark.parametrize(
    ("at_ns", "within_ns", "found_ns"),
    [
        (29, 1, 30), (31, 1, 30), (24, 4, 24), (24, 5, 24), (24, 6, 30), (19, 9, 10),
        (9, 1, 10), (9, 0, 9), (51, 1, 50), (52, 1, 52), (50, 0, 50),
    ],
)  # fmt: skip
def test_step_without_a_stamp_ends_at_the_nearest_boundary_if_that_is_near(
    clock, at_ns, within_ns, found_ns
):
    clock._boundaries_ns = [10, 30, 50]
    assert clock._boundary_near(at_ns, within_ns) == found_ns
    clock._boundaries_ns = []
    assert clock._boundary_near(at_ns, within_ns) == at_ns


@pytest.mark.parametrize(
    ("stamps_ms", "end_ms"), [([10.0, 10.5, 12.0], 10.5), ([10.0, 12.0], 12.0), ([11.0], 11.0)]
)
def test_recorded_step_ends_with_the_middle_one_of_its_stamps(clock, stamps_ms, end_ms):
    ended = [(i, int(ms * MS)) for i, ms in enumerate(stamps_ms)]
    assert clock.duration_ns(2 * MS, 9 * MS, DECODES, ended[::-1]) == (end_ms - 2) * MS
    assert clock.contradictions == []
    late = [(0, 20 * MS), (1, 23 * MS + 1)]
    clock.duration_ns(12 * MS, 9 * MS, DECODES, late)
    assert [one.requests for one in clock.contradictions] == [(0, 1)], "3 ms is all a stamp takes"


@pytest.mark.parametrize(
    ("end_ms", "doubtful"), [(20, False), (19, True), (40, False), (60, False), (61, True)]
)
def test_all_steps_since_a_recorded_end_are_held_against_what_was_predicted(
    clock, end_ms, doubtful
):
    """Three steps of 10 ms and a fourth, recorded: half of 40 ms to one and a half of them."""
    clock.duration_ns(0, 10 * MS, DECODES, [(0, 10 * MS)])
    now_ns = 10 * MS
    for _ in range(3):
        now_ns += clock.duration_ns(now_ns, 10 * MS, DECODES, [])
    assert now_ns == 40 * MS
    clock.duration_ns(now_ns, 10 * MS, DECODES, [(1, (10 + end_ms) * MS)])
    assert bool(clock.contradictions) == doubtful


def test_figure_of_steps_counts_the_stretches_that_lie_beyond_its_axis():
    shares = np.array([0.4, 0.55, 1.0, 1.8, 1.9])
    stretches = np.stack([10.0 * shares, np.full(5, 10.0), [0, 1, 0, 1, 0]], axis=1)
    found = SimpleNamespace(stretches=lambda: stretches, differences=())
    left = step_time_figure(found, "title").axes[0]
    assert [text.get_text() for text in left.texts] == ["3 of 5 outside"]


def test_figure_of_steps_has_each_stretch_and_the_error_of_each_kind_of_step():
    stretches = np.array([[8.0, 10.0, 0], [30.0, 20.0, 1], [50.0, 100.0, 0], [40.0, 40.0, 1]])
    differences = [
        StepExcess("5-8 decodes", 3, 1.0, 0.5, 0.1),
        StepExcess("more than 512 decodes", 3, 1.0, -0.25, 0.2),
        StepExcess("a step with prompts", 3, 1.0, 2.0, 0.4),
        StepExcess("100 decodes in it", 3, None, 9.0, 9.0),
    ]
    found = SimpleNamespace(stretches=lambda: stretches, differences=differences)
    figure = step_time_figure(found, "a run")
    left, right = figure.axes
    decodes, prompts, one = left.lines
    assert [line.get_label() for line in (decodes, prompts)] == ["decodes only", "with prompts"]
    assert decodes.get_xydata().tolist() == [[10.0, 0.8], [100.0, 0.5]]
    assert prompts.get_xydata().tolist() == [[20.0, 1.5], [40.0, 1.0]]
    assert [line.get_color() for line in (decodes, prompts)] == [LOOKS[0].color, LOOKS[1].color]
    assert [line.get_marker() for line in (decodes, prompts)] == [LOOKS[0].marker, LOOKS[1].marker]
    assert one.get_ydata() == [1, 1]
    assert (left.get_xscale(), left.get_ylim()) == ("log", (0.5, 1.5))
    assert len(left.texts) == 0, "shares at the very edges are inside"
    assert left.get_xlabel() == "predicted time between two recorded ends of steps (ms)"
    assert (left.get_ylabel(), left.get_title(loc="left") or left.get_title()) == (
        "recorded / predicted", "a run",
    )  # fmt: skip
    assert [text.get_text() for text in left.get_legend().get_texts()] == [
        "decodes only", "with prompts",
    ]  # fmt: skip
    # Decodes first, then prompts; parts of a step have no bar.
    assert [bar.get_height() for bar in right.patches] == [0.5, -0.25, 2.0]
    assert [to_hex(bar.get_facecolor()).upper() for bar in right.patches] == [
        LOOKS[0].color.upper(), LOOKS[0].color.upper(), LOOKS[1].color.upper(),
    ]  # fmt: skip
    (errors,) = right.collections
    assert [segment[:, 1].tolist() for segment in errors.get_segments()] == [
        pytest.approx(ends) for ends in ([0.4, 0.6], [-0.45, -0.05], [1.6, 2.4])
    ]
    ticks = [text.get_text() for text in right.get_xticklabels()]
    assert ticks == ["5-8", "more than 512", "prompts"]
    assert right.get_xlabel() == "decodes in a step; a step with prompts"
    assert right.get_ylabel() == "recorded - predicted (ms)"


def replayed_steps(*rows):
    """Return steps of (recorded ms, predicted ms, decodes, chunks, recorded times)."""
    return [
        forced.ReplayedStep(0, ms * MS, expected * MS, BatchShape(n, 0, 0, chunks), times)
        for ms, expected, n, chunks, times in rows
    ]


STEPS = (
    (5, 5, 2, (), 0), (6, 5, 2, (), 2), (7, 5, 2, (), 0), (20, 9, 1, ((30, 0),), 1),
    (8, 6, 7, (), 3), (4, 4, 2, (), 0),
)  # fmt: skip


def test_stretches_go_from_behind_one_recorded_end_to_the_next():
    found = forced.ForcedReplay(replayed_steps(*STEPS), [], [], 0)
    # What is before the first recorded end and behind the last is in none.
    assert found.stretches().tolist() == [[27.0, 14.0, 1.0], [8.0, 6.0, 0.0]]
    with pytest.raises(SpecError, match="too few times to tell steps apart"):
        forced.ForcedReplay(replayed_steps(*STEPS[:3]), [], [], 0).stretches()


def test_parts_of_a_step_with_prompts_are_itself_more_prompts_and_tokens_and_decodes():
    parts = _parts(BatchShape(50, 0, 0, ((300, 0), (400, 9), (800, 0))))
    assert parts[-4:].tolist() == [1, 2, 1.5, 0.5]
    assert parts[:-4].sum() == 0
    assert _KINDS[-4:] == (
        "a step with prompts", "each further prompt in it", "1,000 prompt tokens in it",
        "100 decodes in it",
    )  # fmt: skip
    correction_ms = np.zeros(len(_KINDS))
    correction_ms[-4:] = 10, 1, 100, 1000
    shape = BatchShape(50, 0, 0, ((300, 0), (400, 9), (800, 0)))
    assert forced._error_ms(correction_ms, shape) == 10 + 2 + 150 + 500


def test_error_of_each_kind_of_step_is_found_and_that_of_hardly_any_drawn_to_zero():
    kinds = {2: 3, 7: 1}
    rows = [(10 + kinds[n], 10, n, (), 1) for n in [2, 7] * 30]
    steps = replayed_steps(*rows, (30, 10, 40, (), 1))
    parts = np.array([_parts(step.shape) for step in steps])
    mean_ms, error_ms, counts = forced._fit(steps, parts)
    few, many, once = 0, 1, _KINDS.index("33-40 decodes")
    # The first end begins the first stretch.
    assert counts[[few, many, once]].tolist() == [29, 30, 1]
    assert mean_ms[[few, many]] == pytest.approx([3, 1], abs=0.02)
    # One step that took 20 ms longer, with a prior of 3 ms and the least scale of 0.1 ms; weighed
    # as an outlier it is believed only in part.
    assert 15 < mean_ms[once] < 20
    assert error_ms[few] == pytest.approx(0.1 / 29**0.5, rel=0.02)
    assert error_ms[0] < error_ms[once] < error_ms[2] == pytest.approx(3.0)
    found = forced._differences(steps, parts, mean_ms, error_ms, counts)
    assert [(one.kind, one.count, one.predicted_ms) for one in found] == [
        ("1-4 decodes", 29.0, 10.0), ("5-8 decodes", 30.0, 10.0), ("33-40 decodes", 1.0, 10.0),
    ]  # fmt: skip
    assert [one.mean_ms for one in found] == [mean_ms[i] for i in (few, many, once)]
    assert [one.standard_error_ms for one in found] == [error_ms[i] for i in (few, many, once)]


def test_parts_of_steps_are_told_without_a_prediction():
    steps = replayed_steps(*STEPS)
    parts = np.array([_parts(step.shape) for step in steps])
    counts = parts.sum(axis=0)
    numbers = np.arange(len(_KINDS), dtype=float)
    found = forced._differences(steps, parts, numbers, -numbers, counts)
    last = len(_KINDS) - 4
    assert [(one.kind, one.predicted_ms, one.mean_ms) for one in found] == [
        ("1-4 decodes", (5 + 5 + 5 + 4) / 4, 0), ("5-8 decodes", 6.0, 1),
        ("a step with prompts", 9.0, last), ("1,000 prompt tokens in it", None, last + 2),
        ("100 decodes in it", None, last + 3),
    ]  # fmt: skip
    assert [one.count for one in found] == [4, 1, 1, 0.03, 0.01]


@pytest.mark.parametrize("several", [True, False])
def test_forced_replay_is_told_as_rows_lines_and_data(several):
    contradictions = [
        Contradiction(0.0125, (3, 17), (1.5, 2.25)), *[Contradiction(1.0, (4,), (2.0,))] * 3
    ]  # fmt: skip
    differences = [
        StepExcess("1-4 decodes", 1234.0, 5.678, 0.123, 0.0451),
        StepExcess("100 decodes in it", 1234.56, None, -1.0, 2.0),
    ]
    router = SimpleNamespace(num_asked=1500, num_doubtful=2000) if several else None
    found = forced.ForcedReplay(replayed_steps(*STEPS), contradictions, differences, 6, router)
    assert found.rows() == [
        ("1-4 decodes", "1,234", "5.68", "+0.12 ± 0.05"),
        ("100 decodes in it", "1,234.6", "", "-1.00 ± 2.00"),
    ]
    engines = [
        "engines: vLLM's router placed 1,500 requests, the others follow from equal times; 2,000 "
        "pairs do not fit"
    ]
    one = "  step at 1.000 s: tokens of requests 4 were recorded at 2.000 s"
    assert found.lines() == [
        "decisions: 6 recorded times fall on 3 of 6 steps; 4 of these steps contradict the "
        "recording; preemptions 6",
        *(engines if several else []),
        "  step at 0.013 s: tokens of requests 3, 17 were recorded at 1.500, 2.250 s",
        one, one,
    ]  # fmt: skip
    data = found.to_data()
    assert data.pop("contradictions")[0] == {
        "start_s": 0.0125, "requests": (3, 17), "recorded_s": (1.5, 2.25)
    }  # fmt: skip
    assert data.pop("differences")[1] == {
        "kind": "100 decodes in it", "count": 1234.56, "predicted_ms": None, "mean_ms": -1.0,
        "standard_error_ms": 2.0,
    }  # fmt: skip
    routed = {"requests_placed_by_load": 1500, "doubtful_pairs": 2000} if several else {}
    assert data == {"num_steps": 6, "num_preemptions": 6, "recorded_times": 6, **routed}


def test_clock_of_a_recording_counts_from_its_first_request_and_what_is_left_by_its_errors():
    recording = Timeline(
        *np.array([[9, 9], [3, 3]]), np.array([5.0, 5.25]), np.array([5.5, 6.0]),
        np.array([7.0, 8.0]), np.array([5.125, 5.375]),
    )  # fmt: skip
    errors = {2: 4.0, 3: -50.0}
    clock = _Clock(recording, lambda shape: errors[shape.num_decodes])
    assert clock._boundaries_ns == [0, 125 * MS, 250 * MS, 375 * MS]
    states = [
        SimpleNamespace(id=i, num_uncomputed_tokens=left, num_output_tokens=out)
        for i, left, out in ((0, 7, 0), (1, 7, 0), (1, 7, 2))
    ]
    plan = SimpleNamespace(chunks=[(states[0], 7), (states[1], 6), (states[2], 7)])
    # The end of request 1; the first token of 0; a chunk that is not the last, and one anew.
    ended = clock.recorded(plan, [states[1]])
    assert ended == [(1, 3000 * MS), (0, 500 * MS)]
    steps = [
        (20 * MS, 10 * MS, BatchShape(2, 0, 0), []),  # 4 ms more than predicted
        (110 * MS, 10 * MS, BatchShape(2, 0, 0), []),  # 124 ms, and 125 is near
        (130 * MS, 10 * MS, BatchShape(3, 0, 0), []),  # less than nothing: no time at all
        (140 * MS, 30 * MS, BatchShape(2, 0, 0), [(0, 190 * MS)]),
        (190 * MS, 30 * MS, BatchShape(2, 0, 0), [(0, 190 * MS)]),
    ]
    took = [clock.duration_ns(*step) for step in steps]
    assert took == [14 * MS, 15 * MS, 1, 50 * MS, 1]
    assert [(one.start_ns, one.duration_ns, one.predicted_ns, one.num_times) for one in clock.steps
            ] == [(at, ns, priced, len(ended)) for (at, priced, _, ended), ns
                  in zip(steps, took, strict=True)]  # fmt: skip
    # 14 + 15 + 50 ms of 60 predicted; then none of 30.
    (late,) = clock.contradictions
    assert late == Contradiction(0.19, (0,), (0.19,))


@pytest.mark.parametrize("num_engines", [1, 2])
def test_requests_of_a_replay_come_a_stamp_before_they_were_recorded_as_queued(
    monkeypatch, num_engines
):
    recording = Timeline(
        *np.array([[9] * 3, [3] * 3]), np.array([5.0, 5.25, 5.0001]), np.array([6.0] * 3),
        np.array([7.0] * 3),
    )  # fmt: skip
    pricing = Pricing(RooflineCostModel(Deployment(model("llama-3-8b"), gpu("a100-80gb"))))
    backend = recorded_replay._Backend(pricing, recording, lambda shape: 0.0, num_engines)
    assert (backend.recorded is None) is (num_engines == 1)
    assert backend.describe() == {"clock": "recorded"}
    kinds = [SimpleNamespace(num_engines=num_engines)]
    monkeypatch.setattr(SimBackend, "executors", lambda self, kinds: "those of a simulation")
    executors = backend.executors(kinds)
    if num_engines == 1:
        (executor,) = executors
        assert executor._clock is backend.clock
    else:
        assert executors == "those of a simulation"
    driven = []
    monkeypatch.setattr(SimBackend, "drive", lambda self, *given: driven.append(given) or "log")
    turns = (None, Turn((0,)), None)
    arrivals = [Arrival(Request(i, 99, 9, 3), 3, 77, turn) for i, turn in enumerate(turns)]
    task = Task(None, kinds, arrivals)
    assert backend.drive(["engine"], task, "new") == "log"
    ((engines, moved, new),) = driven
    assert (engines, new) == (["engine"], "new")
    assert [(one.request.id, one.request.arrival_ns, one.ready_ns, one.turn)
            for one in moved.arrivals] == [
        (0, 0, 0, None), (2, 0, 0, None), (1, 249_500_000, 249_500_000, None),
    ]  # fmt: skip


def test_joint_step_of_a_replay_ends_as_recorded_of_all_its_engines(monkeypatch):
    backend = recorded_replay._Backend.__new__(recorded_replay._Backend)
    asked = []
    backend.clock = SimpleNamespace(
        recorded=lambda plan, finished: [(plan, finished)],
        duration_ns=lambda *given: asked.append(given) or 123,
    )
    segments = [
        SimpleNamespace(plan=f"plan {i}", shape=f"shape {i}", start_ns=50 + i,
                        steps=SimpleNamespace(finished=f"finished {i}"))
        for i in range(3)
    ]  # fmt: skip
    monkeypatch.setattr(recorded_replay, "joint_steps_ns", lambda stepping, idle: [7, 9, len(idle)])
    assert backend._joint_step_ns([(None, one) for one in segments], [None]) == 123
    ended = [(f"plan {i}", f"finished {i}") for i in range(3)]
    assert asked == [(50, 9, "shape 1", ended)], "it is priced as the slowest"


def test_replay_tells_steps_contradictions_and_every_preemption(monkeypatch):
    asked = []
    spec = SimpleNamespace(engine=SimpleNamespace(data_parallel_size=3))
    result = SimpleNamespace(requests={"num_preemptions": np.array([0, 2, 1])})
    clock = SimpleNamespace(steps=["s"], contradictions=["c"])

    def backend(*given):
        asked.append(given)
        return SimpleNamespace(clock=clock, recorded="router")

    def run(spec, opened):
        opened("pricing")
        return result

    monkeypatch.setattr(recorded_replay, "_Backend", backend)
    monkeypatch.setattr(recorded_replay, "run", run)
    monkeypatch.setattr(recorded_replay, "timeline", lambda result: f"times of {len(vars(result))}")
    monkeypatch.setattr(recorded_replay, "check_same", lambda *given: asked.append(given))
    found = recorded_replay.replay(spec, "recording", "error")
    assert asked == [("pricing", "recording", "error", 3), ("recording", "times of 1", spec)]
    assert (found.steps, found.contradictions, found.num_preemptions) == (["s"], ["c"], 3)
    assert found.router == "router"


def test_engine_that_is_asked_for_by_a_recording_has_its_turn_as_if_it_had_been_chosen():
    """Requests 0 and 2 end together; after each, the turn is with the engine behind its own."""
    last = np.array([5.0, 6.0, 5.0, 9.0])
    recording = Timeline(*[np.full(4, 4)] * 2, last - 3, last - 1.5, last)
    router = RecordedRouter(recording, 3)
    idle = [SimpleNamespace(num_waiting=0, num_running=0)] * 3
    turns = []
    engines = []
    for i in range(4):
        engines.append(router.route(SimpleNamespace(id=i), idle))
        turns.append(router._vllm.turn)
    assert engines == [0, 1, 0, 1]
    assert turns == [1, 2, 1, 2]
    assert router.num_asked == 3


@pytest.mark.parametrize(
    ("contradictions", "means", "rounds", "best"),
    [
        ([2, 1, 1, 3], [9.0, 8.0, 7.0, 6.0], 4, 2),  # of equals the later one
        ([1, 2, 3], [9.0, 8.0, 8.005], 3, 0),
        ([2, 2], [9.0, 9.0], 2, 1),
        ([0], [0.0], 1, 0),  # nothing to correct
    ],
)
def test_forced_replay_goes_on_with_what_it_found_until_that_stays_and_keeps_the_best(
    monkeypatch, contradictions, means, rounds, best
):
    asked, turn = [], iter(range(99))
    kinds = len(forced._KINDS)

    def replay(spec, recording, error_ms):
        asked.append(float(error_ms.args[0][0]))
        k = next(turn)
        return [SimpleNamespace(shape=k)], [None] * contradictions[k], k, None

    def fit(steps, parts):
        return np.full(kinds, means[steps[0].shape]), f"error {steps[0].shape}", "counts"

    engine = SimpleNamespace(data_parallel_size=1)
    monkeypatch.setattr(forced, "_ROUNDS", len(means))
    for name, stand_in in (
        ("recording_of", lambda spec: "recorded"), ("replay", replay), ("_fit", fit),
        ("_parts", lambda shape: [1.0] * kinds),
        ("_differences", lambda steps, parts, mean_ms, *rest: (mean_ms[0], *rest)),
    ):  # fmt: skip
        monkeypatch.setattr(forced, name, stand_in)
    found = forced_replay(SimpleNamespace(engine=engine))
    assert asked == [0.0, *means[: rounds - 1]]
    assert found.num_preemptions == best
    assert found.differences == (means[best], f"error {best}", "counts")
    assert len(found.contradictions) == contradictions[best]
