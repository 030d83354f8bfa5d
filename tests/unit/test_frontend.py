import json
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from schedlab.experiments.commands.app import app
from schedlab.experiments.comparing import frontend_measurement
from schedlab.experiments.comparing.frontend_measurement import measure_frontend
from schedlab.experiments.comparing.load_tests import LoadTestValidation
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.drive.frontend import Frontend, read_frontend, write_frontend
from schedlab.sim.errors import SpecError
from schedlab.sim.metrics.fairness import jain_index
from schedlab.sim.result import RunResult
from schedlab.sim.text import json_text


def spec(**changes):
    workload = {"trace": "azure-conv", "num_requests": 60, "request_rate": 4}
    engine = {"max_num_seqs": 16, "enable_prefix_caching": True}
    return make_spec({"engine": engine, "workload": workload} | changes)


def ns(*seconds):
    return np.array([round(s * 1e9) for s in seconds], dtype=np.int64)


# -- the queues --------------------------------------------------------------------------------


def test_requests_wait_for_their_turn_and_then_for_the_latency():
    frontend = Frontend(latency_s=0.5, request_s=1.0, prompt_token_s=0.1)
    received = frontend.received_ns(ns(0, 0, 10), np.array([10, 20, 5]))
    assert (received == ns(2.5, 5.5, 12.0)).all()


def test_several_servers_take_requests_at_once_and_hand_them_on_in_order():
    frontend = Frontend(prompt_token_s=0.1, servers=2)
    received = frontend.received_ns(ns(0, 0, 0), np.array([50, 10, 10]))
    assert (received == ns(5, 5, 5)).all()
    received = frontend.received_ns(ns(0, 0, 0), np.array([10, 20, 10]))
    assert (received == ns(1, 2, 2)).all()


def test_tokens_of_a_step_are_seen_together_behind_those_of_the_steps_before():
    counts = ns(1, 2, 10), np.array([20, 20, 10])
    seen = Frontend(output_token_s=0.1).seen_ns(ns(1, 2, 10, -1e-9), counts)
    assert (seen == [*ns(3, 5, 11), -1]).all()
    seen = Frontend(output_token_s=0.1, servers=2).seen_ns(ns(1, 2, 10), counts)
    assert (seen == ns(2, 3, 10.5)).all()


def test_tokens_of_the_only_step_are_seen_late_too():
    counts = ns(1), np.array([20])
    assert (Frontend(output_token_s=0.1).seen_ns(ns(1), counts) == ns(3)).all()


def test_engines_that_end_a_step_at_once_share_the_front_end():
    counts = ns(1, 1), np.array([10, 20])
    assert (Frontend(output_token_s=0.1).seen_ns(ns(1), counts) == ns(4)).all()


def test_requests_and_tokens_are_handed_on_as_counted_one_by_one_to_the_nanosecond():
    draw = Random(6)
    for _ in range(40):
        # A millionth of a second is no binary number: cut off, it would be a nanosecond less.
        latency_s, request_s, prompt_s, output_s = (draw.randint(0, 999) / 1e6 for _ in range(4))
        servers = draw.randint(1, 3)
        frontend = Frontend(latency_s, request_s, prompt_s / 100, output_s / 10, servers)
        come_ns = sorted(draw.randint(0, 2_000_000) for _ in range(6))
        prompts = [draw.randint(1, 300) for _ in come_ns]
        free_ns, expected, last_ns = [0] * servers, [], 0
        for come, prompt in zip(come_ns, prompts, strict=True):
            first = free_ns.index(min(free_ns))
            free_ns[first] = max(come, free_ns[first])
            free_ns[first] += round((request_s + prompt_s / 100 * prompt) * 1e9)
            last_ns = max(last_ns, free_ns[first])
            expected.append(last_ns + round(latency_s * 1e9))
        found = frontend.received_ns(np.array(come_ns), np.array(prompts))
        assert found.tolist() == expected
        ends_ns = sorted({0, *(draw.randint(0, 2_000_000) for _ in range(6))})
        tokens = [draw.randint(1, 40) for _ in ends_ns]
        seen, free = {-1: -1}, 0
        for end, count in zip(ends_ns, tokens, strict=True):
            seen[end] = free = max(end, free) + round(count * output_s / 10 / servers * 1e9)
        asked = [0, *draw.sample([-1, *ends_ns], min(3, len(ends_ns)))]
        found = frontend.seen_ns(np.array(asked), (np.array(ends_ns), np.array(tokens)))
        assert found.tolist() == [seen[end] for end in asked]


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 5000)), min_size=1, max_size=30),
    st.integers(1, 4),
)
def test_front_end_hands_on_in_order_and_never_early(jobs, servers):
    arrival = np.cumsum([gap for gap, _ in jobs])
    tokens = np.array([n for _, n in jobs])
    frontend = Frontend(0.001, 0.002, 1e-5, servers=servers)
    received = frontend.received_ns(arrival, tokens)
    least = arrival + np.rint((0.002 + 1e-5 * tokens) * 1e9).astype(np.int64) + 1_000_000
    assert (received >= least).all()
    assert (np.diff(received) >= 0).all()
    assert received[0] == least[0]
    # Lindley's recursion, one by one.
    if servers == 1:
        free = 0
        for come, go, end in zip(arrival, least - arrival - 1_000_000, received, strict=True):
            free = max(come, free) + go
            assert end == free + 1_000_000


