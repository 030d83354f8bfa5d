"""What is recommended to an operator, against vLLM's own defaults, with a line to paste."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from schedlab.experiments.commands.app import app
from schedlab.experiments.search.recommend import (
    ASK_A_COST_MODEL,
    NOT_IN_VLLM,
    UNNAMED,
    Candidate,
    Question,
    Tried,
    _Search,
    recommend,
    serve_line,
    usd_per_million_tokens,
)
from schedlab.experiments.search.recommend_report import (
    _EXPECTED,
    HEADER,
    _served,
    recommend_data,
    recommend_lines,
    tried_rows,
)
from schedlab.experiments.search.vllm_defaults import RELEASES, default_limits, release
from schedlab.experiments.statistics import (
    Estimate,
    corrected,
    paired_change,
    verdict,
    with_interval,
)
from schedlab.experiments.sweeps.runs import Runs
from schedlab.experiments.sweeps.store import Store
from schedlab.experiments.sweeps.workers import InProcess
from schedlab.policies import registry
from schedlab.sim.errors import SchedlabError, SpecError
from schedlab.sim.hardware.gpus import gpu

ROOT = Path(__file__).resolve().parents[2]
WORKLOAD = {"trace": "fixed", "num_requests": 8}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Let searches try few values of limits and double runs once: seconds instead of a minute."""
    monkeypatch.setattr("schedlab.experiments.search.recommend._MOST_SEQS", (256,))
    monkeypatch.setattr("schedlab.experiments.search.recommend._MOST_TOKENS", (1024, 2048))
    monkeypatch.setattr("schedlab.experiments.search.find.MOST_DOUBLINGS", 1)
    monkeypatch.setattr("schedlab.experiments.search.recommend._LEAST_RUN_S", 0.0)


def question(**keys):
    asked = {
        "model": "llama-3-8b", "hardware": "a100-80gb", "num_gpus": 1, "workload": WORKLOAD,
        "slo": {"ttft_ms": 2000.0}, "policies": ("fcfs",), "served": "llama-3-8b",
    }  # fmt: skip
    return Question(**asked | keys)


def answered(tmp_path, **keys):
    runs = Runs(Store(tmp_path / "runs", light=True), InProcess())
    return recommend(question(**keys), runs), runs


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("b200", (1024, 16384)),
        ("h100", (1024, 8192)),
        ("rtx-pro-6000", (1024, 8192)),
        ("a100", (256, 2048)),
        ("l40s", (256, 2048)),
    ],
)
def test_default_limits_are_those_of_vllms_source(name, limits):
    found = default_limits(gpu(name), release("0.32"))
    assert found[:2] == limits
    assert re.search(r"arg_utils\.py.*lines \d+-\d+ of 0\.32", found.source)
    assert f"| {limits[0]} | {limits[1]} |" in (ROOT / "docs/recommend.md").read_text()


def test_release_that_nobody_read_is_refused():
    with pytest.raises(SpecError, match=re.escape("no defaults of vLLM 0.1 are known")):
        release("0.1")
    assert all(0 < one.gpu_memory_utilization < 1 for one in RELEASES.values())


def test_policies_to_try_are_those_asked_for_or_four_that_need_no_prediction():
    assert _Search(question(policies=("sjf", "vtc")), None).policies == ("sjf", "vtc")
    usual = ("fcfs", "edf", "shortest_prompt", "prefill_first")
    assert _Search(question(policies=()), None).policies == usual


def test_policies_that_vllm_refuses_are_those_of_its_page():
    page = (ROOT / "docs/vllm.md").read_text()
    for policies, said in ((NOT_IN_VLLM, "refused:"), (ASK_A_COST_MODEL, "ask how long a step")):
        lines = [line for line in page.splitlines() if f"| {said}" in line]
        named = {
            name for line in lines for name in re.findall(r"`(\w+)`", line.split(f"| {said}")[0])
        }
        assert set(policies) == named <= set(registry.names())
    with pytest.raises(SpecError, match="scorpio runs in vLLM with a cost model"):
        recommend(question(policies=("scorpio",)), None)
    with pytest.raises(SpecError, match="static does not run in vLLM"):
        recommend(question(policies=("static",)), None)


