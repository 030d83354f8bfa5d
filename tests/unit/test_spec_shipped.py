"""Experiments and profiles that come with the program go by name, from any folder."""

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from schedlab.experiments.commands.app import app
from schedlab.experiments.specification import checks
from schedlab.experiments.specification.loading import load_spec, make_spec
from schedlab.experiments.specification.shipped import (
    experiment_file,
    shipped_experiments,
    shipped_profiles,
    title,
)
from schedlab.experiments.specification.starter import write_starter
from schedlab.sim.errors import SpecError

ROOT = Path(__file__).resolve().parents[2]
WORKLOAD = {"trace": "azure-conv", "num_requests": 10, "request_rate": 2.0}
PROFILE = "profiles/cpu/schedlab-small/fp32-tp1"
PROFILE_OF_VLLM = "profiles/cpu/schedlab-mini/vllm-fp32-tp1"
PROFILE_OF_H200 = "profiles/h200/llama-3-8b/bf16-tp1"


def test_shipped_experiments_have_one_name_each():
    files = [*ROOT.glob("experiments/*.yaml"), *ROOT.glob("experiments/papers/*/*.yaml")]
    assert [n for n, times in Counter(f.stem for f in files).items() if times > 1] == []
    assert set(shipped_experiments().values()) == set(files)


def test_pipe_and_device_are_called_what_they_are_wherever_a_file_is_named(tmp_path):
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    reads, writes = os.pipe()
    found = [pipe, Path("/dev/null"), Path(f"/dev/fd/{reads}")]
    for path in filter(Path.exists, found):
        told = f"{path}: cannot be read: it is not a file but a pipe, a socket or a device"
        with pytest.raises(SpecError, match=f"^{told}$"):
            experiment_file(path)
        for key, data in (
            ("workload.trace", {"workload": {"trace": str(path)}}),
            (
                "frontend",
                {"workload": {"trace": "fixed", "num_requests": 1}, "frontend": str(path)},
            ),
        ):
            with pytest.raises(SpecError, match=f"{key}: {told}"):
                make_spec({"name": "x", **data})
    os.close(reads)
    os.close(writes)


@pytest.mark.parametrize("name", sorted(shipped_experiments()))
def test_shipped_experiment_says_what_it_asks(name):
    path = shipped_experiments()[name]
    assert len(title(path)) > 20
    assert "yaml-language-server" not in title(path)
    first = path.read_text().split("\n", 1)[0]
    schema = path.parent / first.removeprefix("# yaml-language-server: $schema=")
    assert schema.resolve() == (ROOT / "experiments" / "schedlab.schema.json").resolve()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "sarathi", "block-size"])
def test_load_spec_takes_the_name_of_a_shipped_experiment(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_spec(name).to_data() == load_spec(shipped_experiments()[name]).to_data()


def test_experiment_file_prefers_what_stands_on_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").write_text("seed: 1\n")
    assert experiment_file("quickstart") == Path("quickstart")


def test_folder_in_place_of_an_experiment_is_told_with_the_experiment_inside(tmp_path):
    (tmp_path / "runs.yaml").mkdir()
    (tmp_path / "run.yaml").write_text("seed: 1\n")
    said = "runs.yaml is a folder, and an experiment is a file"
    with pytest.raises(SpecError, match=f"{said}$"):
        experiment_file(tmp_path / "runs.yaml")
    (tmp_path / "runs.yaml" / "spec.yaml").write_text("seed: 1\n")
    with pytest.raises(SpecError, match=f"{said}; that of these results is .*runs.yaml.spec.yaml$"):
        experiment_file(tmp_path / "runs.yaml")


@pytest.mark.parametrize("folder", ["", "experiments/"])
@pytest.mark.parametrize("wrong", ["quikstart", "quickstart.yaml"])
def test_experiment_file_names_the_nearest_name(folder, wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=f"^{folder}{wrong}: no such file; quickstart comes with"):
        experiment_file(folder + wrong)


def test_shipped_profile_is_found_by_name_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert list(shipped_profiles()) == [PROFILE_OF_VLLM, PROFILE, PROFILE_OF_H200]
    for cost_model in (PROFILE, {"profile": PROFILE}):
        spec = make_spec({"workload": WORKLOAD, "cost_model": cost_model})
        assert spec.cost_model.profile == str(ROOT / PROFILE)


def test_profile_on_disk_is_preferred_to_a_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / PROFILE, tmp_path / PROFILE)
    spec = make_spec({"workload": WORKLOAD, "cost_model": PROFILE})
    assert spec.cost_model.profile == str(tmp_path / PROFILE)


def test_unknown_profile_names_the_nearest_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=f"cost_model: .* did you mean {PROFILE}"):
        make_spec({"workload": WORKLOAD, "cost_model": "profiles/cpu/schedlab-smal/fp32-tp1"})


def test_examples_command_lists_every_shipped_experiment():
    done = CliRunner().invoke(app, ["examples"])
    assert done.exit_code == 0
    for name in shipped_experiments():
        assert f"\n{name} " in done.output


def test_experiment_is_found_by_its_earlier_name():
    assert experiment_file("azure-conv") == shipped_experiments()["azure-replay"]


@pytest.mark.slow
@pytest.mark.parametrize("is_there", [False, True])
def test_starter_for_which_the_disk_has_no_room_is_not_there_by_halves(
    tmp_path, full_disk, is_there
):
    folder = tmp_path / "new"
    if is_there:
        folder.mkdir()
        (folder / "own.txt").write_text("mine")
    with (
        full_disk(16384),
        pytest.raises(OSError, match=rf"too large: '{folder}/schedlab\.schema\.json'"),
    ):
        write_starter(folder)
    assert sorted(path.name for path in folder.rglob("*")) == ["own.txt"] * is_there
    assert folder.exists() == is_there


@pytest.mark.slow
def test_starter_overwrites_nothing_that_is_there(tmp_path):
    for name in ("spec.yaml", "longest_first.py"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("mine")
        with pytest.raises(SpecError, match=f"{name} is there already"):
            write_starter(folder)
        assert [(path.name, path.read_text()) for path in folder.iterdir()] == [(name, "mine")]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("profiles/cpu/x", "profiles/cpu/x"), ("/a/profiles/b/profiles/cpu/x", "profiles/cpu/x"),
        ("../profiles/x", "profiles/x"), ("some/where/x", "x"), ("x", "x"),
    ],
)  # fmt: skip
def test_path_may_be_meant_as_a_shipped_profile_from_the_last_folder_of_them(path, name):
    assert checks._profile_name(path) == name
