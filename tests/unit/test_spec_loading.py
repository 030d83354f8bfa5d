"""Loading an experiment: every mistake is told with place, key and the nearest valid choice."""

import math
from pathlib import Path

import pytest
import yaml

from schedlab.experiments.specification.identity import spec_hash
from schedlab.experiments.specification.loading import load_spec, make_spec
from schedlab.experiments.specification.paths import absolute_paths
from schedlab.experiments.specification.shipped import shipped_frontends
from schedlab.experiments.specification.workload import Workload
from schedlab.sim.errors import SpecError

PROFILE = str(next((Path(__file__).parents[2] / "profiles" / "cpu").rglob("fit.json")).parent)
WORKLOAD = {"trace": "azure-conv", "num_requests": 10, "request_rate": 2.0}
YAML = """\
seed: 7
engine: {max_num_seqs: 64}
policy:
  name: sjf
  predictor: {name: noisy, sigma: 0.5}
workload:
  trace: azure-conv
  num_requests: 1e3
  request_rate: inf
slo:
  ttft_ms: 1000
sweep:
  engine.block_size:
    - 16
    - 32
"""


@pytest.fixture
def spec_file(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text(YAML)
    return path


def test_load_spec_fills_defaults_and_reads_numbers(spec_file):
    spec = load_spec(spec_file)
    assert (spec.name, spec.seed, spec.model) == ("file", 7, "llama-3-8b")
    assert (spec.engine.max_num_seqs, spec.engine.max_num_batched_tokens) == (64, 2048)
    assert spec.workload.num_requests == 1000
    assert math.isinf(spec.workload.request_rate)
    assert spec.policy.predictor.knobs == {"sigma": 0.5}
    assert spec.slo.ttft_ms == 1000.0
    assert spec.cost_model.name == "roofline"


def test_load_spec_swept_key_holds_its_first_value(spec_file):
    assert load_spec(spec_file).engine.block_size == 16


@pytest.mark.parametrize(
    ("line", "changed", "message"),
    [
        ("engine: {max_num_seqs: 64}", "engine: {max_num_seq: 64}",
         "file.yaml:2: engine.max_num_seq: unknown key; did you mean max_num_seqs?"),
        ("seed: 7", "max_num_seqs: 7",
         "file.yaml:1: max_num_seqs: unknown key; did you mean engine.max_num_seqs?"),
        ("seed: 7", "seed: -1", "file.yaml:1: seed: must be >= 0, got -1"),
        ("seed: 7", "seed: 1.5", "file.yaml:1: seed: must be a whole number, got 1.5"),
        ("seed: 7", "seed: true", "file.yaml:1: seed: must be a whole number, got True"),
        ("seed: 7", "backend: gpu",
         "file.yaml:1: backend: 'gpu' is not a choice here; choose from real, sim"),
        ("seed: 7", "hardware: a100-80g", "file.yaml:1: hardware: "),
        ("seed: 7", "model: llama-3-9b", "file.yaml:1: model: "),
        ("{max_num_seqs: 64}", "{max_num_seqs: 0}",
         "file.yaml:2: engine.max_num_seqs: must be >= 1, got 0"),
        ("{max_num_seqs: 64}", "{max_num_seqs: '64'}",
         "file.yaml:2: engine.max_num_seqs: must be a whole number, got '64'"),
        ("{max_num_seqs: 64}", "{max_num_seqs: 4096}",
         "file.yaml:2: engine: max_num_batched_tokens (2048) must be >= max_num_seqs (4096)"),
        ("{max_num_seqs: 64}", "{gpu_memory_utilization: .nan}",
         "file.yaml:2: engine.gpu_memory_utilization: must be"),
        ("{max_num_seqs: 64}", "{kv_allocator: page}",
         "file.yaml:2: engine.kv_allocator: 'page' is not a choice here; did you mean paged?"),
        ("name: sjf", "name: sjff", "file.yaml:4: policy.name: unknown policy 'sjff'"),
        ("name: sjf", "name: static\n  max_batch_sise: 3",
         "file.yaml:5: policy.max_batch_sise: static has no such knob; "
         "did you mean max_batch_size?"),
        ("name: sjf", "name: static\n  max_batch_size: 0", "file.yaml:3: policy: "),
        ("  predictor: {name: noisy, sigma: 0.5}\n", "",
         "file.yaml:3: policy: sjf needs predictions; add policy.predictor, such as {name: noisy"),
        ("{max_num_seqs: 64}", "{tensor_parallel_size: 3}",
         "file.yaml:2: engine.tensor_parallel_size: tensor_parallel_size 3 does not divide"),
        ("name: noisy,", "name: nosy,", "file.yaml:5: policy.predictor.name: unknown predictor"),
        ("sigma: 0.5", "sigm: 0.5",
         "file.yaml:5: policy.predictor.sigm: noisy has no such knob; did you mean sigma?"),
        ("sigma: 0.5", "sigma: -1", "file.yaml:5: policy.predictor: "),
        ("trace: azure-conv", "trace: azure-con", "file.yaml:7: workload.trace: unknown preset"),
        ("trace: azure-conv", "trace: ./none.csv", "file.yaml:7: workload.trace: no such file: "),
        ("  num_requests: 1e3\n", "",
         "file.yaml:6: workload: num_requests is required with the preset azure-conv"),
        ("request_rate: inf", "request_rate: 0",
         "file.yaml:9: workload.request_rate: must be > 0, got 0"),
        ("request_rate: inf", "request_rate: .nan",
         "file.yaml:9: workload.request_rate: must be > 0, got nan"),
        ("request_rate: inf", "burstiness: 0.5",
         "file.yaml:6: workload: burstiness needs a finite request_rate"),
        ("request_rate: inf", "slice: [3, 1]",
         "file.yaml:6: workload: slice must end after it starts, got [3.0, 1.0]"),
        ("request_rate: inf", "arrivals: {process: poison}",
         "file.yaml:9: workload.arrivals.process: 'poison' is not a choice here; "
         "did you mean poisson?"),
        ("request_rate: inf", "arrivals: {process: poisson, rat: 3}",
         "file.yaml:9: workload.arrivals.rat: poisson has no such knob; did you mean rate?"),
        ("request_rate: inf", "arrivals: closed_loop",
         "file.yaml:9: workload.arrivals: closed_loop needs max_concurrency"),
        ("name: sjf", "name: sjf\n  labell: x",
         "file.yaml:5: policy.labell: sjf has no such knob; did you mean label?"),
        ("request_rate: inf", "output_tokens: {distribution: lognormall}",
         "file.yaml:9: workload.output_tokens.distribution: unknown distribution"),
        ("request_rate: inf", "format: azur",
         "file.yaml:9: workload.format: unknown trace format 'azur'; did you mean azure?"),
        ("ttft_ms: 1000", "ttft_ms: 5e-324",
         "file.yaml:11: slo.ttft_ms: must be at least 1e-06, got 4.94066e-324"),
        ("ttft_ms: 1000", "ttft_ms: 1e16",
         "file.yaml:11: slo.ttft_ms: must be at most 1e+15, got 1e+16"),
        ("ttft_ms: 1000", "ttft_ms: .inf", "file.yaml:11: slo.ttft_ms: must be finite, got inf"),
        ("    - 32", "    - 0", "file.yaml:15: engine.block_size: must be >= 1, got 0"),
        ("    - 32", "    - 16", "file.yaml:13: sweep.engine.block_size: has the same value twice"),
        ("engine.block_size:", "engine.blok_size:",
         "file.yaml:14: engine.blok_size: unknown key; did you mean block_size?"),
        ("engine.block_size:", "replications:",
         "file.yaml:13: sweep.replications: cannot be swept"),
    ],
)  # fmt: skip
def test_load_spec_mistake_is_told_with_line_key_and_remedy(spec_file, line, changed, message):
    assert line in YAML
    spec_file.write_text(YAML.replace(line, changed, 1))
    with pytest.raises(SpecError) as caught:
        load_spec(spec_file)
    assert str(caught.value).startswith(f"{spec_file.parent}/{message}")


def test_load_spec_unknown_policy_names_the_nearest(spec_file):
    spec_file.write_text(YAML.replace("name: sjf", "name: sjff"))
    with pytest.raises(SpecError, match=r"did you mean sjf\?"):
        load_spec(spec_file)


def test_load_spec_absent_public_trace_says_where_to_get_it(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text("workload: {trace: AzureLLMInferenceTrace_conv.csv}\n")
    with pytest.raises(SpecError, match="Azure/AzurePublicDataset"):
        load_spec(path)


@pytest.mark.parametrize(
    ("trace", "told"),
    [
        ("./none.csv", "no such file: {here}/none.csv"),
        ("./", "{here} is a folder, and a trace is a file"),
        # The end of such a name is no such name.
        ("x/code.csv", "no such file: {here}/x/code.csv"),
        ("./1.csv", "no such file: {here}/1.csv"),
        (
            "./AzureLLMInferenceTrace_code.csv",
            "no such file: {here}/AzureLLMInferenceTrace_code.csv; download it from the GitHub "
            "repository Azure/AzurePublicDataset, folder data and give its path as workload.trace, "
            "or: schedlab trace fetch azure-2023-code, and workload.trace: azure-2023-code",
        ),
        (
            "./conversation_trace_of_mine.jsonl",
            "no such file: {here}/conversation_trace_of_mine.jsonl; download it from the GitHub "
            "repository kvcache-ai/Mooncake, FAST25-release and give its path as workload.trace",
        ),
        ("$TRACES_OF_NOBODY/a.csv", "the environment variable TRACES_OF_NOBODY is not set: "
         "{here}/$TRACES_OF_NOBODY/a.csv"),
        ("${TRACES_OF_NOBODY}/BurstGPT.csv", "the environment variable TRACES_OF_NOBODY is not "
         "set: {here}/${TRACES_OF_NOBODY}/BurstGPT.csv"),
    ],
)  # fmt: skip
def test_trace_that_is_not_there_is_told_with_where_it_is_to_be_had_and_no_more(
    monkeypatch, tmp_path, trace, told
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        make_spec({"workload": {"trace": trace}})
    assert str(caught.value).splitlines()[0] == f"workload.trace: {told}".replace(
        "{here}", str(tmp_path)
    )


@pytest.mark.parametrize("text", ["- 1\n", "just text\n"])
def test_load_spec_not_a_mapping_raises(tmp_path, text):
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match="an experiment is a mapping"):
        load_spec(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.max_num_seq=64", "engine.max_num_seq: unknown key; did you mean max_num_seqs?"),
        ("engine.max_num_seqs=[", "not valid YAML"),
        ("engine.max_num_seqs", "write it as dotted.key=value"),
        ("engine..x=3", "write it as dotted.key=value"),
        ("seed.x=3", "seed.x: seed has no keys inside it"),
        ("sweep.engine.block_size=[]", "sweep.engine.block_size: must have one value at least"),
        ("engine.max_model_len=1", "engine.max_model_len: must be >= 2, got 1"),
        (
            "enjoy=1",
            "enjoy: unknown key; choose from backend, claim, cluster, cost_model, engine, "
            "extends, find,",
        ),
        ("find=max policy subject to failed <= 0", "find.maximize: policy takes no number"),
        (
            "find=min engine.dtype subject to failed <= 0",
            "find.minimize: engine.dtype takes no number",
        ),
        (
            "find=max workload.request_rat subject to failed <= 0",
            "find.maximize: workload.request_rat: unknown key; did you mean request_rate?",
        ),
        ("find=max seed.x subject to failed <= 0", "find.maximize: seed.x: seed has no keys"),
        (
            "tune={maximize: workload.request_rat, over: {engine.max_num_seqs: [8, 9]}, at_most: "
            "{failed: 0}}",
            "tune.maximize: workload.request_rat: unknown key",
        ),
        ("sweep.seed=3", "sweep.seed: must be a list of values, got 3"),
        ("sweep.engine.dtype=[bf16, fp17]", "engine.dtype: 'fp17' is not a choice here"),
        ("engine.block_size.x=3", "engine.block_size.x would have no effect: engine.block_size"),
        ("extends=x.yaml", "extends cannot be overridden"),
        (
            "cluster.pools=[{count: 3}]",
            "cluster.pools: must be a mapping of names to values, {NAME: ..., NAME: ...}, got [{",
        ),
        (
            "cluster.pools.main.replicas=3",
            "cluster.pools.main.replicas: unknown key; did you mean count?",
        ),
        ("cluster.replicas=3", "cluster.replicas: unknown key; did you mean count?"),
        ("replicas=3", "replicas: unknown key; here it is cluster, at the top"),
    ],
)
def test_load_spec_bad_override_is_named(spec_file, override, message):
    with pytest.raises(SpecError) as caught:
        load_spec(spec_file, [override])
    assert str(caught.value).startswith(f"override {override!r}: {message}")


def test_override_values_are_yaml_and_reach_inside_shorthands(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text("policy: {name: sjf, predictor: noisy}\nworkload: {trace: fixed}\n")
    spec = load_spec(
        path,
        ["policy.predictor.sigma=0.3", "workload.num_requests=1e2", "slo={tpot_ms: 50}", "name=x"],
    )
    assert spec.policy.predictor.knobs == {"sigma": 0.3}
    assert (spec.workload.num_requests, spec.slo.tpot_ms, spec.name) == (100, 50.0, "x")


@pytest.mark.parametrize(
    ("written", "override", "expected"),
    [
        ({"prompt_tokens": 100}, "workload.prompt_tokens.tokens=7", {"tokens": 7}),
        ({"prompt_tokens": "exponential"}, "workload.prompt_tokens.mean=7", {"mean": 7}),
    ],
)
def test_override_reaches_inside_a_lone_number_or_name_of_lengths(written, override, expected):
    data = {"workload": WORKLOAD | written}
    assert make_spec(data, [override]).workload.prompt_tokens.knobs == expected


def test_override_reaches_inside_the_shorthands_of_a_class_and_of_find():
    data = {
        "workload": WORKLOAD | {"classes": {"a": {"prompt_tokens": 100}}},
        "find": "max workload.request_rate subject to p99_ttft_ms <= 500",
    }
    spec = make_spec(data, ["workload.classes.a.prompt_tokens.tokens=7", "find.tolerance=0.1"])
    assert spec.workload.classes["a"].prompt_tokens.knobs == {"tokens": 7}
    assert (spec.find.maximize, spec.find.tolerance) == ("workload.request_rate", 0.1)


def test_override_of_a_swept_key_ends_its_sweep(spec_file):
    spec = load_spec(spec_file, ["engine.block_size=8"])
    assert spec.sweep == {}
    assert spec.engine.block_size == 8


def test_override_of_a_sweep_replaces_its_values(spec_file):
    spec = load_spec(spec_file, ["sweep.engine.block_size=[8, 64]", "sweep.seed=[1, 2]"])
    assert spec.sweep == {"engine.block_size": [8, 64], "seed": [1, 2]}


def test_sweep_of_a_key_after_a_key_inside_it_raises():
    sweep = {"policy.predictor": ["oracle"], "policy": ["sjf", "fcfs"]}
    with pytest.raises(SpecError, match=r"must come before policy\.predictor, which is inside it"):
        make_spec({"workload": WORKLOAD, "sweep": sweep})


def test_relative_paths_count_from_the_file_and_overrides_from_the_working_directory(
    tmp_path, monkeypatch
):
    (tmp_path / "inner").mkdir()
    for folder in (tmp_path, tmp_path / "inner"):
        (folder / "t.csv").write_text("x")
    path = tmp_path / "inner" / "file.yaml"
    path.write_text("workload: {trace: t.csv, format: azure}\n")
    monkeypatch.chdir(tmp_path)
    assert load_spec(path).workload.trace == str(tmp_path / "inner" / "t.csv")
    assert load_spec(path, ["workload.trace=t.csv"]).workload.trace == str(tmp_path / "t.csv")
    swept = load_spec(path, ["sweep.workload.trace=[t.csv, inner/t.csv]"])
    assert swept.sweep["workload.trace"][1] == str(tmp_path / "inner" / "t.csv")


def test_extends_merges_sections_and_replaces_the_rest(tmp_path, spec_file):
    child = tmp_path / "child.yaml"
    child.write_text("extends: file.yaml\nengine: {block_size: 8}\npolicy: fcfs\n")
    spec = load_spec(child)
    assert spec.name == "child"
    assert (spec.engine.max_num_seqs, spec.engine.block_size) == (64, 8)
    assert spec.policy.name == "fcfs"
    assert spec.policy.predictor is None
    assert spec.sweep == {}  # the child set what the parent swept
    assert spec.workload.num_requests == 1000


@pytest.mark.parametrize(
    ("section", "parent", "child", "merged"),
    [
        ("engine", {"max_num_seqs": 9, "block_size": 32}, {"block_size": 8},
         {"max_num_seqs": 9, "block_size": 8}),
        ("workload", {"num_requests": 5, "request_rate": 2.0}, {"num_requests": 7},
         {"num_requests": 7, "request_rate": 2.0}),
        ("cluster", {"count": 2, "router": "round_robin"}, {"count": 3},
         {"count": 3, "router": {"name": "round_robin"}}),
        ("slo", {"ttft_ms": 500, "tpot_ms": 9}, {"tpot_ms": 50}, {"ttft_ms": 500, "tpot_ms": 50}),
        ("sweep", {"seed": [1, 2], "engine.block_size": [8, 16]}, {"seed": [3]},
         {"seed": [3], "engine.block_size": [8, 16]}),
        ("real", {"repeats": 3, "threads": 2}, {"threads": 4}, {"threads": 4}),
        ("policy", {"name": "sjf", "predictor": "oracle"}, {"name": "static"}, {"name": "static"}),
    ],
)  # fmt: skip
def test_extends_merges_each_section_of_options_key_by_key_and_replaces_others(
    tmp_path, section, parent, child, merged
):
    base = {"workload": {"trace": "azure-conv", "num_requests": 5, "request_rate": 2.0}}
    first = base.get(section, {}) | parent
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base | {section: first}))
    (tmp_path / "child.yaml").write_text(yaml.safe_dump({"extends": "base.yaml", section: child}))
    found = load_spec(tmp_path / "child.yaml").changes()[section]
    kept = {key: value for key, value in found.items() if key != "trace"}
    assert kept == merged