@pytest.mark.slow
def test_recommendation_is_confirmed_on_new_seeds_and_given_as_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr("schedlab.experiments.search.recommend._LEAST_RUN_S", 0.3)
    found, runs = answered(tmp_path)
    best = found.best
    # Eight requests are over before a queue has grown: any rate serves them.
    (first,) = [one for one in found.tried if one.stage == "deployment"]
    assert first.found.num_requests >= 0.3 * first.rate > 8
    (way,) = [one for one in best.found.remarks if one.startswith("by requests a run")]
    assert f"--num-requests {2 * best.found.num_requests} goes on" in way
    assert "WHICH HAS NOT SETTLED" in recommend_lines(found, runs.cost_models)[0]
    assert best.rate > 0
    assert len(best.found.values) == 5
    seeds = {
        int(path.name.split("-s")[-1].split("-")[0]) for path in runs.store.folder.glob("TP*-s*")
    }
    assert seeds == set(range(7))
    line = serve_line(found)
    assert line.startswith("vllm serve llama-3-8b")
    assert ("--max-num-seqs" in line) == (best.candidate.max_num_seqs != 256)
    told = "\n".join(recommend_lines(found, runs.cost_models))
    assert "UNCALIBRATED" in told
    assert "lines 2943-2952 of 0.32.0" in told
    usd_per_hour = gpu("a100-80gb").usd_per_hour
    tokens_per_s = found.expected["output_throughput"].mean
    assert found.usd_per_million_tokens == usd_per_million_tokens(usd_per_hour, 1, tokens_per_s)
    unnamed = replace(found, question=replace(found.question, served=""))
    assert serve_line(unnamed).startswith("vllm serve YOUR_MODEL")
    assert "--serve-as NAME" in "\n".join(recommend_lines(unnamed, runs.cost_models))


@pytest.mark.slow
def test_recommendation_for_a_rate_takes_as_few_gpus_as_do(tmp_path, monkeypatch):
    for options in ("_MOST_SEQS", "_MOST_TOKENS"):  # which are not what is asked
        monkeypatch.setattr(f"schedlab.experiments.search.recommend.{options}", ())
    found, _ = answered(tmp_path, num_gpus=2, rate=1.0)
    assert found.best.candidate.num_gpus == 1
    assert found.at_rate == 1.0
    tried = {(one.candidate.tensor_parallel_size, one.candidate.replicas)
             for one in found.tried if one.stage == "deployment"}  # fmt: skip
    assert tried == {(1, 1), (1, 2), (2, 1)}


def test_reason_that_all_deployments_share_is_told_once():
    missing = {"trace": "gone.csv", "num_requests": 8, "resample": True}
    with pytest.raises(SpecError) as told:
        recommend(question(num_gpus=4, workload=missing), None)
    assert str(told.value).count("gone.csv") == 1


def test_workload_that_cannot_be_read_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,9,x\n")
    odd = {"trace": str(tmp_path / "t.csv"), "num_requests": 8, "resample": True}
    with pytest.raises(SchedlabError, match=r"t\.csv:2: output_tokens is 'x'"):
        recommend(question(workload=odd), None)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sjff", r"^--policy sjff: .*did you mean sjf\?"),
        ("sjf", "^--policy sjf: .*needs predictions"),
        ("no_such_module:Own", "^--policy no_such_module:Own: .*cannot import 'no_such_module'"),
    ],
)
def test_policy_that_cannot_be_tried_is_refused_before_anything_runs(name, said):
    with pytest.raises(SpecError, match=said):
        recommend(question(policies=("fcfs", name)), None)


def test_model_that_fits_nowhere_is_refused_with_the_reasons():
    with pytest.raises(SpecError, match=r"tensor parallel 1: .*GiB"):
        recommend(question(model="llama-3.1-70b"), None)


@pytest.mark.slow
def test_targets_that_nothing_holds_are_told(tmp_path):
    with pytest.raises(SchedlabError, match="nothing tried holds the targets"):
        answered(tmp_path, slo={"ttft_ms": 0.001})


def test_serve_line_names_only_what_differs_from_vllms_defaults():
    candidate = Candidate(2, 2, 256, 4096, "edf")

    class Found:
        question = question(dtype="fp16")
        limits = RELEASES["0.32"].other
        best = type("Best", (), {"candidate": candidate})
        is_cut = False

    line = serve_line(Found)
    assert "--tensor-parallel-size 2" in line
    assert "--data-parallel-size 2" in line
    assert "--max-num-batched-tokens 4096" in line
    assert "--max-num-seqs" not in line
    assert "--dtype float16" in line
    assert json.loads(line.split("--additional-config ")[1].strip("'")) == {
        "schedlab": {"policy": {"name": "edf"}}
    }