# -- in a run ----------------------------------------------------------------------------------


def test_latency_alone_moves_everything_a_client_sees_by_itself():
    without, behind = run(spec()), run(spec(frontend={"latency_s": 0.02}))
    # The engine sees the same requests, 20 ms later, and does the same.
    for name in ("first_token_ns", "finish_ns", "first_scheduled_ns"):
        assert (behind.requests[name] == without.requests[name] + 20_000_000).all()
    assert behind.metrics()["mean_ttft_ms"] == pytest.approx(without.metrics()["mean_ttft_ms"] + 20)
    assert (behind.requests["received_ns"] == behind.requests["arrival_ns"] + 20_000_000).all()


def test_client_sees_tokens_after_the_engine_made_them():
    behind = run(spec(frontend={"output_token_s": 1e-4}))
    requests = behind.requests
    without = run(spec()).requests
    assert (requests["first_token_ns"] == without["first_token_ns"]).all()
    late = requests["first_token_seen_ns"] - requests["first_token_ns"]
    assert (late >= 100_000).all()
    assert late.max() > 100_000  # more than one token came out together
    assert (requests["finish_seen_ns"] > requests["finish_ns"]).all()
    metrics = behind.metrics()
    seen_ms = (requests["first_token_seen_ns"] - requests["arrival_ns"]) / 1e6
    assert metrics["mean_ttft_ms"] == pytest.approx(seen_ms.mean())


def test_columns_of_a_front_end_are_of_prompts_and_of_both_ends_of_an_answer():
    # A millisecond for ten prompt tokens, and one for each token that comes out of a step.
    frontend = Frontend(prompt_token_s=1e-4, output_token_s=1e-3)
    ms = 1_000_000
    requests = {
        "arrival_ns": np.array([0, 5, 7]) * ms, "prompt_tokens": np.array([30, 10, 20]),
        "generated_tokens": np.array([700, 900, 800]),
        "first_token_ns": np.array([20 * ms, 30 * ms, -1]),
        "finish_ns": np.array([50 * ms, 40 * ms, -1]),
    }  # fmt: skip
    counts = np.array([20, 30, 40, 50]) * ms, np.array([1, 2, 3, 4])
    found = frontend.columns(requests, counts)
    assert {name: (column / ms).tolist() for name, column in found.items()} == {
        "received_ns": [3, 6, 9],
        "first_token_seen_ns": [21, 32, -1 / ms],
        "finish_seen_ns": [54, 43, -1 / ms],
    }


