import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.experiments.comparing import host_terms
from schedlab.experiments.comparing import validate as validation
from schedlab.experiments.comparing.host_terms import HostTerms, validate_elsewhere
from schedlab.experiments.comparing.validate import recording_of, timeline, validate
from schedlab.experiments.comparing.vllm_recording import read_recording
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import load_spec, make_spec
from schedlab.sim.cost.limits import check_limits, least_step_s
from schedlab.sim.cost.table_profile import Curve, TableProfile, write_table
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.models import model
from tests.data_folder import data_folder

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
PEER = {"rtx4090": 0.0045, "rtxpro6000": 0.021}
FOLDERS = {"rtx4090": "RTX4090", "rtxpro6000": "RTXPRO6000"}


def row(i, **changes):
    times = {"queued_ts": 1.0, "first_token_ts": 1.5, "last_token_ts": 2.5}
    return {"request_id": f"bench-{i}", "input_toks": 8, "output_toks": 3, **times, **changes}


def recording(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def tiny(tmp_path, rows, us=100_000.0, output_toks=3):
    """Make an experiment of two requests whose steps take 100 ms each."""
    attention = {"us_per_pair": 0.0, "us_per_kv_token": 0.0}
    meta = {"model": "llama-3-8b", "hardware": "a100", "dtype": "bf16", "tensor_parallel_size": 1}
    curve = Curve("all", 1, (1.0, 4096.0), (us, us))
    write_table(tmp_path / "profile", meta, TableProfile((curve,), (), attention, 0))
    trace = tmp_path / "trace.jsonl"
    line = {"input_toks": 8, "output_toks": output_toks, "arrival_time_ns": 0}
    trace.write_text("".join(json.dumps(line | {"arrival_time_ns": i}) + "\n" for i in range(2)))
    return make_spec(
        {
            "cost_model": str(tmp_path / "profile"),
            "workload": {"trace": str(trace), "format": "llmservingsim"},
            "validation": {"measured": str(recording(tmp_path / "requests.jsonl", rows))},
        }
    )


def test_latencies_of_a_recording_equal_the_hand_computation(tmp_path):
    path = recording(tmp_path / "r.jsonl", [row(1, last_token_ts=3.5), row(0)])
    found = read_recording(path).latencies_ms()
    assert found["TTFT Mean"] == 500
    assert found["TPOT Mean"] == pytest.approx((500 + 1000) / 2)
    assert found["Latency Median"] == pytest.approx(2000)
    assert found["Latency P90"] == pytest.approx(1500 + 0.9 * 1000)
    assert len(found) == 15


def test_recording_is_read_by_row_and_its_latencies_are_linear_percentiles(tmp_path):
    def timed(i, queued, first, last, tokens, **more):
        return row(
            i, queued_ts=queued, first_token_ts=first, last_token_ts=last, input_toks=10 + i,
            output_toks=tokens, **more,
        )  # fmt: skip

    rows = [
        timed(2, 3, 3.25, 3.25, 1, scheduled_ts=3.125), timed(0, 1, 1.5, 2.5, 5, scheduled_ts=1.25),
        timed(1, 2, 4, 4.5, 2, scheduled_ts=3),
    ]  # fmt: skip
    found = read_recording(recording(tmp_path / "r.jsonl", rows))
    assert [column.tolist() for column in vars(found).values()] == [
        [10, 11, 12], [5, 2, 1], [1, 2, 3], [1.5, 4, 3.25], [2.5, 4.5, 3.25], [1.25, 3, 3.125],
    ]  # fmt: skip
    # To the first token 500, 2000, 250 ms; between tokens 250 and 500; to the last 1500, 2500, 250.
    expected = {}
    for name, low, middle, high in (
        ("TTFT", 250, 500, 2000), ("TPOT", 250, 375, 500), ("Latency", 250, 1500, 2500),
    ):  # fmt: skip
        expected[f"{name} Mean"] = middle if name == "TPOT" else (low + middle + high) / 3
        for label, q in (("Median", 0.5), ("P90", 0.9), ("P95", 0.95), ("P99", 0.99)):
            expected[f"{name} {label}"] = middle + (q - 0.5) * 2 * (high - middle)
    assert found.latencies_ms() == pytest.approx(expected)
    for gone in range(3):
        some = [{k: v for k, v in one.items() if k != "scheduled_ts" or i != gone}
                for i, one in enumerate(rows)]  # fmt: skip
        assert read_recording(recording(tmp_path / "some.jsonl", some)).scheduled_s is None


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([row(0), row(0)], "r.jsonl:2: request 0 is there twice"),
        ([row(0), row(2)], "without gaps"),
        ([row(0, first_token_ts=0.5)], "run backwards"),
        ([row(0, queued_ts="x")], "queued_ts must be a time in seconds"),
        ([row(0, request_id="a")], "must end in -<row>"),
        ([], "without gaps"),
    ],
)
def test_broken_recording_is_refused(tmp_path, rows, told):
    with pytest.raises(SpecError, match=told):
        read_recording(recording(tmp_path / "r.jsonl", rows))


