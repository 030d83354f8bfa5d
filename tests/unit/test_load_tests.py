import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from schedlab.experiments.commands.app import app
from schedlab.experiments.comparing import load_tests
from schedlab.experiments.comparing.load_tests import (
    LoadTestValidation,
    StageErrors,
    experiments_of,
    is_load_test,
    validate_load_tests,
)
from schedlab.experiments.running.run import run
from schedlab.experiments.running.workload import load_workload
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.cost.table_profile import Curve, TableProfile, write_table
from schedlab.sim.errors import SpecError, TraceError
from schedlab.traces.load_test_requests import load_test_requests
from schedlab.traces.load_tests import (
    Quantiles,
    SharedPrompts,
    Stage,
    load_test,
    read_load_tests,
)
from tests.data_folder import data_folder


def quantiles(low, middle, high):
    return {"mean": middle, "min": low, "p10": low, "median": middle, "p90": high, "max": high}


STAGE = {
    "rate": 5.0,
    "duration_s": 12,
    "succeeded": 60,
    "failed": 0,
    "prompt": quantiles(90, 100, 110),
    "output": quantiles(1, 20, 22),
    "ttft_s": quantiles(0.02, 0.02, 0.02),
    "e2e_s": quantiles(0.2, 0.2, 0.2),
}
TEST = {
    "id": "small",
    "model": "meta-llama/Llama-3.1-8B",
    "tp": 1,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "max_model_len": 2048,
    "system_prompt_tokens": 40,
    "num_system_prompts": 2,
    "users_per_system_prompt": 3,
    "stages": [STAGE, STAGE | {"rate": 10.0, "duration_s": 6}],
}


def written(tmp_path, *tests):
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(list(tests), indent=1))
    return path


def profile(tmp_path, us=10_000.0, **meta):
    folder = tmp_path / "profiles" / f"p{len(meta)}-{meta.get('tensor_parallel_size', 1)}"
    folder.parent.mkdir(exist_ok=True)
    attention = {"us_per_pair": 0.0, "us_per_kv_token": 0.0}
    known = {"model": "llama-3.1-8b", "hardware": "h100-80gb", "dtype": "bf16"}
    curve = Curve("all", 1, (1.0, 4096.0), (us, us))
    table = TableProfile((curve,), (), attention, 0)
    write_table(folder, {**known, "tensor_parallel_size": 1, **meta}, table)
    return folder.parent


# -- reading -----------------------------------------------------------------------------------


def test_load_test_is_read_with_the_settings_of_its_server(tmp_path):
    test = load_test(written(tmp_path, TEST))
    assert test.engine == {
        "tensor_parallel_size": 1,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "max_model_len": 2048,
    }
    assert (test.shared.system_prompt_tokens, test.shared.num_groups) == (40, 2)
    assert [stage.num_requests for stage in test.stages] == [60, 60]
    assert test.stages[0].e2e_s.at(0.5) == 0.2


def test_requests_that_failed_were_sent_too(tmp_path):
    counted = STAGE | {"succeeded": 8, "failed": 2}
    timed = {k: v for k, v in STAGE.items() if k != "succeeded"} | {"duration_s": 3, "failed": 2}
    whole = {k: v for k, v in timed.items() if k != "failed"}
    none = timed | {"failed": 0}
    stages = load_test(written(tmp_path, TEST | {"stages": [counted, timed, whole, none]})).stages
    assert [stage.num_requests for stage in stages] == [10, 15, 15, 15]
    assert [stage.num_failed for stage in stages] == [2, 2, 0, 0]


def test_requests_beyond_all_counting_are_refused_by_their_rate(tmp_path):
    timed = {k: v for k, v in STAGE.items() if k != "succeeded"} | {"rate": 1e308, "duration_s": 9}
    with pytest.raises(TraceError, match=r"runs.json:\d+: \[0\].stages\[0\].rate: times dur"):
        load_test(written(tmp_path, TEST | {"stages": [timed]}))