def test_rates_behind_a_slow_front_end_are_of_what_clients_see():
    result = run(spec(frontend={"output_token_s": 0.01}))
    rows, metrics = result.requests, result.metrics()
    arrival_ns, seen_ns = rows["arrival_ns"], rows["finish_seen_ns"]
    duration_s = (seen_ns.max() - arrival_ns.min()) / 1e9
    assert duration_s > 2 * (rows["finish_ns"].max() - arrival_ns.min()) / 1e9
    assert metrics["duration_s"] == pytest.approx(duration_s)
    assert metrics["request_throughput"] == pytest.approx(60 / duration_s)
    tokens = rows["generated_tokens"].sum()
    assert metrics["output_throughput"] == pytest.approx(tokens / duration_s)
    in_flight = [((arrival_ns <= t) & (t < seen_ns)).sum() for t in arrival_ns]
    assert result.metric("most_in_flight") == max(in_flight)
    begins, ends = ((ns - arrival_ns.min()) // 10**9 for ns in (arrival_ns, seen_ns))
    in_second = [((begins <= s) & (s <= ends)).sum() for s in range(ends.max() + 1)]
    assert metrics["max_concurrent_requests"] == max(in_second)
    # A hundred a second at most, and what is left of the step that was begun.
    assert metrics["max_output_tokens_per_s"] <= 100 + 16
    half_s = duration_s / 2
    within = (seen_ns - arrival_ns.min()) / 1e9 <= half_s
    assert result.metric("finished_within", seconds=half_s) == within.sum()
    assert result.metric("tokens_within", seconds=half_s) == pytest.approx(tokens / 2, abs=100 + 16)
    assert result.metric("time_to_finish", num_requests=60) == pytest.approx(duration_s)
    speed = rows["generated_tokens"] / (seen_ns - arrival_ns)
    assert result.metric("jain_fairness") == pytest.approx(jain_index(speed))


def test_tokens_behind_a_slow_front_end_are_late_when_clients_see_them_late():
    result = run(spec(frontend={"output_token_s": 0.005}, slo={"ttft_ms": 500}))
    rows, metrics, observed = result.requests, result.metrics(), result.observation()
    times_ns = [observed.token_times(number) for number in rows["id"].tolist()]
    assert [times[0] for times in times_ns] == rows["first_token_seen_ns"].tolist()
    assert [times[-1] for times in times_ns] == rows["finish_seen_ns"].tolist()
    made_ns = [observed.token_times(number, seen=False) for number in rows["id"].tolist()]
    assert [times[-1] for times in made_ns] == rows["finish_ns"].tolist()
    late = 1 - metrics["ttft_slo_attainment"]
    assert 0.1 < late < 1
    assert result.metric("deadline_misses") == pytest.approx(late)
    good = result.metric("stall_free_goodput", ttft_ms=500, stall_ms=10_000)
    assert good == pytest.approx(metrics["request_goodput"])
    waited_ns = [
        np.diff(times, prepend=since).max()
        for times, since in zip(times_ns, rows["arrival_ns"], strict=True)
    ]
    assert result.metric("mean_max_waiting") == pytest.approx(np.mean(waited_ns) / 1e9)
    assert result.metric("mean_max_waiting") >= metrics["mean_ttft_ms"] / 1e3


def test_window_behind_a_slow_front_end_counts_what_clients_see_in_it():
    frontend = {"output_token_s": 0.01}
    cut = run(spec(frontend=frontend, measure={"warm_up_s": 2, "cool_down_s": 2}))
    metrics, inside = cut.metrics(), cut.window.holds(cut.requests["finish_seen_ns"])
    length_s = metrics["duration_s"]
    assert metrics["request_throughput"] == pytest.approx(inside.sum() / length_s)
    assert metrics["output_throughput"] == pytest.approx(100, abs=16 / length_s)
    whole = run(spec(frontend=frontend, measure={"warm_up_s": 2}))
    assert whole.window.end_ns == whole.requests["finish_seen_ns"].max() + 1


def test_without_a_front_end_nothing_says_that_there_could_be_one():
    result = run(spec())
    assert not {"received_ns", "first_token_seen_ns", "finish_seen_ns"} & set(result.requests)
    assert "frontend" not in result.provenance
    assert "frontend" not in spec().to_data()


def test_front_end_of_zeros_changes_nothing():
    without, behind = run(spec()), run(spec(frontend={}))
    assert json_text(behind.metrics()) == json_text(without.metrics())
    assert (behind.requests["first_token_seen_ns"] == without.requests["first_token_ns"]).all()


@pytest.mark.parametrize("engines", [1, 2])
def test_front_end_leaves_skipping_ahead_exact(engines):
    frontend = {"latency_s": 0.003, "request_s": 0.01, "output_token_s": 5e-5, "servers": 2}
    engine = {"max_num_seqs": 8, "data_parallel_size": engines, "data_parallel_lockstep": False}
    fast, slow = (
        run(spec(frontend=frontend, engine=engine | {"fast_forward": fast}))
        for fast in (True, False)
    )
    for name, column in fast.requests.items():
        np.testing.assert_array_equal(column, slow.requests[name], name)


def test_result_with_a_front_end_is_kept_and_read_again(tmp_path):
    result = run(spec(frontend={"latency_s": 0.02, "output_token_s": 1e-4}))
    result.save(tmp_path)
    assert json_text(RunResult.load(tmp_path).metrics()) == json_text(result.metrics())
    assert result.provenance["frontend"]["latency_s"] == 0.02


def test_prediction_of_lengths_begins_when_the_front_end_is_done():
    policy = {"name": "sjf", "predictor": {"name": "oracle", "latency_s": 0.01}}
    requests = run(spec(policy=policy, frontend={"latency_s": 0.02})).requests
    assert (requests["queued_ns"] >= requests["received_ns"] + 10_000_000).all()


# -- its keys and files ------------------------------------------------------------------------


def test_front_end_is_read_from_a_file_and_keys_beside_it_win(tmp_path):
    path = tmp_path / "measured.json"
    measured = Frontend(latency_s=0.005, output_token_s=4e-5, source="a bench")
    write_frontend(path, measured, {"by": "hand"})
    assert read_frontend(path) == measured
    assert spec(frontend=str(path)).frontend.frontend() == measured
    changed = spec(frontend={"file": str(path), "servers": 2}).frontend.frontend()
    assert (changed.latency_s, changed.servers) == (0.005, 2)
    assert changed.source == "a bench, but for servers"


def test_front_end_that_is_shipped_goes_by_its_name():
    found = spec(frontend="vllm-0.15-h100").frontend.frontend()
    assert found.latency_s > 0
    assert found.output_token_s > 0
    assert "load tests" in found.source


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"latency": 1, "source": "x"}, "unknown key 'latency'; did you mean latency_s"),
        ({"latency_s": 1}, "source must say where the figures come from"),
        ({"latency_s": "1", "source": "x"}, "latency_s must be a number, got '1'"),
        ({"latency_s": -1, "source": "x"}, "latency_s must be finite and >= 0"),
        ({"servers": 1.5, "source": "x"}, "servers must be a number"),
        ({"servers": 0, "source": "x"}, "servers must be at least 1"),
    ],
)
def test_broken_file_of_a_front_end_is_refused(tmp_path, content, told):
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(content))
    with pytest.raises(SpecError, match=f"frontend: .*broken.json.*{told}"):
        spec(frontend=str(path))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"frontend": "vllm-0.15-h10"}, "no such file.*did you mean vllm-0.15-h100"),
        ({"frontend": {"latency": 1}}, "latency.*did you mean latency_s"),
        ({"frontend": {}, "backend": "real"}, "frontend: only the simulation has one"),
        (
            {
                "frontend": {},
                "workload": {"trace": "azure-conv", "num_requests": 9, "max_concurrency": 3,
                             "arrivals": {"process": "closed_loop"}},
            },
            "frontend: not in a closed loop",
        ),
    ],
)  # fmt: skip
def test_front_end_that_cannot_be_is_refused(changes, told):
    with pytest.raises(SpecError, match=told):
        spec(**changes)


