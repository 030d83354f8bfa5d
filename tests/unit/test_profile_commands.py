import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from schedlab.experiments.commands.app import app
from schedlab.experiments.comparing import calibrate, fitted_profile, host_terms
from schedlab.sim.cost.profile import RunLevel, read_fit
from schedlab.sim.errors import SpecError
from tests.data_folder import data_folder

SPEC = Path(__file__).resolve().parents[2] / "experiments/validate-rtx4090.yaml"
BUNDLE = "vllm_ground_truth/perf/RTX4090/meta-llama/Llama-3.1-8B/bf16"


def schedlab(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_import_of_a_missing_bundle_is_one_line_and_exit_code_2(tmp_path):
    done = schedlab("profile", "import", "llmservingsim", tmp_path, "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert "meta.yaml: no such file" in done.stderr
    assert not (tmp_path / "out").exists()


def test_validation_without_a_recording_says_which_key_is_missing(tmp_path):
    spec = tmp_path / "spec.yaml"
    spec.write_text("workload: {trace: azure-conv, num_requests: 5}\n")
    done = schedlab("validate", spec)
    assert done.exit_code == 2
    assert "validation: is required here" in done.stderr


def test_missing_profile_says_how_to_get_one(monkeypatch):
    monkeypatch.setenv("SCHEDLAB_DATA", "/nowhere")
    done = schedlab("validate", SPEC, "cost_model=/nowhere/either")
    assert done.exit_code == 2
    assert "schedlab profile import" in done.stderr


@pytest.mark.slow
def test_imported_profile_predicts_a_recorded_run(tmp_path, monkeypatch):
    monkeypatch.setenv("SCHEDLAB_DATA", str(data_folder()))
    imported = schedlab(
        "profile", "import", "llmservingsim", data_folder() / BUNDLE, "-o", tmp_path / "p"
    )
    assert imported.exit_code == 0
    assert "assumed: kernel time in eager mode" in imported.stdout
    arguments = ("validate", SPEC, f"cost_model={tmp_path / 'p'}")
    table = schedlab(*arguments).stdout
    assert "mean absolute error 0.45%" in table
    assert "preemptions 194; recomputed tokens 110,596; prefix hit tokens 4,848" in table
    assert "every step inside the measured range" in table
    data = json.loads(schedlab(*arguments, "--json").stdout)
    assert data["mean_absolute_error"] == pytest.approx(0.0045, abs=1e-4)
    assert data["latencies_ms"]["TTFT Mean"]["measured"] == pytest.approx(65456.6, abs=0.05)


@pytest.fixture
def two_runs(tmp_path, monkeypatch):
    """Return two experiments, and what the command was asked to predict and to fit."""
    asked = []

    def stop(spec, fitted_on, progress=None):
        asked.append((spec, fitted_on))
        raise SpecError("enough")

    monkeypatch.setattr(host_terms, "validate_elsewhere", stop)
    for name in ("here", "there"):
        text = "workload: {trace: azure-conv, num_requests: 5}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path / "here.yaml", tmp_path / "there.yaml", asked


def test_changes_reach_both_runs_or_the_one_they_are_for(two_runs):
    here, there, asked = two_runs
    done = schedlab(
        "validate", here, "engine.max_num_seqs=7", "--fitted-on", there,
        "--spec-only", "engine.block_size=32", "--spec-only", "seed=3",
        "--other-only", "engine.block_size=64",
    )  # fmt: skip
    assert "enough" in done.stderr
    ((spec, other),) = asked
    assert (spec.engine.max_num_seqs, spec.engine.block_size, spec.seed) == (7, 32, 3)
    assert (other.engine.max_num_seqs, other.engine.block_size, other.seed) == (7, 64, 0)


@pytest.mark.parametrize("option", ["--spec-only", "--other-only"])
def test_change_of_one_run_where_there_is_no_other_is_refused(two_runs, option):
    done = schedlab("validate", two_runs[0], option, "seed=3")
    assert done.exit_code == 2
    assert f"{option} needs --fitted-on" in done.stderr


@pytest.mark.slow
def test_refit_of_the_shipped_profile_of_a_gpu_gives_its_fit_without_torch(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    shipped = SPEC.parents[1] / "profiles/h200/llama-3-8b/bf16-tp1"
    done = schedlab("profile", "refit", shipped, "-o", tmp_path / "new")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("POOR (bar: 6% and 2%): held-out error 2.3% on average")
    assert "mixed 3.1% +2.5%" in done.stdout
    assert "level of single batches" in done.stdout
    fit, again = read_fit(shipped), read_fit(tmp_path / "new")
    assert again.run_level == fit.run_level == RunLevel()
    assert (fit.eager.tile_tokens, fit.graph.tile_tokens) == (64, 1)
    for regime, other in ((fit.eager, again.eager), (fit.graph, again.graph)):
        assert other.knots_tokens == regime.knots_tokens
        assert other.tile_tokens == regime.tile_tokens
        assert other.knots_s == pytest.approx(regime.knots_s, rel=1e-6, abs=1e-9)
        assert other.coefficients_s == pytest.approx(regime.coefficients_s, rel=1e-4, abs=1e-15)
    for name in ("points.jsonl", "residuals.json", "residuals.png"):
        assert (tmp_path / "new" / name).stat().st_size > 1000
    none = schedlab("profile", "refit", shipped, "-o", tmp_path / "x", "--level-of", tmp_path)
    assert none.exit_code == 2
    assert "plan_log.jsonl.gz: no steps of a kept run" in none.stderr
    assert not (tmp_path / "x").exists()


@pytest.fixture
def measured(tmp_path):
    """Return the folder of a profile of one batch, and its files as they are to be changed."""
    point = {"kind": "prefill", "features": [0, 0, 0], "chunks": [[8, 0]], "measured_s": 0.01}
    meta = {
        "model": "schedlab-tiny", "hardware": "cpu", "dtype": "fp32", "tensor_parallel_size": 1,
        "graph_buckets": [], "swap_times": [], "seed": 0,
        "scheduling_overhead": {}, "sentinel_drift_by_round": [0.0],
    }  # fmt: skip
    files = {"meta.json": meta, "residuals.json": {"points": [point]}, "run_steps.jsonl": point}
    return tmp_path / "measured", files


def written(folder, files):
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_text(json.dumps(data) + "\n")
    (folder / "points.jsonl").write_text("{}\n")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("took_s", [-0.01, 0.0, float("inf"), float("nan"), "0.1"])
@pytest.mark.parametrize("name", ["residuals.json", "run_steps.jsonl"])
def test_refit_of_a_time_that_is_none_names_file_place_and_key(measured, name, took_s):
    folder, files = measured
    where = {"residuals.json": "residuals.json: points[0]", "run_steps.jsonl": "run_steps.jsonl:1"}
    point = {**files["run_steps.jsonl"], "measured_s": took_s}
    files[name] = {"points": [point]} if name == "residuals.json" else point
    before = written(folder, files)
    with pytest.raises(SpecError) as refused:
        fitted_profile.refit(folder, folder)
    assert f"{where[name]}: measured_s must be a number above 0" in str(refused.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("key", ["scheduling_overhead", "sentinel_drift_by_round"])
def test_refit_of_a_profile_that_lacks_a_key_leaves_it_as_it_was(measured, key):
    folder, files = measured
    del files["meta.json"][key]
    before = written(folder, files)
    with pytest.raises(SpecError, match=key):
        fitted_profile.refit(folder, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_refit_into_a_folder_with_an_imported_profile_is_refused(measured, tmp_path):
    folder, files = measured
    written(folder, files)
    imported = tmp_path / "imported"
    imported.mkdir()
    (imported / "table.json").write_text("{}")
    with pytest.raises(SpecError, match=r"imported: holds a profile of another kind \(table\.json"):
        fitted_profile.refit(folder, imported)
    assert [path.name for path in imported.iterdir()] == ["table.json"]


def test_calibration_into_a_folder_with_an_imported_profile_measures_nothing(tmp_path):
    (tmp_path / "table.json").write_text("{}")
    with pytest.raises(SpecError, match=r"holds a profile of another kind \(table\.json"):
        calibrate.calibrate(
            tmp_path, model_name="schedlab-tiny", hardware="cpu", device="cpu", dtype="fp32",
            config=None,
        )  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


def test_fit_of_which_nothing_was_held_out_is_not_judged():
    nothing = SimpleNamespace(mape=0.0, p90=0.0, bias=0.0, num_points=0)
    said = fitted_profile.verdict(SimpleNamespace(held_out=nothing), {}, [0.5])
    assert said.startswith("NOT JUDGED: no batch was held out")
    assert "sentinels moved by up to 50.0%" in said


@pytest.mark.parametrize("writes_steps", [False, True])
@pytest.mark.parametrize("has_steps", [False, True])
def test_refit_says_whose_level_its_steps_have_by_what_it_wrote_not_by_what_it_read(
    monkeypatch, tmp_path, has_steps, writes_steps
):
    asked = []

    def refit(profile, output, level_of):
        asked.append((profile, output, level_of))
        output.mkdir()
        if writes_steps:
            (output / fitted_profile.RUN_STEPS).write_text("{}")
        return SimpleNamespace(verdict="GOOD")

    monkeypatch.setattr(fitted_profile, "refit", refit)
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    if has_steps:
        (old / fitted_profile.RUN_STEPS).write_text("{}")
    done = schedlab("profile", "refit", old, "-o", new, "--level-of", "a", "--level-of", "b")
    assert asked == [(old, new, [Path("a"), Path("b")])]
    note = ["its steps are at the level of single batches; --level-of RUN takes a run's"]
    assert done.stdout.splitlines() == ["GOOD", *note * (not writes_steps), f"profile: {new}"]