def changed(path, value):
    """Return the test with one key set, or removed where the value is None."""
    test = copy.deepcopy(TEST)
    inside = test
    for key in path[:-1]:
        inside = inside[key]
    if value is None:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return test


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("id",), "", r"runs.json:\d+: \[0\].id: must be a text, got ''"),
        (("model",), 7, r"\[0\].model: must be a text, got 7"),
        (("model",), None, r"runs.json:\d+: \[0\]: key 'model' is missing"),
        (("max_num_seq",), 4, r"runs.json:\d+: .*max_num_seq: unknown key; did you mean max_num_s"),
        (("tp",), 1.5, r"runs.json:\d+: \[0\].tp: must be a whole number, got 1.5"),
        (("tp",), 0, r"0\].tp: must be a number >= 1"),
        (("pp",), 2, r"0\].pp: pipeline parallelism is not simulated"),
        (("load_type",), "trace", r"0\].load_type: 'trace' is not known; choose from constant"),
        (("counts_begin_token",), 1, r"counts_begin_token: must be true or false"),
        (("enable_expert_parallel",), 1, r"enable_expert_parallel: must be true or false"),
        (("stages",), [], r"0\].stages: must be a list of at least one stage"),
        (("stages", 1, "rate"), 0, r"runs.json:\d+: \[0\].stages\[1\].rate: must be > 0"),
        (("stages", 0, "ttft_s"), None, r"key 'ttft_s' is missing"),
        (
            ("stages", 0, "prompts"),
            {},
            r"0\].stages\[0\].prompts: unknown key; did you mean prompt",
        ),
        (("stages", 0, "prompt", "p5o"), 5, r"stages\[0\].prompt.p5o: no quantile"),
        (("stages", 0, "prompt", "p95"), 1, r"quantiles fall from 110 at 0.9 to 1 at 0.95"),
        (("stages", 0, "prompt", "p101"), 200, r"between p0 and p100"),
        (("stages", 0, "e2e_s", "mean"), "x", r"e2e_s.mean: must be a number"),
        (
            ("stages", 0, "ttft_s", "mean"),
            0,
            r"json:\d+: \[0\].stages\[0\].ttft_s.mean: must be > 0",
        ),
        (("stages", 0, "e2e_s", "min"), 0, r"stages\[0\].e2e_s.min: must be > 0"),
        (("stages", 0, "prompt", "mean"), 80, r"prompt.mean: quantiles tell of 90 to 110, got 80"),
        (("stages", 0, "prompt", "mean"), 120, r"prompt.mean: quantiles tell of 90 to 110, got 12"),
        (
            ("stages", 0, "prompt"),
            {"mean": 10, "median": 559, "p90": 586},
            r"prompt.mean: quantiles tell of 279.5 to inf, got 10",
        ),
    ],
)
def test_broken_load_test_is_refused_at_its_line(tmp_path, path, value, told):
    with pytest.raises(TraceError, match=told):
        read_load_tests(written(tmp_path, changed(path, value)))


def test_mean_of_a_load_test_may_be_rounded(tmp_path):
    latencies = {"mean": 0.027, "min": 0.02704, "max": 0.02704}
    stage = read_load_tests(written(tmp_path, changed(("stages", 0, "ttft_s"), latencies)))
    assert stage["small"].stages[0].ttft_s.mean == 0.027


def test_unknown_keys_of_a_load_test_are_ignored_and_told(tmp_path):
    test = load_test(written(tmp_path, TEST | {"comment": "made up"}))
    assert test.ignored == ("comment",)
    assert "keys ignored: comment" in load_test_requests(test).report.notes


def test_one_of_several_load_tests_must_be_named(tmp_path):
    path = written(tmp_path, TEST, TEST | {"id": "other"})
    with pytest.raises(TraceError, match="holds 2 load tests; choose from other, small"):
        load_test(path)
    with pytest.raises(TraceError, match="no load test 'othr'; did you mean other"):
        load_test(path, "othr")
    with pytest.raises(TraceError, match="two load tests have the id 'small'"):
        read_load_tests(written(tmp_path, TEST, TEST))