# -- measuring ---------------------------------------------------------------------------------


def recorded(folder, frontend):
    """Write load tests of two models whose latencies are those of a simulation."""
    folder.mkdir()
    users = {"system_prompt_tokens": 32, "num_system_prompts": 2, "users_per_system_prompt": 2}
    same = {"mean": 50, "min": 50, "max": 50}
    stages = [
        {"rate": rate, "succeeded": 150, "prompt": same, "output": same} for rate in (5.0, 60.0)
    ]
    specs = []
    for model in ("llama-3.1-8b", "qwen2.5-3b"):
        nothing = {
            "ttft_s": {"mean": 1, "min": 1, "max": 1},
            "e2e_s": {"mean": 1, "min": 1, "max": 1},
        }
        test = {"id": model, "model": model, "hardware": "h100", **users}
        path = folder / f"{model}.json"
        path.write_text(json.dumps(test | {"stages": [stage | nothing for stage in stages]}))
        data = {
            "model": model,
            "hardware": "h100",
            "engine": {"profile": "vllm-0.19"},
            "workload": {"load_test": str(path)},
        }
        requests = run(make_spec(data | {"frontend": frontend})).requests
        seen = {
            "ttft_s": requests["first_token_seen_ns"] - requests["arrival_ns"],
            "e2e_s": requests["finish_seen_ns"] - requests["arrival_ns"],
        }
        told = []
        for i, stage in enumerate(stages):
            rows = requests["application"] == f"stage {i}"
            latencies = {
                key: {"mean": x[rows].mean() / 1e9}
                | {f"p{p}": np.percentile(x[rows], p) / 1e9 for p in (0, 25, 50, 75, 90, 99, 100)}
                for key, x in seen.items()
            }
            told.append(stage | latencies)
        path.write_text(json.dumps(test | {"stages": told}))
        specs.append(make_spec(data))
    return specs