def test_trace_of_no_known_format_is_refused_with_its_line(spec_file):
    (spec_file.parent / "odd.csv").write_text("when,asked,said\n0,1,2\n")
    spec_file.write_text(YAML.replace("trace: azure-conv", "trace: ./odd.csv"))
    said = rf"file.yaml:7: workload.trace: {spec_file.parent}/odd.csv: unknown trace format: it "
    said += "looks like CSV with"
    with pytest.raises(SpecError, match=said):
        load_spec(spec_file)


def test_extends_mistakes_name_the_file_they_are_in(tmp_path, spec_file):
    child = tmp_path / "child.yaml"
    child.write_text("extends: file.yaml\n\nengine: {block_siz: 8}\n")
    with pytest.raises(SpecError, match=r"child.yaml:3: engine.block_siz: unknown key"):
        load_spec(child)
    child.write_text(
        "extends: file.yaml\nworkload:\n  prompt_tokens:\n    distribution: fixed\n    tokns: 3\n"
    )
    with pytest.raises(SpecError, match=r"child.yaml:5: workload.prompt_tokens.tokns: "):
        load_spec(child)
    child.write_text("extends: file.yaml\npolicy:\n  name: static\n  max_batch_siz: 3\n")
    with pytest.raises(SpecError, match=r"child.yaml:4: policy.max_batch_siz: "):
        load_spec(child)
    child.write_text("extends: file.yaml\n")
    spec_file.write_text(YAML.replace("max_num_seqs", "max_num_sqs"))
    with pytest.raises(SpecError, match=r"file.yaml:2: engine.max_num_sqs: unknown key"):
        load_spec(child)
    child.write_text("extends: nothing.yaml\n")
    with pytest.raises(SpecError, match=r"child.yaml:1: extends: .*nothing.yaml: no such file"):
        load_spec(child)