def test_serve_line_says_nothing_of_an_engine_alone_as_vllm_starts_it():
    limits = RELEASES["0.32"].other
    candidate = Candidate(1, 1, limits.max_num_seqs, limits.max_num_batched_tokens)
    found = SimpleNamespace(
        question=question(dtype="", served=""), limits=limits, is_cut=False, max_model_len=3000,
        best=SimpleNamespace(candidate=candidate),
    )  # fmt: skip
    start = f"vllm serve {UNNAMED}"
    assert serve_line(found) == start
    for changes, option in (
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2"),
        ({"replicas": 2}, "--data-parallel-size 2"),
        ({"max_num_seqs": limits.max_num_seqs + 1}, f"--max-num-seqs {limits.max_num_seqs + 1}"),
        ({"max_num_batched_tokens": 7}, "--max-num-batched-tokens 7"),
        ({"policy": "priority"}, "--scheduling-policy priority"),
    ):
        found.best.candidate = candidate._replace(**changes)
        assert serve_line(found) == f"{start} \\\n    {option}"
    found.best.candidate, found.is_cut = candidate, True
    for length, told in ((3000, 2048), (1023, 1023), (1024, 1024)):
        found.max_model_len = length
        assert serve_line(found) == f"{start} \\\n    --max-model-len {told}"


def test_cost_of_a_million_tokens_counts_every_gpu():
    # Two GPUs at 3.60 an hour are 0.002 a second, for 4,000 tokens.
    assert usd_per_million_tokens(3.6, 2, 4000.0) == pytest.approx(0.5)
    assert math.isnan(usd_per_million_tokens(math.nan, 1, 10.0))


@pytest.mark.slow
def test_recommend_command_writes_json_line_page_and_figure(tmp_path):
    out = tmp_path / "out"
    argv = [
        "recommend",
        "--model",
        "llama-3-8b",
        "--gpu",
        "a100",
        "--ttft-ms",
        "2000",
        "-j",
        "1",
        "--workload",
        "fixed",
        "--num-requests",
        "10",
        "--policy",
        "fcfs",
        "-o",
        str(out),
    ]
    result = CliRunner().invoke(app, argv)
    assert result.exit_code == 0, result.output
    assert "vllm serve meta-llama/Meta-Llama-3-8B" in result.output
    data = json.loads((out / "recommend.json").read_text())
    assert data["best"]["replications"]
    assert data["serve"] + "\n" == (out / "serve.sh").read_text()
    page = (out / "report.html").read_text()
    assert "vllm serve" in page
    shown = re.search(r"output throughput \(tokens/s\)</td>\s*<td class=.number.>([\d,.]+)", page)
    expected = data["expected"]["output_throughput"]["mean"]
    assert float(shown[1].replace(",", "")) == pytest.approx(expected, rel=0.01)
    drawn = CliRunner().invoke(app, ["plot", str(out), "--format", "svg"])
    assert drawn.output.strip().endswith("recommended.svg")


def test_recommend_without_a_target_is_refused():
    result = CliRunner().invoke(app, ["recommend", "--model", "llama-3-8b", "--gpu", "h100"])
    assert result.exit_code == 2
    assert "--ttft-ms" in result.output


@pytest.mark.parametrize("option", ["--tpot-ms", "--rate", "--usd-per-hour"])
@pytest.mark.parametrize("value", ["0", "nan", "inf"])
def test_recommend_with_a_target_rate_or_price_of_nothing_is_refused(option, value):
    asked = ["recommend", "--model", "llama-3-8b", "--gpu", "h100", "--ttft-ms", "1000"]
    result = CliRunner().invoke(app, [*asked, option, value])
    assert result.exit_code == 2
    assert option in result.output