@pytest.mark.slow
def test_measurement_finds_the_front_end_a_recording_was_made_with(tmp_path):
    made_with = {"latency_s": 0.004, "output_token_s": 1e-4}
    found = measure_frontend(recorded(tmp_path / "tests", made_with), "made up")
    for one in (found.frontend, *found.without.values()):
        assert one.latency_s == pytest.approx(0.004, rel=0.1)
        assert one.output_token_s == pytest.approx(1e-4, rel=0.3)
    assert found.held_out.mean_absolute_errors()["TTFT median"] < 0.02
    assert set(found.without) == {"llama-3.1-8b", "qwen2.5-3b"}


def test_every_model_is_held_against_the_gaps_of_all_others(monkeypatch):
    def validated(specs):
        (one,) = specs
        return LoadTestValidation((f"stage of {one}",), ("the same", f"of {one.model}"), 2.0)

    monkeypatch.setattr(frontend_measurement, "_test_of", lambda one: one)
    monkeypatch.setattr(frontend_measurement, "_gaps", lambda one, test: [one.name])
    monkeypatch.setattr(frontend_measurement, "_fit", lambda gaps, source: (source, *gaps))
    monkeypatch.setattr(frontend_measurement, "_with", lambda one, found: one)
    monkeypatch.setattr(frontend_measurement, "validate_load_tests", validated)
    specs = [SimpleNamespace(name=name, model=name[0]) for name in ("a1", "b1", "a2", "c1")]
    told = []
    found = measure_frontend(specs, "s", lambda *what: told.append(what))
    assert found.frontend == ("s", "a1", "a2", "b1", "c1")
    assert found.without == {
        "a": ("s", "b1", "c1"), "b": ("s", "a1", "a2", "c1"), "c": ("s", "a1", "a2", "b1"),
    }  # fmt: skip
    assert found.held_out.stages == tuple(f"stage of {one}" for one in specs)
    assert found.held_out.notes == ("the same", "of a", "of b", "of c")
    assert found.held_out.cpu_s == 8.0
    assert [what[:2] for what in told] == [(i, 8) for i in range(8)]


def quantiles_at(seconds):
    """Return a distribution whose median is known and which refuses to be asked for another."""
    return SimpleNamespace(at=lambda shares: {(0.5,): np.array([seconds])}[tuple(shares)])


