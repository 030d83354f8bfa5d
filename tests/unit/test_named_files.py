"""Files of a result: named without the folders of whoever ran it, found again by what they hold."""

import json
from pathlib import Path

import pytest
import yaml

from schedlab.experiments.commands import cli
from schedlab.experiments.specification import named_files
from schedlab.experiments.specification.loading import load_spec
from schedlab.experiments.specification.named_files import found_files, name_files
from schedlab.sim.errors import SpecError

TRACE = "arrival_s,prompt_tokens,output_tokens\n0,9,4\n1,9,4\n"
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with an experiment whose trace lies beside it, and whose model is a folder."""
    folder = tmp_path / "home" / "alice" / "project"
    (folder / "study" / "models" / "mine").mkdir(parents=True)
    (folder / "study" / "t.csv").write_text(TRACE)
    (folder / "study" / "models" / "mine" / "config.json").write_text(json.dumps(MODEL))
    (folder / "study" / "s.yaml").write_text(
        "{name: tiny, model: models/mine, workload: {trace: t.csv, request_rate: 4}}"
    )
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.chdir(folder)
    return folder


def run(monkeypatch, *argv):
    monkeypatch.setattr("sys.argv", ["schedlab", "run", *argv, "-q"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code


@pytest.mark.slow
def test_results_name_no_folder_above_the_working_directory(project, monkeypatch):
    run(monkeypatch, "study/s.yaml", "-o", "out", "sweep.policy=[fcfs, shortest_prompt]")
    files = [path for path in Path("out").rglob("*") if path.is_file()]
    assert len([path for path in files if path.name == "spec.yaml"]) == 3
    assert [path for path in files if b"alice" in path.read_bytes()] == []


@pytest.mark.slow
def test_result_moved_elsewhere_is_the_same_experiment_where_its_files_are(
    project, tmp_path, monkeypatch
):
    run(monkeypatch, "study/s.yaml", "-o", "out")
    before = load_spec("study/s.yaml")
    assert load_spec("out/spec.yaml") == before
    moved = Path("out").rename(tmp_path / "moved")
    assert load_spec(moved / "spec.yaml") == before  # the files are found from here
    project = project.rename(tmp_path / "copied")
    monkeypatch.chdir(project / "study")  # not where the run was
    assert load_spec(moved / "spec.yaml").workload.trace == str(project / "study" / "t.csv")


def test_result_whose_file_has_changed_is_refused_by_name(project, monkeypatch):
    run(monkeypatch, "study/s.yaml", "-o", "out")
    Path("study/t.csv").write_text(TRACE + "2,9,4\n")
    with pytest.raises(SpecError, match=r"files: \S*study/t\.csv does not hold what it held"):
        load_spec("out/spec.yaml")


def test_result_whose_file_is_gone_takes_another_that_is_named(project, monkeypatch):
    run(monkeypatch, "study/s.yaml", "-o", "out")
    Path("study/t.csv").rename("u.csv")
    with pytest.raises(SpecError, match=r"study/t\.csv"):
        load_spec("out/spec.yaml")
    assert load_spec("out/spec.yaml", ["workload.trace=u.csv"]).workload.trace == str(
        project / "u.csv"
    )


def test_profile_that_comes_with_the_program_goes_by_its_name():
    spec = load_spec("compare-cpu")
    kept = name_files(spec.to_data())
    assert not Path(kept["cost_model"]["profile"]).is_absolute()
    assert "files" not in kept


def test_folder_that_a_tier_lies_in_is_absolute_and_left_out_of_what_a_result_keeps(project):
    tiers = [
        {"name": "cpu", "gib": 1, "link": "pcie-5"},
        {"name": "disk", "gib": 9, "link": "nvme-4", "path": "scratch"},
    ]
    data = {"engine": {"enable_prefix_caching": True, "kv_offload": {"tiers": tiers}}}
    data["workload"] = {"trace": "t.csv", "request_rate": 4}
    (project / "study" / "s.yaml").write_text(yaml.safe_dump({"name": "tiny", **data}))
    spec = load_spec("study/s.yaml")
    assert spec.engine.kv_offload.tiers[1].path == str(project / "study" / "scratch")
    (project / "study" / "scratch").mkdir()
    kept = name_files(spec.to_data())
    assert "path" not in kept["engine"]["kv_offload"]["tiers"][1]
    assert kept["engine"]["kv_offload"]["tiers"][1]["name"] == "disk"
    assert list(kept["files"]) == ["study/t.csv"]
    swept = load_spec("study/s.yaml", [f"sweep.engine.kv_offload=[null, {{tiers: {tiers}}}]"])
    folder = swept.sweep["engine.kv_offload"][1]["tiers"][1]["path"]
    assert folder == str(project / "scratch")


@pytest.mark.parametrize("files", ["x", ["t.csv"], {"t.csv": 1}, {1: "x"}])
def test_files_that_are_no_mapping_of_hashes_are_refused(files):
    data = yaml.safe_load("workload: {trace: t.csv}")
    with pytest.raises(SpecError, match=r"s\.yaml:3: files: must map"):
        found_files({**data, "files": files}, Path.cwd(), "s.yaml:3")


def test_name_that_is_too_long_for_a_path_names_no_file():
    data = {"validation": {"measured": str(Path.cwd() / ("x" * 6000))}}
    assert name_files(data) == {"validation": {"measured": "x" * 6000}}


def test_file_of_a_result_is_looked_for_from_its_folder_up_then_from_ours_then_at_home(
    tmp_path, monkeypatch
):
    kept, here, home = tmp_path / "a" / "kept", tmp_path / "b" / "here", tmp_path / "home"
    places = [kept, kept.parent, tmp_path, here, here.parent, home]
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
        (place / "t.csv").write_text(TRACE)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    assert [path.parent for path in named_files._candidates("t.csv", kept)] == places
    monkeypatch.chdir(tmp_path)
    assert named_files._found("t.csv", named_files.content_hash(here / "t.csv"), kept, "r") == str(
        kept / "t.csv"
    )
    (kept / "t.csv").write_text("else")
    digest = named_files.content_hash(here / "t.csv")
    assert named_files._found("t.csv", digest, kept, "r") == str(kept.parent / "t.csv")