def test_validation_compares_each_latency(tmp_path):
    # Both prompts in the first step (request 1 comes 1 ns late, so in the second).
    found = validate(tiny(tmp_path, [row(0), row(1)]))
    assert found.predicted_ms["TTFT Mean"] == pytest.approx((100 + 200) / 2, rel=1e-6)
    assert found.errors["TTFT Mean"] == pytest.approx(150 / 500 - 1, rel=1e-6)
    assert found.counts["steps"] == 4
    assert found.worst[0] in found.errors
    assert any("table" in line for line in found.notes)


_WHOLE = "answers were not streamed: no time between tokens was recorded, so no TPOT"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("output_toks", [1, 3])
def test_validation_of_answers_in_one_piece_leaves_times_between_tokens_out(tmp_path, output_toks):
    rows = [row(i, first_token_ts=2.5, output_toks=output_toks) for i in range(2)]
    found = validate(tiny(tmp_path, rows, output_toks=output_toks))
    assert {name.split()[0] for name in found.measured_ms} == {"TTFT", "Latency"}
    assert found.errors.keys() == found.measured_ms.keys() == found.predicted_ms.keys()
    assert len(found.rows()) == 10
    assert (_WHOLE in found.notes) == (output_toks > 1)
    assert _WHOLE not in validate(tiny(tmp_path, [row(0), row(1)])).notes


def test_validation_leaves_out_single_latencies_that_took_no_time(tmp_path):
    found = validate(tiny(tmp_path, [row(0), row(1, first_token_ts=1.0)]))
    assert "TTFT Mean" in found.errors
    rows = [row(i, first_token_ts=1.0) for i in range(2)]
    found = validate(tiny(tmp_path, rows))
    assert {name.split()[0] for name in found.errors} == {"TPOT", "Latency"}
    assert (
        "recorded as 0 and left out: "
        + ", ".join(f"TTFT {of}" for of in ("Mean", "Median", "P90", "P95", "P99"))
        in found.notes
    )
    nothing = [row(i, first_token_ts=1.0, last_token_ts=1.0) for i in range(2)]
    with pytest.raises(SpecError, match=r"requests\.jsonl: every recorded latency is 0"):
        validate(tiny(tmp_path, nothing))


def test_validation_of_other_requests_is_refused(tmp_path):
    with pytest.raises(SpecError, match="request 1 has 4 output_tokens, the workload says 3"):
        validate(tiny(tmp_path, [row(0), row(1, output_toks=4)]))
    with pytest.raises(SpecError, match="1 requests, but the workload has 2"):
        validate(tiny(tmp_path, [row(0)]))


@pytest.mark.parametrize("backend", ["real", "vllm"])
def test_recording_is_held_against_nothing_but_a_simulation(tmp_path, backend):
    spec = tiny(tmp_path, [row(0), row(1)])
    assert len(recording_of(spec).output_tokens) == 2
    with pytest.raises(SpecError, match="backend: validation predicts with the simulation"):
        recording_of(spec.model_copy(update={"backend": backend}))


def test_fit_on_the_run_to_be_predicted_is_refused(tmp_path):
    spec = tiny(tmp_path, [row(0), row(1)])
    with pytest.raises(SpecError, match="the very run"):
        validate_elsewhere(spec, spec)


def test_host_terms_reach_every_step(tmp_path):
    spec = HostTerms(0.010, 0.005, 0.001).apply(tiny(tmp_path, [row(0), row(1)]))
    found = validate(spec)
    # The first step: 100 - 5 + 10 ms, and 1 ms for its one running request.
    assert found.predicted_ms["TTFT Mean"] == pytest.approx((106 + 106 + 107) / 2, abs=1e-3)


def test_fit_finds_the_terms_a_recording_was_made_with(tmp_path, monkeypatch):
    monkeypatch.setattr(host_terms, "PREFILL_STEP_GRID_S", (0.0, 0.002, 0.004))
    monkeypatch.setattr(host_terms, "PROFILING_GRID_S", (0.0, 0.0003, 0.0006))
    spec = tiny(tmp_path, [row(0), row(1)])
    made_with = HostTerms(0.002, 0.0003)
    run_there = timeline(run(made_with.apply(spec)))
    recorded = [
        row(
            i,
            queued_ts=float(run_there.queued_s[i]),
            first_token_ts=float(run_there.first_token_s[i]),
            last_token_ts=float(run_there.last_token_s[i]),
        )
        for i in range(2)
    ]
    (tmp_path / "elsewhere").mkdir()
    other = tiny(tmp_path / "elsewhere", [row(0), row(1)])
    spec = tiny(tmp_path, recorded)
    terms, found = validate_elsewhere(other, spec)
    assert terms == made_with
    assert found.predicted_ms == pytest.approx(run_there.latencies_ms(), rel=1e-9)