def test_gap_of_a_stage_is_what_its_median_took_beyond_an_engine_as_slow_as_its_answers(
    monkeypatch,
):
    # Of stage 0 three requests, the third with medians; of stage 1 one, whose step gave 9 tokens.
    requests = {
        "arrival_ns": ns(0, 1, 2, 3), "first_token_ns": ns(0.1, 1.2, 2.4, 3.5),
        "finish_ns": ns(1.1, 2.2, 3.4, 5.5), "status": np.zeros(4, dtype=np.int8),
        "application": np.array(["stage 0", "stage 0", "stage 0", "stage 1"], dtype=object),
    }  # fmt: skip
    counts = {"end_ns": ns(0.1, 1, 1.2, 2.4, 3.5), "count": np.array([3, 80, 5, 4, 9])}
    log = SimpleNamespace(token_counts=lambda: counts)
    asked = []

    def simulated(asked_for):
        asked.append(asked_for)
        return SimpleNamespace(requests=requests, log=log)

    monkeypatch.setattr(frontend_measurement, "run", simulated)
    stages = [
        SimpleNamespace(ttft_s=quantiles_at(0.7), e2e_s=quantiles_at(1.9)),
        SimpleNamespace(ttft_s=quantiles_at(2.0), e2e_s=quantiles_at(3.0)),
    ]
    with_one = spec(frontend={"latency_s": 0.25})
    first, second = frontend_measurement._gaps(with_one, SimpleNamespace(stages=stages))
    assert [one.frontend for one in asked] == [None]
    # The rest of an answer took 1.2 s, and 1 s as predicted: so would the first token, 0.2 s, have
    # taken 0.24. Then 1 s instead of 2: half of 0.5 s.
    assert (first.gap_s, first.measured_s, first.tokens) == pytest.approx((0.7 - 0.24, 0.7, 4))
    assert (second.gap_s, second.measured_s, second.tokens) == pytest.approx((2 - 0.25, 2.0, 9))


def test_fit_of_a_front_end_weighs_relative_errors_and_has_no_negative_figure():
    def gap(gap_s, measured_s, tokens):
        return frontend_measurement.Gap(gap_s, measured_s, tokens)

    exact = [gap(0.01 + 2e-4 * n, 1.0 + n, n) for n in (1, 10, 100)]
    found = frontend_measurement._fit(exact, "there")
    assert (found.latency_s, found.output_token_s, found.source) == (0.01, 2e-4, "there")
    # Less for more tokens: the tokens cost nothing, and of 1 and 3 s at measured 1 and 2 s the
    # mean weighed by 1 and 1/4 is 1.4.
    falling = frontend_measurement._fit([gap(3.0, 2.0, 0), gap(1.0, 1.0, 10)], "")
    assert (falling.latency_s, falling.output_token_s) == (1.4, 0.0)
    assert (falling.request_s, falling.prompt_token_s, falling.servers) == (0.0, 0.0, 1)
    digits = frontend_measurement._fit([gap(0.0123456, 1.0, 0), gap(0.0123456, 1.0, 0)], "")
    assert digits.latency_s == 0.0123


def test_front_end_of_the_others_is_all_that_changes_in_an_experiment():
    one = spec(frontend={"latency_s": 0.25, "request_s": 3.0})
    changed = frontend_measurement._with(one, Frontend(latency_s=0.5, output_token_s=2.0))
    assert changed.frontend.latency_s == 0.5
    assert changed.frontend.output_token_s == 2.0
    assert changed.frontend.request_s is None
    assert changed.model_copy(update={"frontend": None}) == frontend_measurement._with(one, None)
    with pytest.raises(SpecError, match=r"e1: workload\.load_test is required here"):
        frontend_measurement._test_of(spec(name="e1"))


def test_front_end_that_one_model_alone_was_served_behind_is_not_measured(monkeypatch):
    source = SimpleNamespace(file="f", run="r")
    twice = SimpleNamespace(workload=SimpleNamespace(load_test=source))
    monkeypatch.setattr(
        frontend_measurement, "load_test", lambda *given: SimpleNamespace(model=given)
    )
    assert frontend_measurement._test_of(twice).model == ("f", "r")
    with pytest.raises(SpecError, match="needs load tests of two models"):
        measure_frontend([twice, twice], "s")


def test_measurement_tells_its_figures_and_those_without_each_model():
    stages = tuple(SimpleNamespace(run=name) for name in ("b", "a", "b"))
    held_out = SimpleNamespace(stages=stages, mean_absolute_errors=lambda: {"TTFT mean": 0.5})
    found = frontend_measurement.FrontendMeasurement(
        Frontend(0.0015, output_token_s=2.5e-5),
        held_out,
        {"m": Frontend(0.002, output_token_s=3e-6)},
    )
    assert found.lines() == [
        "measured on all: 1.50 ms a request and 25.0 us a generated token",
        "measured on all but m: 2.00 ms a request and 3.0 us a generated token",
    ]
    assert found.to_data() == {
        "by": "median TTFT of load tests, less that of the simulated engine alone",
        "on": ["a", "b"],
        "held_out": "each model predicted with the figures of the others",
        "mean_absolute_error": {"TTFT mean": 0.5},
        "without": {"m": {"latency_s": 0.002, "output_token_s": 3e-6}},
    }