def test_extends_two_levels_raises(tmp_path, spec_file):
    (tmp_path / "child.yaml").write_text("extends: file.yaml\n")
    (tmp_path / "grandchild.yaml").write_text("extends: child.yaml\n")
    with pytest.raises(SpecError, match="one level is allowed"):
        load_spec(tmp_path / "grandchild.yaml")


def test_make_spec_leaves_its_input_alone():
    data = {"workload": dict(WORKLOAD), "policy": {"name": "sjf", "predictor": "oracle"}}
    make_spec(data, ["policy.predictor.latency_s=0.1"])
    assert data == {"workload": WORKLOAD, "policy": {"name": "sjf", "predictor": "oracle"}}


def test_to_data_loads_back_to_an_equal_spec(spec_file):
    spec = load_spec(spec_file, ["policy={name: static, max_batch_size: null}"])
    assert spec.to_data()["policy"] == {"name": "static", "max_batch_size": None}
    assert make_spec(spec.to_data()) == spec


def test_vllm_dtype_names_are_understood():
    spec = make_spec({"workload": WORKLOAD, "engine": {"dtype": "bfloat16"}})
    assert (spec.engine.dtype, spec.engine.kv_cache_dtype) == ("bf16", "auto")


@pytest.mark.parametrize(
    ("cost_model", "message"),
    [
        ("roofine", "did you mean roofline?"),
        ({"memory_efficiency": 0.5}, "give a name, e.g. name: roofline, or profile: FOLDER"),
        (
            {"name": "roofine"},
            "cost_model.name: unknown cost model 'roofine'; did you mean roofline",
        ),
        ({"name": "roofline", "profile": PROFILE}, "cost_model.profile: roofline has no such knob"),
        ({"name": "roofline", "allow_mismatch": True}, "allow_mismatch: roofline has no such knob"),
        ({"name": "roofline", "memory_eficiency": 0.5}, "did you mean memory_efficiency"),
        ({"name": "roofline", "memory_efficiency": "0.5"}, "must be a number, got '0.5'"),
        ({"name": "roofline", "memory_efficiency": 1.5}, r"must be in \(0, 1\], got 1.5"),
        ({"name": "fitted"}, "fitted needs profile"),
        ({"profile": PROFILE, "memory_efficiency": 0.5}, "fitted has no such knob"),
        ({"profile": PROFILE, "separate_prefills": True}, "fitted has no such knob"),
        ({"profile": PROFILE, "allow_mismatch": 1}, "allow_mismatch: must be true or false, got 1"),
        ({"profile": str(Path(__file__).parent)}, "it holds none of fit.json, table.json"),
    ],
)
def test_cost_model_inconsistent_raises(cost_model, message):
    with pytest.raises(SpecError, match=message.replace("?", r"\?")):
        make_spec({"workload": WORKLOAD, "cost_model": cost_model})