def test_with_a_rate_to_serve_the_fewest_gpus_win_and_among_them_who_serves_most():
    def serves(rate, *candidate):
        answer = SimpleNamespace(error="", bound="", value=SimpleNamespace(mean=rate))
        return Tried("", Candidate(*candidate, 256, 2048), answer)

    too_slow, small, two, wide = (
        serves(9, 1, 1),
        serves(10, 1, 2),
        serves(12, 2, 1),
        serves(40, 4, 1),
    )
    search = SimpleNamespace(asked=SimpleNamespace(rate=10.0))
    assert _Search._best(search, [wide, too_slow, small, two], two.candidate) is two
    search.asked.rate = None
    assert _Search._best(search, [wide, too_slow, small, two], two.candidate) is wide
    assert _Search._best(search, [small, serves(10, 2, 1)], small.candidate) is small


def test_gpu_of_just_the_memory_of_a_class_is_of_that_class():
    of, gib = RELEASES["0.32"], 1 << 30
    at = {
        n: default_limits(replace(gpu("h100"), memory_bytes=n), of)
        for n in (70 * gib - 1, 70 * gib, 160 * gib - 1, 160 * gib)
    }
    assert list(at.values()) == [of.other, of.large, of.large, of.huge]


@pytest.mark.parametrize("exists", [True, False])
def test_every_option_of_the_command_reaches_the_search(tmp_path, monkeypatch, exists):
    monkeypatch.chdir(tmp_path)
    trace = "rows.csv" if exists else "azure-conv"
    Path("rows.csv").write_text("rows\n")
    asked = []

    def search(question, runs):
        asked.append((question, runs.store.folder))
        raise SchedlabError("asked")

    monkeypatch.setattr("schedlab.experiments.search.recommend.recommend", search)
    options = [
        "--model", "qwen2.5-3b", "--gpu", "h100", "--gpus", "3", "--workload", trace,
        "--ttft-ms", "11", "--tpot-ms", "12", "--e2el-ms", "13", "--attainment", "0.7",
        "--rate", "14", "--vllm", "0.24", "--policy", "edf", "--policy", "vtc",
        "--cost-model", "some/profile", "--usd-per-hour", "15", "--num-requests", "16", "-q",
        "--dtype", "fp16",
    ]  # fmt: skip
    for more in ([], ["--serve-as", "mine", "-o", "there"]):
        done = CliRunner().invoke(app, ["recommend", *options, *more])
        assert done.output.rstrip().endswith(" asked")
    resample = {"resample": True} if exists else {}
    first = Question(
        model="qwen2.5-3b", hardware=gpu("h100").name, num_gpus=3,
        workload={"trace": trace, "num_requests": 16, **resample},
        slo={"ttft_ms": 11.0, "tpot_ms": 12.0, "e2el_ms": 13.0}, attainment=0.7, vllm="0.24",
        policies=("edf", "vtc"), cost_model="some/profile", rate=14.0, usd_per_hour=15.0,
        served="Qwen/Qwen2.5-3B-Instruct", dtype="fp16",
    )  # fmt: skip
    place = tmp_path / f"results/recommend-qwen2.5-3b-{gpu('h100').name}"
    assert asked == [(first, place), (replace(first, served="mine"), tmp_path / "there")]
    options[1] = "Qwen/Qwen2.5-3B-Instruct"  # by another name, it is the same model
    CliRunner().invoke(app, ["recommend", *options])
    assert asked[-1][1] == place


@pytest.mark.parametrize("least_run_s", [0.0, 1.0])
def test_deployment_among_equals_is_the_largest_tensor_parallel_one(monkeypatch, least_run_s):
    # Also where all are tried once more with longer runs.
    monkeypatch.setattr("schedlab.experiments.search.recommend._LEAST_RUN_S", least_run_s)
    search, tried = _Search(question(num_gpus=4), None), []
    rate = SimpleNamespace(error="", bound="", value=SimpleNamespace(mean=30.0))

    def tries(stage, candidates):
        tried.append([(one.tensor_parallel_size, one.replicas) for one in candidates])
        return [Tried(stage, one, rate) for one in candidates]

    monkeypatch.setattr(search, "_try", tries)
    best = search.deployments().candidate
    assert (best.tensor_parallel_size, best.replicas) == (4, 1)
    assert tried == [[(1, 4), (2, 2), (4, 1)]] * (2 if least_run_s else 1)
    assert search.length == (30 if least_run_s else 8)


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ([40.7, 40.79, 30.0], "a"),
        ([40.9, 40.5, 0.0], "b"),
        ([41.0, 45.0, 44.0], "c"),
        ([50.0, 45.0, 50.0], "b"),
        ([], "a"),
    ],
)
def test_option_is_taken_if_it_serves_two_per_cent_more_and_tried_beside_what_is_served(
    monkeypatch, rates, chosen
):
    search = _Search(question(), None)
    own = Candidate(1, 1, 8, 64, "a")._replace(policy="a")
    asked = []

    def found(rate):
        return SimpleNamespace(error="", bound="", value=SimpleNamespace(mean=rate))

    best = Tried("deployment", own, found(40.0))

    def tries(stage, candidates, near=None):
        asked.append((stage, [one.policy for one in candidates], near))
        return [Tried(stage, c, found(rate)) for c, rate in zip(candidates, rates, strict=False)]

    monkeypatch.setattr(search, "_try", tries)
    assert search.vary("policy", best, "policy", ["a", "b", "c", "d"]).candidate.policy == chosen
    assert asked == [("policy", ["b", "c", "d"], 40.0)]
    # No fewer tokens a step than seats.
    search.vary("tokens", best, "max_num_batched_tokens", [7, 8, 9, 64])
    assert len(asked[-1][1]) == 2