def test_fit_of_terms_that_predict_alike_takes_the_first(tmp_path, monkeypatch):
    class Same:
        root_mean_square_error = 0.1

    monkeypatch.setattr(host_terms, "validate", lambda spec: Same())
    assert host_terms.fit(tiny(tmp_path, [row(0), row(1)])) == HostTerms(0.0, 0.0)


def test_fit_on_the_same_run_by_another_path_is_refused(tmp_path):
    spec = tiny(tmp_path, [row(0), row(1)])
    (tmp_path / "there").symlink_to(tmp_path, target_is_directory=True)
    measured = str(tmp_path / "there" / Path(spec.validation.measured).name)
    again = spec.validation.model_copy(update={"measured": measured})
    with pytest.raises(SpecError, match="the very run"):
        validate_elsewhere(spec, spec.model_copy(update={"validation": again}))


def test_profile_beyond_the_device_is_refused(tmp_path):
    # Llama-3-8B in bf16 has 14 GB of weights in its layers: 7 ms at 2039 GB/s.
    with pytest.raises(SpecError, match="beyond the device"):
        validate(tiny(tmp_path, [row(0), row(1)], us=1000.0))


def test_least_step_of_experts_counts_those_of_one_token_and_is_shared_by_devices():
    shape, device = model("mixtral-8x7b"), gpu("a100-80gb")
    steps = {
        "num_decodes": np.array([0]),
        "prefill_tokens": np.array([4096]),
        "decode_context_sum_tokens": np.array([0]),
    }
    # 2 of 8 experts of 3 * 4096 * 14336 a layer.
    parameters = 32 * (4096 * 128 * (2 * 32 + 2 * 8) + 2 * 3 * 4096 * 14336)
    alone = least_step_s(steps, Deployment(shape, device))
    assert alone[0] == pytest.approx(2 * parameters * 4096 / 312e12, rel=1e-3)
    assert least_step_s(steps, Deployment(shape, device, 4))[0] == pytest.approx(alone[0] / 4)
    # Two engines share the experts, and each has attention of its own.
    parameters -= 32 * 3 * 4096 * 14336
    shared = least_step_s(steps, Deployment(shape, device, data_parallel_size=2))
    assert shared[0] == pytest.approx(2 * parameters * 4096 / 312e12, rel=1e-3)


def test_least_step_time_is_arithmetic_or_traffic():
    shape, device = model("llama-3-8b"), gpu("a100")
    steps = {
        "num_decodes": np.array([1, 0, 0]),
        "prefill_tokens": np.array([0, 4096, 0]),
        "decode_context_sum_tokens": np.array([100_000, 0, 0]),
        "start_ns": np.zeros(3, dtype=np.int64),
        "end_ns": np.full(3, 10**9),
    }
    parameters = 32 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336)
    read = parameters * 2 + 100_000 * 2 * 32 * 8 * 128 * 2
    where = Deployment(shape, device)
    least = least_step_s(steps, where)
    assert least[0] == pytest.approx(read / 2039e9, rel=1e-3)
    assert least[1] == pytest.approx(2 * parameters * 4096 / 312e12, rel=1e-3)
    assert least[2] == 0
    check_limits(steps, where, "a second each")
    check_limits(steps | {"end_ns": np.ceil(least * 1e9 / 1.24).astype(np.int64)}, where, "near")
    with pytest.raises(SpecError, match="2 steps are beyond"):
        check_limits(steps | {"end_ns": (least * 1e9 / 1.26).astype(np.int64)}, where, "far")
    with pytest.raises(SpecError, match="1 steps are beyond"):
        check_limits(steps | {"end_ns": np.array([10**9, 10**8, 1])}, where, "too fast")
    # Of several the one is named that is the most times too fast, not that which lacks most time.
    assert least[1] > 5 * least[0]
    too_fast_ns = (least * 1e9 / np.array([4, 2, 1])).astype(np.int64)
    with pytest.raises(SpecError, match=r"a step of 1 decodes and 0 prompt tokens.*2 steps are"):
        check_limits(steps | {"end_ns": too_fast_ns}, where, "both")