def test_spec_hash_ignores_the_name_and_where_files_are(tmp_path):
    hashes = set()
    for folder, name in (("one", "a"), ("two", "b")):
        (tmp_path / folder).mkdir()
        trace = tmp_path / folder / f"{name}.csv"
        trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n")
        hashes.add(spec_hash(make_spec({"name": name, "workload": {"trace": str(trace)}})))
    assert len(hashes) == 1


def test_spec_hash_ignores_the_folder_that_a_tier_lies_in(tmp_path):
    def hashed(**more):
        tiers = [
            {"name": "cpu", "gib": 1, "link": "pcie-5"},
            {"name": "disk", "gib": 9, "link": "nvme-4", **more},
        ]
        engine = {"enable_prefix_caching": True, "kv_offload": {"tiers": tiers}}
        swept = {"engine.kv_offload": [None, {"tiers": tiers}]}
        data = {"engine": engine, "workload": WORKLOAD}
        return {spec_hash(make_spec(data)), spec_hash(make_spec({**data, "sweep": swept}))}

    assert hashed(path=str(tmp_path)) == hashed(path="/elsewhere") == hashed()
    assert hashed(write="back") != hashed()


@pytest.mark.parametrize("override", ["seed=1", "slo.ttft_ms=3", "policy=static", "replications=2"])
def test_spec_hash_changes_with_what_can_change_the_result(override):
    data = {"workload": WORKLOAD}
    assert spec_hash(make_spec(data)) != spec_hash(make_spec(data, [override]))