# -- requests ----------------------------------------------------------------------------------


def test_requests_of_a_user_are_one_prompt_sent_again_and_again(tmp_path):
    trace = load_test_requests(load_test(written(tmp_path, TEST)), seed=1)
    rows = trace.prefix.rows()
    assert len(set(rows)) == 6
    assert rows[:6] == rows[6:12] == rows[54:60] == rows[60:66]
    assert sorted(rows.count(one) for one in set(rows)) == [20] * 6
    # 40 tokens are two full blocks, which a group has in common, and no third one.
    assert len({row[:2] for row in rows}) == 2
    assert len({row[2] for row in rows}) == 6
    assert all(len(row) == n // 16 for row, n in zip(rows, trace.prompt_tokens, strict=True))


def test_requests_of_a_stage_fill_its_duration_in_bursts(tmp_path):
    test = load_test(written(tmp_path, changed(("stages", 0, "succeeded"), 3000)))
    trace = load_test_requests(test)
    first = trace.arrival_ns[trace.application == "stage 0"] / 1e9
    second = trace.arrival_ns[trace.application == "stage 1"] / 1e9
    assert first[-1] == pytest.approx(3000 / 5.0)
    assert second[0] > 2 * 3000 / 5.0
    assert second[-1] == pytest.approx(2 * 3000 / 5.0 + 60 / 10.0)
    gaps = np.diff(first)
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.1)


def test_answers_are_as_long_as_requested_and_not_as_counted(tmp_path):
    trace = load_test_requests(load_test(written(tmp_path, TEST)))
    assert trace.output_tokens.min() >= 17
    assert np.median(trace.output_tokens) == pytest.approx(19, abs=1)
    assert (trace.max_tokens == trace.output_tokens).all()
    # A tail of long answers is no artefact, and short ones opposite to it are not either.
    skewed = changed(("stages", 0, "output"), quantiles(10, 20, 200))
    lengths = load_test_requests(load_test(written(tmp_path, skewed))).output_tokens[:60]
    assert lengths.min() < 15


def test_token_that_a_tokenizer_begins_with_was_not_generated(tmp_path):
    exact = changed(("stages", 0, "output"), quantiles(20, 20, 20))
    for said, generated in ({}, 19), ({"counts_begin_token": False}, 20):
        trace = load_test_requests(load_test(written(tmp_path, exact | said)))
        assert set(trace.output_tokens[:60]) == {generated}


def as_counted(num_requests, num_prompts):
    """Return what a client says of prompts of so many lengths that were sent in turn."""
    tokens = np.sort(100 + np.resize(np.arange(num_prompts), num_requests))
    shares = {"min": 0.0, "p1": 0.01, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}
    quantiles = np.quantile(tokens, list(shares.values())).tolist()
    return {"mean": tokens.mean(), **dict(zip(shares, quantiles, strict=True))}


@pytest.mark.parametrize(
    ("sent", "failed", "taken"),
    [
        (100, 0, 100),  # inference-perf of 2025 took 10 groups of 10, whatever it was told
        (44, 0, 44),  # as the file says, though 3,000 is no multiple of it
        (100, 3, 44),  # it is not known which prompts failed
    ],
)
def test_number_of_prompts_is_that_of_their_counts(tmp_path, sent, failed, taken):
    stage = STAGE | {"succeeded": 3000 - failed, "failed": failed, "prompt": as_counted(3000, sent)}
    groups = {"num_system_prompts": 11, "users_per_system_prompt": 4, "stages": [stage]}
    test = load_test(written(tmp_path, TEST | groups))
    trace = load_test_requests(test)
    assert (test.shared.num_prompts, len(set(trace.prefix.rows()))) == (taken, taken)
    told = any("deny the 44 of the file" in note for note in trace.report.notes)
    assert told == (taken != 44)