@pytest.mark.slow
def test_command_measures_a_front_end_and_writes_its_file(tmp_path):
    specs = recorded(tmp_path / "tests", {"latency_s": 0.004, "output_token_s": 2e-5})
    sources = {spec.workload.load_test.file for spec in specs}
    told = [json.loads(Path(source).read_text()) for source in sorted(sources)]
    runs, file = tmp_path / "runs.json", tmp_path / "frontend.json"
    runs.write_text(json.dumps(told))
    asked = ["validate", str(runs), "cost_model=roofline", "--measure-frontend", str(file)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert read_frontend(file).latency_s == pytest.approx(0.004, rel=0.1)
    assert "measured on all but qwen2.5-3b" in done.output
    experiment = tmp_path / "one.yaml"
    experiment.write_text("workload: {trace: azure-conv, num_requests: 3}\n")
    done = CliRunner().invoke(app, ["validate", str(experiment), *asked[3:]])
    assert "--measure-frontend needs a file of load tests" in done.output


@pytest.mark.slow
def test_measurement_on_one_model_is_refused(tmp_path):
    specs = recorded(tmp_path / "tests", {"latency_s": 0.004})
    with pytest.raises(SpecError, match="needs load tests of two models"):
        measure_frontend(specs[:1], "made up")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"latency_s": True}, "latency_s must be a number, got True"),
        ({"latency_s": "1"}, "latency_s must be a number, got '1'"),
        ({"output_token_s": [1]}, "output_token_s must be a number"),
        ({"servers": 1.5}, "servers must be a number, got 1.5"),
        ({"servers": True}, "servers must be a number, got True"),
        ({"latncy_s": 1}, "unknown key 'latncy_s'; did you mean latency_s"),
        ({"source": 3}, "source must say where the figures come from"),
        ({"latency_s": -1.0}, "latency_s"),
        ({"latency_s": 1, "servers": 2}, None),
    ],
)
def test_file_of_a_front_end_with_a_fault_names_it_and_the_key(tmp_path, data, said):
    path = tmp_path / "f.json"
    path.write_text(json.dumps({"source": "a bench", **data}))
    if said is None:
        assert read_frontend(path) == Frontend(latency_s=1, servers=2, source="a bench")
        return
    with pytest.raises(SpecError, match=said) as refused:
        read_frontend(path)
    assert str(path) in str(refused.value)


def test_two_models_suffice_to_measure_a_front_end(monkeypatch):
    stage = frontend_measurement.Gap(gap_s=0.25, measured_s=0.5, tokens=10.0)
    gaps = {"m": [stage], "n": [replace(stage, gap_s=0.5)]}
    of = frontend_measurement
    monkeypatch.setattr(of, "_test_of", lambda spec: SimpleNamespace(model=spec.name))
    monkeypatch.setattr(of, "_gaps", lambda spec, test: gaps[test.model])
    monkeypatch.setattr(of, "_fit", lambda some, source: (tuple(some), source))
    monkeypatch.setattr(of, "_with", lambda spec, without: (spec.name, without))
    monkeypatch.setattr(
        of, "validate_load_tests",
        lambda specs: SimpleNamespace(stages=tuple(specs), notes=("note", specs[0][0]), cpu_s=1.5),
    )  # fmt: skip
    told = []
    found = measure_frontend(
        [SimpleNamespace(name=name) for name in "mn"], "source", lambda *said: told.append(said)
    )
    without = {"m": (tuple(gaps["n"]), "source"), "n": (tuple(gaps["m"]), "source")}
    assert found.without == without
    assert found.frontend == ((*gaps["m"], *gaps["n"]), "source")
    assert found.held_out.stages == tuple(without.items())
    assert (found.held_out.notes, found.held_out.cpu_s) == (("note", "m", "n"), 3.0)
    assert [(done, total) for done, total, _ in told] == [(0, 4), (1, 4), (2, 4), (3, 4)]