def test_everything_tried_is_kept_in_turn_and_searched_near_what_is_expected(monkeypatch):
    asked = []

    def find_all(points, find, runs, expect):
        asked.append((points, find, runs, expect))
        return [f"found {one}" for one in points]

    module = "schedlab.experiments.search.recommend"
    monkeypatch.setattr(f"{module}.find_all", find_all)
    search = _Search(question(), "runs")
    monkeypatch.setattr(search, "_points", lambda some, seeds, length: [one.label for one in some])
    monkeypatch.setattr(search, "_find", lambda tolerance: tolerance)
    one, two, three = (Candidate(1, n, 8, 64) for n in (1, 2, 3))
    assert search._try("none", []) == search.tried == []
    first = search._try("first", [one, two])
    then = search._try("then", [three], near=2.5)
    assert first == [Tried("first", c, f"found {c.label}") for c in (one, two)]
    assert then == [Tried("then", three, f"found {three.label}")]
    assert search.tried == [*first, *then]
    assert [given[1:3] for given in asked] == [(0.05, "runs")] * 2
    assert asked[0][3] is None
    ((label, near),) = asked[1][3].items()
    assert label == three.label
    assert set(near) == {2.5}


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_engine_alone_needs_no_cluster(replicas):
    search = _Search(question(), None)
    spec = search._spec(Candidate(1, replicas, 8, 64, "fcfs"), 2.5, 7)
    assert (spec.cluster and spec.cluster.count) == (None if replicas == 1 else replicas)
    if replicas > 1:
        router = spec.cluster.router
        assert (router.name, router.staleness_ms) == ("vllm", 100)
    assert (spec.workload.request_rate, spec.workload.num_requests) == (2.5, 7)


def test_row_of_what_was_tried_has_its_limits_in_the_order_of_the_header():
    probe = SimpleNamespace(error=None, bound="", value=Estimate(1.5, 0.25))
    tried = Tried("confirmed", Candidate(2, 3, 64, 512, "sarathi"), probe)
    (row,) = tried_rows(SimpleNamespace(tried=[tried]))
    assert dict(zip(HEADER, row, strict=True)) == {
        "stage": "confirmed", "TP": "2", "replicas": "3", "max\nseqs": "64",
        "max batched\ntokens": "512", "policy": "sarathi", "requests/s": row[-1],
    }  # fmt: skip
    assert row[-1].startswith("1.5")


def told(**changed):
    """What there is to say of a choice, from a recommendation with every field of its own."""
    answers = {
        name: SimpleNamespace(
            error="", bound="", value=Estimate(mean, 0.5), values=[mean] * seeds, settled=True,
            remarks=(f"remark on {name}",),
        )
        for name, mean, seeds in (("best", 12.0, 7), ("default", 8.0, 7))
    }  # fmt: skip
    asked = question(
        slo={"ttft_ms": 500.0, "tpot_ms": 40.0},
        attainment=0.95,
        served="",
        rate=10.0,
        usd_per_hour=2.5,
        num_gpus=4,
    )
    fields = {
        "question": asked, "limits": SimpleNamespace(
            max_num_seqs=11, max_num_batched_tokens=22, source="its source"),
        "excluded": {"TP 8": "too wide", "TP 3": "odd"}, "tried": (),
        "best": Tried("confirmed", Candidate(2, 2, 64, 1024, "sjf"), answers["best"]),
        "default": Tried("confirmed", Candidate(4, 1, 256, 2048), answers["default"]),
        "change": None, "expected": {}, "at_rate": 10.0, "max_model_len": 5000, "is_cut": False,
        "usd_per_million_tokens": 1.234,
    }  # fmt: skip
    models = changed.pop("models", [])
    if "answer" in changed:
        vars(answers["best"]).update(changed.pop("answer"))
    for key, value in changed.pop("asked", {}).items():
        fields["question"] = replace(fields["question"], **{key: value})
    return recommend_lines(SimpleNamespace(**fields | changed), models)