@pytest.fixture
def spec_of(profiles, monkeypatch):
    monkeypatch.setenv("SCHEDLAB_DATA", str(data_folder()))

    def load(name, *overrides):
        path = EXPERIMENTS / f"validate-{name}.yaml"
        return load_spec(path, [f"cost_model={profiles / name.split('-')[0]}", *overrides])

    return load


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_recorded_latencies_are_those_that_were_published(name):
    folder = data_folder() / "vllm_ground_truth" / FOLDERS[name] / "Llama-3.1-8B"
    found = read_recording(folder / "vllm/requests.jsonl").latencies_ms()
    published = {}
    for line in (folder / "validation/summary.txt").read_text().splitlines()[2:]:
        if line.strip():
            metric, statistic, value, *_ = line.split()
            published[f"{metric} {statistic}"] = value
    assert {key: f"{value:.1f}" for key, value in found.items()} == published


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_unfitted_prediction_is_as_good_as_the_peer_simulator(spec_of, name):
    found = validate(spec_of(name))
    assert found.mean_absolute_error == pytest.approx(PEER[name], abs=0.0005)


def test_memory_bound_replay_preempts_and_reuses_as_published(spec_of):
    counts = validate(spec_of("rtx4090")).counts
    assert (counts["preemptions"], counts["recomputed_tokens"], counts["prefix_hit_tokens"]) == (
        194, 110_596, 4_848,
    )  # fmt: skip


def test_all_switches_reproduce_an_independent_replay_of_the_real_scheduler(spec_of):
    # Errors in percent of a replay written from the same notes by others: async scheduling,
    # requests taken in between steps, 2587 usable blocks; no graph padding.
    found = validate(spec_of("rtx4090-vllm", "engine.cuda_graph_padding=false"))
    percent = {name: round(100 * error, 2) for name, error in found.errors.items()}
    expected = {
        "TTFT Mean": 0.83, "TTFT Median": 0.89, "TTFT P99": 0.28, "TPOT Mean": 0.21,
        "TPOT Median": 0.39, "TPOT P99": 0.72, "Latency Mean": 0.69, "Latency Median": 1.45,
        "Latency P99": 0.42,
    }  # fmt: skip
    assert {name: percent[name] for name in expected} == pytest.approx(expected, abs=0.011)


def test_validation_counts_what_the_replay_did_and_keeps_measured_from_predicted(monkeypatch):
    """By stand-ins, of which one request is preempted twice and two were resumed."""
    told = {
        "num_preemptions": np.array([2, 0, 1]), "prefix_hit_tokens": np.array([16, 32, 0]),
        "recomputed_tokens": np.array([500, 0, 0]),
    }  # fmt: skip
    resumed = {"resumed_tokens": np.array([7, 5]), "lost_tokens": np.array([70, 50])}
    result = SimpleNamespace(
        requests=told, log=SimpleNamespace(preemptions=lambda: resumed),
        provenance={"cost_model": {"validity": {}}, "num_steps": 44, "extrapolated_steps": 0},
    )  # fmt: skip
    checked = []
    measured, predicted = (
        SimpleNamespace(latencies_ms=lambda ms=ms: {"TTFT Mean": ms}) for ms in (200.0, 150.0)
    )
    for name, stand_in in (
        ("recording_of", lambda spec: measured), ("run", lambda spec: result),
        ("timeline", lambda of: predicted), ("check_same", lambda *some: checked.append(some)),
        ("warnings", lambda of: ["a warning"]), ("notes", lambda models, said: [*said, "a note"]),
    ):  # fmt: skip
        monkeypatch.setattr(validation, name, stand_in)
    found = validate("spec")
    assert checked == [(measured, predicted, "spec")]
    assert found.measured_ms == {"TTFT Mean": 200.0}
    assert found.predicted_ms == {"TTFT Mean": 150.0}
    assert found.errors == {"TTFT Mean": -0.25}
    assert found.counts == {
        "preemptions": 3, "recomputed_tokens": 12, "prefix_hit_tokens": 48, "steps": 44
    }  # fmt: skip
    assert found.notes == ["a warning", "a note", "every step inside the measured range"]
    data = found.to_data()
    assert data["counts"] == found.counts
    assert data["worst"] == list(found.worst)
    for errors, worst in (((-0.3, 0.05), -0.3), ((-0.05, 0.3), 0.3), ((-0.3, 0.3), -0.3)):
        told_ms = {name: 100 * (1 + error) for name, error in zip("ab", errors, strict=True)}
        several = replace(found, measured_ms={"a": 100.0, "b": 100.0}, predicted_ms=told_ms)
        assert several.worst[1] == pytest.approx(worst)
        assert several.mean_absolute_error == pytest.approx(np.abs(errors).mean())
    assert data["notes"] == found.notes
    result.provenance["extrapolated_steps"] = 1
    assert validate("spec").notes == ["a warning", "a note"]
    result.provenance.update(extrapolated_steps=0, cost_model={})
    assert validate("spec").notes == ["a warning", "a note"]