@pytest.mark.parametrize(
    ("groups", "given", "seen", "taken"),
    [
        # Of 60 requests each of 12 prompts is 5: so many after which a length may change.
        (3, 12, [(60, 20)], 12),
        (3, 12, [(60, 24)], 5),
        (3, 8, [(60, 40)], 3),  # one a group
        (4, 8, [(60, 20)], 6),  # three would do, which are fewer than groups
        (3, 12, [(60, 7)], 12),  # nothing explains that
        (3, 12, [(60, 24), (30, 10)], 15),
        (3, 12, [(30, 10), (60, 24)], 15),
        (1, 2, [(7, 3)], 2),  # 4 and 3
        (1, 2, [(7, 4)], 2),
        (1, 2, [(7, 2)], 2),  # seven prompts, each once, say nothing
        (3, 12, [(11, 5)], 12),  # not all are sent
        (3, 12, [(12, 7)], 12),  # each is sent once
        (3, 12, [(14, 1)], 12),  # each once, and two of them again
        (3, 12, [(14, 6)], 12),
        (3, 12, [], 12),
    ],
)
def test_fewest_prompts_are_taken_that_explain_all_changes_where_those_given_do_not(
    groups, given, seen, taken
):
    shared = SharedPrompts(8, groups, given)
    stages = [SimpleNamespace(num_requests=n, changes=lambda at=at: [at]) for n, at in seen]
    found = shared.as_counted(stages)
    note = (
        f"counts of prompt tokens tell of {taken} prompts in turn, and deny the {given} of the file"
    )
    assert found == SharedPrompts(8, groups, taken, note if taken != given else "")


def test_changes_are_after_the_requests_behind_which_a_quantile_is_between_two_numbers():
    def stage(failed, *values):
        shares = (0.1, 0.25, 0.5, 0.9)
        prompt = SimpleNamespace(probabilities=shares, values=values)
        return Stage(2.0, 21, failed, prompt, None, None, None)

    # Of 21 the quantiles lie at 2, 5, 10 and 18, counted from 0.
    assert stage(0, 4.0, 4.5, 5.0, 6.25).changes() == [6, 19]
    assert stage(0, 4.5, 5.5, 6.5, 7.5).changes() == [3, 6, 11, 19]
    assert stage(0, 4.0, 4.0, 5.0, 6.0).changes() == []
    assert stage(1, 4.5, 5.5, 6.5, 7.5).changes() == []


@pytest.mark.parametrize(
    ("keys", "shared"),
    [
        ((40, 2, 3), SharedPrompts(40, 2, 6)),
        ((0, 5, 2), SharedPrompts(0, 5, 10)),
    ],
)
def test_shared_prompts_are_as_many_as_users_of_all_groups_and_may_have_nothing_in_common(
    tmp_path, keys, shared
):
    names = ("system_prompt_tokens", "num_system_prompts", "users_per_system_prompt")
    assert load_test(written(tmp_path, TEST | dict(zip(names, keys, strict=True)))).shared == shared
    for name in names[1:]:
        with pytest.raises(TraceError, match=rf"{name}: must be .*>= 1, got 0"):
            load_test(written(tmp_path, TEST | dict(zip(names, keys, strict=True)) | {name: 0}))


def test_load_test_without_shared_prompts_shares_nothing(tmp_path):
    keys = ("system_prompt_tokens", "num_system_prompts", "users_per_system_prompt")
    test = {key: value for key, value in TEST.items() if key not in keys}
    trace = load_test_requests(load_test(written(tmp_path, test)))
    assert trace.prefix is None
    assert len(set(trace.prompt_tokens)) > 6


def test_same_seed_draws_the_same_requests(tmp_path):
    test = load_test(written(tmp_path, TEST))
    one, same, other = (load_test_requests(test, seed) for seed in (3, 3, 4))
    assert (one.arrival_ns == same.arrival_ns).all()
    assert (one.arrival_ns != other.arrival_ns).any()


# -- prediction --------------------------------------------------------------------------------