def test_spec_hash_changes_with_the_content_of_the_trace(tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n")
    spec = make_spec({"workload": {"trace": str(trace)}})
    before = spec_hash(spec)
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,2\n")
    assert spec_hash(spec) != before


def test_wrapper_of_a_policy_that_needs_predictions_needs_them_too():
    spec = {"name": "x", "workload": {"trace": "azure-conv", "num_requests": 1}}
    with pytest.raises(SpecError, match="boosted needs predictions"):
        make_spec({**spec, "policy": {"name": "boosted", "inner": "sjf"}})
    make_spec({**spec, "policy": {"name": "boosted", "inner": "priority"}})


def test_trace_path_with_an_unset_variable_names_the_variable(tmp_path, monkeypatch):
    monkeypatch.delenv("SOMEWHERE_ELSE", raising=False)
    with pytest.raises(SpecError, match="variable SOMEWHERE_ELSE is not set"):
        make_spec({"workload": {"trace": str(tmp_path / "${SOMEWHERE_ELSE}" / "trace.jsonl")}})


@pytest.mark.parametrize("key", ["real.weights", "validation.measured", "cost_model.profile"])
def test_path_with_a_name_too_long_is_refused_by_its_key(tmp_path, key):
    (tmp_path / "s.yaml").write_text("name: a\n")
    with pytest.raises(SpecError, match=rf"{key}.* is no path: .*too long"):
        load_spec(tmp_path / "s.yaml", {key: "x" * 6000})


def test_name_is_as_long_as_its_bytes():
    assert make_spec({"name": "ä" * 100, "workload": WORKLOAD}).name == "ä" * 100
    with pytest.raises(SpecError, match="no more than 200 bytes"):
        make_spec({"name": "ä" * 101, "workload": WORKLOAD})


def test_front_end_that_is_there_goes_before_one_of_its_name_that_comes_along(tmp_path):
    name, shipped = next(iter(shipped_frontends().items()))
    assert absolute_paths({"frontend": name}, tmp_path) == {"frontend": str(shipped.resolve())}
    (tmp_path / name).touch()
    own = str((tmp_path / name).resolve())
    assert absolute_paths({"frontend": name}, tmp_path) == {"frontend": own}


TRACE = {"trace": "azure-conv"}
DRAWN = {"prompt_tokens": 8, "output_tokens": 4, "num_requests": 3}
LOOP = {"arrivals": "closed_loop"}
STORIES = [
    # What stands together, and what is said of it, if it cannot.
    ({}, "give trace, load_test, sessions, or both prompt_tokens and output_tokens"),
    ({"prompt_tokens": 8, "num_requests": 3}, "give trace, load_test, sessions, or both"),
    ({"output_tokens": 8, "num_requests": 3}, "give trace, load_test, sessions, or both"),
    (DRAWN, None),
    ({**DRAWN, "num_requests": None}, "num_requests is required without a trace"),
    (TRACE, None),
    ({**TRACE, "resample": True, "request_rate": 2}, "num_requests is required without a trace"),
    ({**TRACE, "resample": True, "request_rate": 2, "num_requests": 3}, None),
    ({**TRACE, "request_rate": 2, "arrivals": "replay"}, "give request_rate or arrivals, not both"),
    ({**TRACE, **LOOP}, "arrivals: closed_loop needs max_concurrency"),
    ({**TRACE, **LOOP, "max_concurrency": 2}, None),
    ({**TRACE, "session_rate": 1, "request_rate": 2}, "give session_rate, request_rate or"),
    ({**TRACE, "session_rate": 1, "arrivals": "replay"}, "give session_rate, request_rate or"),
    ({**TRACE, "session_rate": 1}, None),
    ({**DRAWN, "think_s": 1}, "think_s: is of the sessions of a trace"),
    ({**DRAWN, "follow_sessions": True}, "follow_sessions: is of the sessions of a trace"),
    ({**TRACE, "think_s": 1, "follow_sessions": True}, None),
    ({**TRACE, "rate_scale": 2, **LOOP, "max_concurrency": 2}, "trace's own times, not closed"),
    ({**TRACE, "rate_scale": 2, "arrivals": "replay"}, None),
    ({**TRACE, "rate_scale": 2}, None),
    ({**TRACE, "rate_scale": 2, "request_rate": 2}, "own times; request_rate redraws them"),
    ({**TRACE, "burstiness": 2}, "burstiness needs a finite request_rate"),
    ({**TRACE, "burstiness": 2, "request_rate": "inf"}, "burstiness needs a finite request_rate"),
    ({**TRACE, "burstiness": 2, "request_rate": 2}, None),
    ({**TRACE, "slice": [3, 2]}, r"slice must end after it starts, got \[3.0, 2.0\]"),
    ({**TRACE, "slice": [2, 2]}, r"slice must end after it starts, got \[2.0, 2.0\]"),
    ({**TRACE, "slice": [2, 3]}, None),
]


@pytest.mark.parametrize(("keys", "said"), STORIES)
def test_keys_of_a_workload_that_contradict_each_other_are_refused_and_others_taken(keys, said):
    if said is None:
        Workload(**keys)
        return
    with pytest.raises(ValueError, match=said):
        Workload(**keys)


SESSIONS = {"count": 2, "turns": 2, "new_tokens": 8, "output_tokens": 4, "think_s": 1}
OWN = {"request_rate": 1.0}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trace", "azure-conv"), ("resample", True), ("request_rate", 2), ("burstiness", 2),
        ("slice", [1, 2]), ("rate_scale", 2), ("prompt_tokens", 3), ("output_tokens", 3),
        ("classes", {"a": {"share": 1}}), ("follow_sessions", True), ("think_s", 1),
    ],
)  # fmt: skip
def test_sessions_stand_alone(key, value):
    assert Workload(sessions=SESSIONS, session_rate=1).sessions.count == 2
    with pytest.raises(ValueError, match=f"{key}: not with sessions, which say that"):
        Workload(sessions=SESSIONS, session_rate=1, **{key: value})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "sessions start by session_rate or by arrivals"),
        ({"session_rate": 1, "arrivals": "replay"}, "sessions start by session_rate or by arriv"),
        ({"arrivals": "replay"}, "sessions that are drawn have no times to replay"),
        (LOOP, "closed_loop needs max_concurrency"),
        ({**LOOP, "max_concurrency": 3}, None),
        ({"session_rate": 1, "max_concurrency": 3}, None),
    ],
)
def test_sessions_start_by_one_of_two_ways(keys, said):
    if said is None:
        Workload(sessions=SESSIONS, **keys)
        return
    with pytest.raises(ValueError, match=said):
        Workload(sessions=SESSIONS, **keys)