def test_recommendation_is_told_with_targets_rate_cost_limits_and_what_was_left_out():
    assert told() == [
        "within TTFT <= 500 ms and TPOT <= 40 ms for 95% of requests it serves "
        f"{with_interval(12.0, 0.5)} requests/s on 4 x a100-80gb",
        f"{UNNAMED} stands for what vLLM loads, a name on huggingface.co or a folder; "
        "--serve-as NAME writes it",
        "10 requests/s are asked for: 20% to spare",
        "cost: $1.23 per million output tokens at 10 requests/s (as given)",
        f"vLLM {question().vllm} by itself: max_num_seqs 11, max_num_batched_tokens 22 "
        "(its source)",
        "replicas are independent engines behind vLLM's own balancing (reports every 100 ms)",
        "left out: TP 8: too wide",
        "left out: TP 3: odd",
        "remark on best",
        "how sure: 7 seeds that the choice was not made by; step times are a model's, and near "
        "capacity a rate is off by about as much as they are",
        "not in it: HTTP, tokenisation and streaming in front of the engine (frontend:), time of "
        "vLLM's own scheduler, speculative decoding",
    ]


@pytest.mark.parametrize(
    ("changed", "more", "less"),
    [
        ({"answer": {"settled": False}}, "a100-80gb, WHICH HAS NOT SETTLED (below)", None),
        ({"answer": {"settled": None}}, "x a100-80gb", "SETTLED"),
        ({"answer": {"bound": "at least"}}, "it serves at least >= 12.0", None),
        ({"answer": {"bound": "below"}}, "NO DEPLOYMENT SERVES THEM", "to spare"),
        ({"asked": {"served": "name"}}, "within", "stands for what vLLM loads"),
        ({"asked": {"rate": None}}, "within", "are asked for"),
        ({"asked": {"rate": 12.0}}, "12 requests/s are asked for: 0% to spare", "NO DEPLOYMENT"),
        ({"asked": {"rate": 12.1}}, "12.1 requests/s are asked for: NO DEPLOYMENT", "to spare"),
        ({"usd_per_million_tokens": math.nan},
         "cost: no price of a100-80gb is known (--usd-per-hour)", "per million"),
        ({"asked": {"usd_per_hour": None}}, f"requests/s ({gpu('a100-80gb').price_source})",
         "as given"),
        ({"is_cut": True}, "KV memory holds 5,000 tokens, less than the model's longest", None),
        ({"best": Tried("confirmed", Candidate(4, 1, 256, 2048), SimpleNamespace(
            error="", bound="", value=Estimate(8.0, None), values=[8.0], settled=True,
            remarks=()))},
         "that is what vLLM does by itself: no option is worth setting", "replicas are"),
        ({"models": [{"calibration": "CALIBRATED"}, {"calibration": "UNCALIBRATED"}]},
         "no run on your machine is in this: which setting is better is surer", None),
        ({"models": [{"calibration": "CALIBRATED"}]}, "within", "no run on your machine"),
        ({"expected": {"request_throughput": Estimate(9.2, None)}},
         "throughput is 9.20 where 10 requests/s come, for it counts until the last answer", None),
        ({"expected": {"request_throughput": Estimate(9.95, None)}}, "within", "counts until"),
    ],
)  # fmt: skip
def test_recommendation_says_what_qualifies_it_and_only_then(changed, more, less):
    lines = told(**changed)
    assert sum(more in line for line in lines) == 1, lines
    if less is not None:
        assert not any(less in line for line in lines)