def test_load_test_is_predicted_stage_by_stage(tmp_path):
    (spec,) = experiments_of(written(tmp_path, TEST), ["hardware=h100"], profiles=profile(tmp_path))
    found = validate_load_tests([spec])
    assert [stage.rate for stage in found.stages] == [5.0, 10.0]
    for stage in found.stages:
        # Steps of 10 ms: the first token after 2 to 3 of them, since steps are planned ahead; a
        # request that finds the engine idle has its own after one.
        assert 10 <= stage.predicted_ms["TTFT median"] <= 31
        assert stage.predicted_ms["E2E median"] == pytest.approx(
            stage.predicted_ms["TTFT median"] + 18 * 10, abs=11
        )
        assert stage.errors["E2E mean"] == stage.predicted_ms["E2E mean"] / 200 - 1
    assert found.rows()[-1][0] == "mean absolute error"
    assert "front end: none: the times are the engine's" in found.notes


@pytest.mark.slow
def test_front_end_adds_to_what_is_predicted_of_a_load_test(tmp_path):
    path, folder = written(tmp_path, TEST), profile(tmp_path)
    alone, behind = (
        validate_load_tests(experiments_of(path, ["hardware=h100", *more], profiles=folder))
        for more in ([], ["frontend.latency_s=0.005"])
    )
    for one, other in zip(alone.stages, behind.stages, strict=True):
        for key, ms in one.predicted_ms.items():
            assert other.predicted_ms[key] == pytest.approx(ms + 5)
    assert "front end: the experiment" in behind.notes