@pytest.mark.parametrize(
    ("classes", "keys", "said"),
    [
        ({"a b": {"share": 1}}, {}, "classes: 'a b' is no name"),
        ({"a": OWN, "b": {"share": 1}}, {}, "classes: a has arrivals of its own, so b needs some"),
        ({"b": {"share": 1}, "a": OWN}, {}, "classes: a has arrivals of its own, so b needs some"),
        ({"a": OWN, "b": OWN}, {}, None),
        ({"a": OWN}, {"num_requests": None}, "num_requests is required where classes have arri"),
        ({"a": {"share": 1}}, {"num_requests": None}, None),
        ({"a": OWN}, {"request_rate": 2}, "request_rate: the classes have arrivals of their own"),
        ({"a": OWN}, {"arrivals": "replay"}, "arrivals: the classes have arrivals of their own"),
        ({"a": OWN}, {"rate_scale": 2}, "rate_scale: the classes have arrivals of their own"),
        ({"a": OWN}, {"max_concurrency": 2}, "max_concurrency: the classes have arrivals of thei"),
    ],
)
def test_classes_have_names_and_arrivals_all_of_them_or_none(classes, keys, said):
    given = {**TRACE, "num_requests": 5, "classes": classes, **keys}
    if said is None:
        Workload(**given)
        return
    with pytest.raises(ValueError, match=said):
        Workload(**given)


@pytest.mark.parametrize("deciding", ["router", "decode_router"])
def test_router_that_decides_by_targets_is_told_at_its_own_key(deciding):
    cluster = {
        "pools": {
            "prompts": {"role": "prefill", "count": 1}, "answers": {"role": "decode", "count": 1},
        },
        "router": "round_robin", "decode_router": "round_robin", deciding: "slo_aware",
    }  # fmt: skip
    asked = {"workload": {"trace": "azure-conv", "num_requests": 3}, "cluster": cluster}
    said = rf"^cluster\.{deciding}: slo_aware decides by targets, and no request has one; add "
    with pytest.raises(SpecError, match=said + r"slo\.ttft_ms or slo\.tpot_ms$"):
        make_spec(asked)
    assert make_spec(asked | {"slo": {"tpot_ms": 50}}).slo.tpot_ms == 50