def test_recommendation_that_is_not_vllms_own_is_held_against_it():
    values = ([12.0, 12.5, 11.5, 12.2, 11.8], [8.0, 8.2, 7.9, 8.1, 7.8])
    change = corrected([paired_change(*values)])[0]
    lines = told(change=change)
    own = "vLLM's own settings (TP 4 x 1, 256 seqs, 2048 tokens, fcfs)"
    assert lines[3] == verdict("it", own, "requests/s", change, True)
    assert lines[3].startswith("it beats")


@pytest.mark.parametrize("stage", ["deployment", "confirmed"])
def test_rate_that_was_found_is_told_with_its_bound_and_an_interval_if_it_is_confirmed(stage):
    def served(error="", bound=""):
        found = SimpleNamespace(error=error, bound=bound, value=Estimate(1.5, 0.25))
        return _served(Tried(stage, Candidate(1, 1, 8, 64), found))

    known = with_interval(1.5, 0.25 if stage == "confirmed" else None)
    assert served() == known
    assert served(bound="above") == f">= {known}"
    assert served(bound="below") == "none"
    assert served(error="out of memory") == "cannot run"


def test_best_and_default_are_written_down_each_as_itself(monkeypatch):
    of = "schedlab.experiments.search.recommend_report"
    for name in ("serve_line", "tried_rows"):
        monkeypatch.setattr(f"{of}.{name}", lambda found, name=name: name)
    monkeypatch.setattr(f"{of}.recommend_lines", lambda found, models: ["lines", *models])
    monkeypatch.setattr(f"{of}._plain", lambda one: f"plain {one}")
    found = SimpleNamespace(
        question=question(), limits=SimpleNamespace(_asdict=lambda: {"limits": 1}), best="best",
        default="default", change=SimpleNamespace(_asdict=lambda: {"change": 2}), at_rate="rate",
        expected={name: Estimate(mean, 0.5) for mean, name in enumerate(_EXPECTED)},
        usd_per_million_tokens=3.5, max_model_len=99, excluded={"TP 3": "odd"}, tried=["x", "y"],
    )  # fmt: skip
    data = recommend_data(found, [{"name": "m"}], 8)
    assert (data["best"], data["default"]) == ("plain best", "plain default")
    assert (data["vllm_defaults"], data["change"]) == ({"limits": 1}, {"change": 2})
    assert data["tried"] == ["plain x", "plain y"]
    expected = {name: {"mean": mean, "ci95": 0.5} for mean, name in enumerate(_EXPECTED)}
    assert data["expected"] == expected
    assert (data["serve"], data["table"]["rows"]) == ("serve_line", "tried_rows")
    numbers = ("usd_per_million_output_tokens", "max_model_len", "num_runs", "at_rate")
    assert [data[name] for name in numbers] == [3.5, 99, 8, "rate"]
    assert (data["excluded"], data["cost_models"]) == ({"TP 3": "odd"}, [{"name": "m"}])
    found.change = None
    assert recommend_data(found, [], 0)["change"] is None


def test_choice_is_confirmed_beside_the_deployment_on_most_gpus_and_of_these_the_widest(
    monkeypatch,
):
    class AskedError(Exception):
        pass

    def settled(again, *_):
        raise AskedError(again(None))

    def confirmed(*deployments):
        chosen, *_ = tried = [
            Tried(stage, Candidate(tp, replicas, 8, 64), None)
            for stage, tp, replicas in [("seats", 1, 1), *deployments]
        ]
        search = SimpleNamespace(
            asked=None, tried=tried, length=5, _runs=None, _find=lambda share: None,
            _points=lambda pair, *_, **__: [(c.tensor_parallel_size, c.replicas) for c in pair],
        )  # fmt: skip
        with pytest.raises(AskedError) as told:
            _Search.confirmed(search, chosen)
        return told.value.args[0]

    monkeypatch.setattr("schedlab.experiments.search.recommend.settled", settled)
    deployments = [("deployment", 8, 1), ("deployment", 2, 8), ("deployment", 4, 4)]
    assert confirmed(*deployments) == [(1, 1), (4, 4)]
    assert confirmed(*deployments[::-1], ("seats", 8, 8)) == [(1, 1), (4, 4)]
    assert confirmed(*deployments[:2]) == [(1, 1), (2, 8)]
    assert confirmed(("deployment", 1, 1)) == [(1, 1)]