def test_prompts_sent_again_are_found_in_the_prefix_cache(tmp_path):
    (spec,) = experiments_of(written(tmp_path, TEST), ["hardware=h100", "cost_model=roofline"])
    requests = run(spec).requests
    again = requests["prefix_hit_tokens"][30:]
    assert (again == (requests["prompt_tokens"][30:] - 1) // 16 * 16).all()


@pytest.mark.slow
def test_experiment_may_name_a_load_test_itself(tmp_path):
    path = written(tmp_path, TEST)
    spec = make_spec({"hardware": "h100", "workload": {"load_test": str(path)}})
    assert len(run(spec).requests["id"]) == 120
    assert len(validate_load_tests([spec]).stages) == 2
    few = make_spec({"workload": {"load_test": str(path), "num_requests": 7}})
    assert len(run(few).requests["id"]) == 7


def test_workload_of_a_load_test_says_nothing_twice(tmp_path):
    path = written(tmp_path, TEST)
    with pytest.raises(SpecError, match="request_rate: load_test says that"):
        make_spec({"workload": {"load_test": str(path), "request_rate": 3}})
    with pytest.raises(SpecError, match=r"load_test: .*no load test 'x'; choose from small"):
        make_spec({"workload": {"load_test": {"file": str(path), "run": "x"}}})
    with pytest.raises(SpecError, match=r"load_test: .*no such file"):
        make_spec({"workload": {"load_test": str(tmp_path / "absent.json")}})


def test_profile_of_a_load_test_is_found_by_what_it_is_of(tmp_path):
    path = written(tmp_path, TEST | {"tp": 2, "hardware": "h100"})
    folder = profile(tmp_path)
    with pytest.raises(SpecError, match=r"no profile of llama-3.1-8b .*size 2.* --tp 2 -o"):
        experiments_of(path, profiles=folder)
    profile(tmp_path, tensor_parallel_size=2)
    (spec,) = experiments_of(path, profiles=folder)
    assert spec.cost_model.profile.endswith("p1-2")
    profile(tmp_path, tensor_parallel_size=2, expert_parallel=False)
    with pytest.raises(SpecError, match="several profiles fit"):
        experiments_of(path, profiles=folder)


def test_profile_spreads_experts_only_if_the_load_test_does(tmp_path):
    test = TEST | {"hardware": "h100", "model": "Qwen/Qwen3-30B-A3B", "tp": 2}
    of = {"model": "qwen3-30b-a3b", "tensor_parallel_size": 2}
    folder = profile(tmp_path, **of, expert_parallel=True)
    with pytest.raises(SpecError, match="no profile of qwen3-30b-a3b"):
        experiments_of(written(tmp_path, test), profiles=folder)
    path = written(tmp_path, test | {"enable_expert_parallel": True})
    (spec,) = experiments_of(path, profiles=folder)
    assert spec.engine.enable_expert_parallel
    assert spec.cost_model.profile.endswith("p3-2")


def test_load_test_that_does_not_say_its_gpu_needs_to_be_told(tmp_path):
    with pytest.raises(SpecError, match="does not say on which GPU"):
        experiments_of(written(tmp_path, TEST))


@pytest.mark.slow
def test_command_predicts_a_file_of_load_tests(tmp_path):
    path = written(tmp_path, TEST, TEST | {"id": "other"})
    asked = ["validate", str(path), "hardware=h100", "cost_model=roofline", "--run", "other"]
    done = CliRunner().invoke(app, [*asked, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [(one["run"], one["rate"]) for one in found["stages"]] == [("other", 5), ("other", 10)]
    assert "mean absolute error" in CliRunner().invoke(app, asked).output
    done = CliRunner().invoke(app, [*asked, "--by-step"])
    assert "need single requests" in done.output


@pytest.mark.parametrize("options", [[], ["--json"], ["-q"], ["--json", "-q"]])
def test_command_predicts_an_experiment_on_a_load_test_and_heeds_its_options(
    tmp_path, monkeypatch, options
):
    asked = []

    def predicted(specs, progress):
        asked.append(([spec.workload.load_test.run for spec in specs], progress is None))
        stage = StageErrors({"TTFT mean": 200.0}, {"TTFT mean": 220.0}, "run", "model", 5, 1.0)
        return LoadTestValidation((stage,), (), 0.0)

    monkeypatch.setattr("schedlab.experiments.comparing.load_tests.validate_load_tests", predicted)
    tests, spec = written(tmp_path, TEST), tmp_path / "spec.yaml"
    spec.write_text(f"workload: {{load_test: {{file: {tests}, run: small}}}}")
    done = CliRunner().invoke(app, ["validate", str(spec), *options])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("{") == ("--json" in options)
    assert "TTFT mean" in done.stdout
    if "--json" not in options:
        shown = [line.split() for line in done.stdout.splitlines()]
        assert ["run", "1", "200.0", "+10.0%"] in shown
        assert ["mean", "absolute", "error", "10.0%"] in shown
        assert shown[-1] == ["1", "stages,", "0.0", "s", "of", "CPU"]
    assert asked == [(["small"], "-q" in options)]


def test_experiment_in_json_is_no_load_test(tmp_path):
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({"workload": {"trace": "azure-conv", "num_requests": 3}}))
    assert not is_load_test(path)
    assert is_load_test(written(tmp_path, TEST))


def test_published_load_tests_are_read_and_drawn_with_their_means():
    tests = read_load_tests(data_folder() / "h100_vllm_0.15" / "runs.json")
    assert len(tests) == 6
    for test in tests.values():
        trace = load_test_requests(test)
        assert len(trace) == sum(stage.num_requests for stage in test.stages)
        # As the resolved configuration of the generator has it, beside the published figures.
        assert test.shared.num_prompts == 10 * 10
        mean = np.mean([stage.prompt.mean for stage in test.stages])
        assert trace.prompt_tokens.mean() == pytest.approx(mean, rel=0.002)


def test_mean_error_over_stages_is_of_their_sizes_whichever_sign_they_have():
    stages = tuple(
        StageErrors({"TTFT mean": 200.0}, {"TTFT mean": ms}, "run", "model", i, 1.0)
        for i, ms in enumerate([220.0, 180.0, 260.0])
    )
    means = LoadTestValidation(stages, (), 0.0).mean_absolute_errors()
    assert means == {"TTFT mean": pytest.approx((0.1 + 0.1 + 0.3) / 3)}


def stage_errors(run, stage, rate, **latencies):
    measured, predicted = ({key: ms[i] for key, ms in latencies.items()} for i in (0, 1))
    return StageErrors(measured, predicted, run, f"model of {run}", stage, rate)


def test_validation_is_told_as_table_lines_and_data():
    found = LoadTestValidation(
        (
            stage_errors("one", 0, 2.5, TTFT=(200.0, 250.0), E2E=(1000.0, 900.0)),
            stage_errors("two", 1, 12.3456, TTFT=(999.94, 999.94), E2E=(40_000.0, 50_000.0)),
        ),
        ("a note", "another"),
        1.25,
    )
    assert found.header() == ("load test", "req/s", "TTFT", "E2E")
    assert found.rows() == [
        ("one", "2.5", "200.0 +25.0%", "1,000 -10.0%"),
        ("two", "12.3", "999.9 +0.0%", "40,000 +25.0%"),
        ("mean absolute error", "", "12.5%", "17.5%"),
    ]
    assert found.lines() == ["2 stages, 1.2 s of CPU", "a note", "another"]
    first = {
        "TTFT": {"measured": 200.0, "predicted": 250.0, "error": 0.25},
        "E2E": {"measured": 1000.0, "predicted": 900.0, "error": pytest.approx(-0.1)},
    }
    data = found.to_data()
    latencies = [one.pop("latencies_ms") for one in data["stages"]]
    assert latencies[0] == first
    assert data == {
        "stages": [
            {"run": "one", "model": "model of one", "stage": 0, "rate": 2.5},
            {"run": "two", "model": "model of two", "stage": 1, "rate": 12.3456},
        ],
        "mean_absolute_error": {"TTFT": 0.125, "E2E": pytest.approx(0.175)},
        "notes": ["a note", "another"],
        "cpu_s": 1.25,
    }


@pytest.mark.parametrize("between", [None, {"source": "measured on others", "latency_s": 1.0}])
def test_stages_are_predicted_by_their_own_requests_with_every_quantile(monkeypatch, between):
    def ns(*milliseconds):
        return np.array(milliseconds, dtype=np.int64) * 1_000_000

    # Of the first stage two requests, 10 and 30 ms to the first token; of the second one of 7 ms.
    result = SimpleNamespace(
        requests={
            "arrival_ns": ns(0, 1, 2), "first_token_ns": ns(10, 8, 32), "finish_ns": ns(50, 9, 92),
            "status": np.zeros(3, dtype=np.int8),
            "application": np.array(["stage 0", "stage 1", "stage 0"], dtype=object),
        },
        provenance={"cost_model": {"name": "roofline"}, "frontend": between},
    )  # fmt: skip
    asked = []
    patches = {
        "run": lambda one: asked.append(one.name) or result,
        "timeline": lambda one: asked.append(one is result),
        "warnings": lambda one: ["a warning"],
        "notes": lambda models, found: [*(one["name"] for one in models), *found],
        "load_test": lambda file, run: of[file, run],
    }
    for name, function in patches.items():
        monkeypatch.setattr(load_tests, name, function)
    known = Quantiles(0.2, (0.0, 0.5, 1.0), (0.1, 0.2, 1.2))
    stages = [
        SimpleNamespace(ttft_s=known, e2e_s=Quantiles(3.0, (0.0, 1.0), (2.0, 4.0)), rate=5.0),
        SimpleNamespace(ttft_s=known, e2e_s=known, rate=7.0),
    ]
    of = {("f", "r"): SimpleNamespace(id="test", model="m", stages=stages)}
    source = SimpleNamespace(file="f", run="r")
    spec = SimpleNamespace(
        name="e", backend="sim", workload=SimpleNamespace(load_test=source)
    )  # fmt: skip
    told = []
    found = validate_load_tests([spec, spec], lambda *given: told.append(given))
    assert told == [(0, 2, "e"), (1, 2, "e")]
    assert asked == ["e", True] * 2
    assert [(one.run, one.model, one.stage, one.rate) for one in found.stages] == [
        ("test", "m", 0, 5.0), ("test", "m", 1, 7.0),
    ] * 2  # fmt: skip
    first, second = found.stages[:2]
    assert first.measured_ms == pytest.approx({
        "TTFT mean": 200, "TTFT median": 200, "TTFT P90": 1000, "TTFT P99": 1180,
        "E2E mean": 3000, "E2E median": 3000, "E2E P90": 3800, "E2E P99": 3980,
    })  # fmt: skip
    assert first.predicted_ms == pytest.approx({
        "TTFT mean": 20, "TTFT median": 20, "TTFT P90": 28, "TTFT P99": 29.8,
        "E2E mean": 70, "E2E median": 70, "E2E P90": 86, "E2E P99": 89.6,
    })  # fmt: skip
    assert set(second.predicted_ms.values()) == {7.0, 8.0}
    said = "measured on others" if between else "none: the times are the engine's"
    assert found.notes == ("roofline", "a warning", f"front end: {said}")
    assert found.cpu_s >= 0
    spec.backend = "real"
    with pytest.raises(SpecError, match="validation predicts with the simulation"):
        validate_load_tests([spec])
    spec.workload.load_test = None
    with pytest.raises(SpecError, match=r"e: workload\.load_test is required here"):
        validate_load_tests([spec])


def test_experiment_of_a_load_test_has_its_server_and_what_is_said_beside_it(tmp_path):
    path = written(tmp_path, TEST | {"hardware": "h100"}, TEST | {"id": "other", "tp": 2})
    both = experiments_of(path, ["cost_model=roofline", "hardware=h100", "seed=4"])
    assert [(one.name, one.workload.load_test.run) for one in both] == [
        ("small", "small"), ("other", "other"),
    ]  # fmt: skip
    assert [one.engine.tensor_parallel_size for one in both] == [1, 2]
    first = both[0]
    assert (first.model, first.seed, first.cost_model.name) == (TEST["model"], 4, "roofline")
    assert (first.engine.profile, first.engine.max_num_seqs) == ("vllm-0.19", 16)
    assert first.engine.max_num_batched_tokens == 512
    assert first.workload.load_test.file == str(path.resolve())
    (other,) = experiments_of(path, ["cost_model=roofline", "hardware=l4"], ["other"])
    assert (other.name, other.hardware) == ("other", "l4")
    spread = TEST | {"model": "Qwen/Qwen3-30B-A3B", "enable_expert_parallel": True}
    with pytest.raises(SpecError) as told:
        experiments_of(written(tmp_path, spread), ["hardware=h100"], profiles=tmp_path)
    assert str(told.value) == (
        "small: no profile of qwen3-30b-a3b on h100-80gb, tensor parallel size 1 in "
        f"{tmp_path}; make one, e.g. with schedlab profile import aiconfigurator "
        f"Qwen/Qwen3-30B-A3B --hardware h100 --expert-parallel -o {tmp_path}/qwen3-30b-a3b-tp1, "
        "or add cost_model=roofline"
    )


@pytest.mark.parametrize("num_requests", [None, 30])
def test_experiment_of_a_load_test_draws_its_requests_by_its_seed(tmp_path, num_requests):
    path = written(tmp_path, TEST)

    def loaded(seed):
        workload = {"load_test": {"file": str(path), "run": "small"}, "num_requests": num_requests}
        return load_workload(make_spec({"seed": seed, "workload": workload}), 2048)

    one, same, other = loaded(3), loaded(3), loaded(4)
    assert len(one) == num_requests or num_requests is None
    assert one.arrival_ns.tolist() == same.arrival_ns.tolist()
    assert one.arrival_ns.tolist() != other.arrival_ns.tolist()
    drawn = load_test_requests(load_test(path, "small"), 3)
    assert one.arrival_ns.tolist() == drawn.arrival_ns.tolist()[:num_requests]
