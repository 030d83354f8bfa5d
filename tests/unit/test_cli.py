"""The command line: what it writes, prints and answers to mistakes."""

import csv
import errno
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from schedlab.experiments.commands import app as app_module
from schedlab.experiments.commands import cli, experiment
from schedlab.experiments.commands.app import app
from schedlab.experiments.comparing.calibrated_engine import chat
from schedlab.experiments.specification.loading import load_spec
from schedlab.policies import registry
from schedlab.policies.predictors import registry as predictors
from schedlab.sim.config import EngineConfig
from schedlab.sim.cost import registry as cost_models
from schedlab.sim.cost.pricing import ExtrapolationWarning
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.gpus import gpu, gpu_names
from schedlab.sim.hardware.models import model, model_names
from schedlab.sim.result import RunResult

ROOT = Path(__file__).resolve().parents[2]
YAML = """\
name: tiny
workload: {trace: fixed, num_requests: 12, request_rate: 4}
slo: {ttft_ms: 1000}
"""


@pytest.fixture
def spec_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    path.write_text(YAML)
    return path


def schedlab(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_run_single_point_writes_result_tables_and_resolved_spec(spec_file):
    done = schedlab("run", spec_file)
    assert done.exit_code == 0, done.output
    folder = Path("results/tiny")
    assert {path.name for path in folder.iterdir()} == {
        ".schedlab.json", "gaps.parquet", "point.json", "preemptions.parquet",
        "requests.parquet", "result.json", "spec.yaml", "steps.parquet",
        "stints.parquet", "tokens.parquet",
    }  # fmt: skip
    result = RunResult.load(folder)
    assert result.metrics()["completed"] == 12
    assert load_spec(folder / "spec.yaml") == load_spec(spec_file)


def test_result_names_its_files_from_the_working_directory(spec_file):
    Path("traces").mkdir()
    Path("traces/t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,9,4\n1,9,4\n")
    spec_file.write_text("{name: tiny, workload: {trace: traces/t.csv}}")
    assert schedlab("run", spec_file).exit_code == 0
    text = Path("results/tiny/result.json").read_text()
    assert str(Path.cwd()) not in text
    origin = json.loads(text)["schedlab"]["provenance"]
    assert origin["spec"]["workload"]["trace"] == "traces/t.csv"
    assert origin["workload"][0] == "source: traces/t.csv (schedlab)"
    assert load_spec("results/tiny/spec.yaml") == load_spec(spec_file)


def test_run_prints_table_cost_model_and_folder(spec_file):
    done = schedlab("run", spec_file, "policy=static", "-o", "out")
    assert "static" in done.stdout
    assert "TTFT" in done.stdout
    assert "roofline (llama-3-8b on a100-80gb), UNCALIBRATED" in done.stdout
    assert "results: out" in done.stdout


def test_run_warns_of_rejected_requests_with_a_reason(spec_file):
    done = schedlab("run", spec_file, "engine.max_model_len=500", "workload.num_requests=3")
    assert "warning: 3 of 3 requests rejected, e.g.: " in done.stdout


def test_run_warns_of_clipped_prompts(spec_file):
    done = schedlab(
        "run", spec_file, "workload.max_total_tokens=600", "workload.too_long=clip_prompt"
    )
    assert "warning: 12 prompts clipped to fit" in done.stdout


@pytest.mark.slow
def test_run_sweep_writes_points_summary_and_figure(spec_file):
    done = schedlab(
        "run", spec_file, "-o", "out", "replications=2", "sweep.policy=[fcfs, static]",
        "sweep.workload.request_rate=[2, 4]",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    folder = Path("out")
    assert len(list(folder.glob("*/result.json"))) == 8
    with (folder / "summary.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["policy"] for row in rows] == ["fcfs", "fcfs", "static", "static"]
    assert [float(row["workload.request_rate"]) for row in rows] == [2, 4, 2, 4]
    assert {row["num_replications"] for row in rows} == {"2"}
    points = json.loads((folder / "points.json").read_text())["points"]
    assert [point["replication"] for point in points] == [0, 1] * 4
    runs = [
        json.loads((folder / point["folder"] / "result.json").read_text()) for point in points[:2]
    ]
    assert float(rows[0]["mean_ttft_ms"]) == pytest.approx(sum(r["mean_ttft_ms"] for r in runs) / 2)
    summary = json.loads((folder / "summary.json").read_text())
    assert [row["label"] for row in summary["rows"]] == [row["label"] for row in rows]
    assert (folder / "throughput_p99.png").stat().st_size > 10_000
    assert (folder / "throughput_p99.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_run_same_spec_twice_gives_the_same_bytes(spec_file, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    sweep = "sweep.workload.request_rate=[2, 4]"
    for folder in ("one", "two"):
        assert schedlab("run", spec_file, sweep, "-o", folder).exit_code == 0
    files = sorted(p.relative_to("one") for p in Path("one").rglob("*") if p.is_file())
    assert len(files) > 10
    for file in files:
        one, two = (Path(folder, file).read_bytes() for folder in ("one", "two"))
        if file.name == "point.json":  # how long a run took is no part of its result
            one, two = ({**json.loads(text), "seconds": 0} for text in (one, two))
        assert one == two, file


def test_run_json_prints_only_json(spec_file):
    done = schedlab("run", spec_file, "--json")
    summary = json.loads(done.stdout)
    assert summary["name"] == "tiny"
    assert summary["rows"][0]["metrics"]["completed"] == 12
    assert summary["cost_models"][0]["calibration"] == "UNCALIBRATED"


@pytest.mark.slow
def test_run_quiet_prints_nothing(spec_file):
    done = schedlab("run", spec_file, "--quiet")
    assert (done.exit_code, done.output) == (0, "")


def test_run_perfetto_writes_a_chrome_trace(spec_file):
    assert schedlab("run", spec_file, "--perfetto", "-o", "out").exit_code == 0
    trace = json.loads(Path("out/trace.json").read_text())
    assert len(trace["traceEvents"]) > 12


@pytest.mark.slow
def test_run_takes_a_policy_from_beside_the_file(spec_file, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (spec_file.parent / "my_own_policy.py").write_text(
        "from schedlab.policies import ContinuousBatching\n"
        "class Mine(ContinuousBatching):\n    source = 'mine'\n"
    )
    done = schedlab("run", spec_file, "policy=my_own_policy:Mine")
    assert done.exit_code == 0, done.output
    assert "my_own_policy:Mine" in done.stdout


HOSTILE = "raise ImportError('a module of the user was imported in place of ours')\n"


@pytest.mark.slow
def test_modules_of_the_user_never_stand_in_for_ours(tmp_path):
    """Neither in the working directory nor beside the file, here or in workers."""
    beside = tmp_path / "beside"
    for folder in (tmp_path, beside):
        for name in ("sim.py", "policies.py", "traces.py", "experiments/__init__.py"):
            path = folder / name
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(HOSTILE)
    spec_file = beside / "tiny.yaml"
    spec_file.write_text(YAML)
    (beside / "lottery.py").write_text(
        "from schedlab.policies import ContinuousBatching\n"
        "class Mine(ContinuousBatching):\n    source = 'mine'\n"
    )
    options = [spec_file, "-o", "out", "policy=lottery:Mine"]
    done = subprocess.run(
        [sys.executable, "-m", "schedlab", "sweep", "-j", "2", *options], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "lottery:Mine" in done.stdout


@pytest.mark.slow
def test_run_again_replaces_results(spec_file):
    for seed in (1, 2):
        assert schedlab("run", spec_file, f"seed={seed}").exit_code == 0
    assert load_spec("results/tiny/spec.yaml").seed == 2


def test_run_refuses_a_folder_with_other_files_before_running(spec_file, monkeypatch):
    monkeypatch.setattr("schedlab.experiments.running.run.run", lambda *_: pytest.fail("ran"))
    (spec_file.parent / "mine").mkdir()
    (spec_file.parent / "mine" / "thesis.tex").write_text("years of work")
    done = schedlab("run", spec_file, "-o", "mine")
    assert done.exit_code == 2
    assert "thesis.tex" in done.stderr
    assert Path("mine/thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.yaml"], "error: nothing.yaml: no such file"),
        (["tiny.yaml", "engine.max_num_seq=3"], "did you mean max_num_seqs?"),
        (["tiny.yaml", "engine.max_model_len=100000000"], "does not fit the KV cache"),
    ],
)
def test_run_user_error_is_one_line_and_exit_2(spec_file, arguments, message):
    done = schedlab("run", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not Path("results").exists() or not any(Path("results").iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nope"], r"error: No such option:? '?--nope'?; see"),
        (["rn"], r"error: No such command 'rn'\. Did you mean 'run'\?; see"),
        (["run", "--outpt", "x"], "No such option:? '?--outpt"),
        (
            ["run", "tiny.yaml", "-j", "0"],
            "(greater than or equal to 1|not in the range x>=1); see",
        ),
        (["run"], "error: Missing argument 'SPEC'; see"),
        (["trace", "nope"], "No such command 'nope'; see"),
        (["claims", "--page", "9" * 5000], r"9\.\.\. \(5,0"),
        (["run", "tiny.yml"], r"error: tiny.yml: no such file; did you mean tiny.yaml\?"),
        (["plot", "nope"], "nope: no such folder"),
        (["plot", "tiny.yaml"], "tiny.yaml: is a file, and results are a folder"),
        (["run", "tiny.yaml", "scheduler=fcfs"], "scheduler: unknown key; here it is policy"),
    ],
)
def test_misused_command_says_so_in_one_line(spec_file, arguments, message):
    done = schedlab(*arguments)
    assert done.exit_code == 2
    assert re.search(message, done.stderr)  # in the words of the Typer that is installed
    assert done.stderr.count("\n") == 1


def test_message_names_the_experiment_in_hand_unless_it_says_where_already(monkeypatch):
    monkeypatch.setattr(experiment, "_in_hand", ["tiny.yaml"])
    assert experiment.with_experiment("too small") == "tiny.yaml: too small"
    for message in ("tiny.yaml:3: too small", "override 'seed=x': too small"):
        assert experiment.with_experiment(message) == message


def test_check_reads_the_workload_to_its_end(spec_file):
    Path("t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,9,4\n1,9,x\n")
    done = schedlab("check", spec_file, "workload={trace: t.csv}")
    assert done.exit_code == 2
    assert "t.csv:3: output_tokens is 'x', expected a number" in done.stderr


def test_check_refuses_what_leaves_nothing_to_measure(spec_file):
    done = schedlab("check", spec_file, "measure.warm_up_s=1e6")
    assert done.exit_code == 2
    assert "measure: nothing is left: requests arrive for" in done.stderr


@pytest.mark.slow
def test_runs_that_fail_for_one_reason_say_it_once(spec_file):
    Path("t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,9,4\n1,9,x\n")
    done = schedlab(
        "sweep", spec_file, "-j", "1", "-o", "out", "workload={trace: t.csv}", "replications=3"
    )
    assert done.exit_code == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("failed: ")]
    assert len(lines) == 2
    assert "output_tokens is 'x'" in lines[0]
    assert lines[1] == "failed: 2 more points, for the same reason"


def test_policy_that_never_starts_anybody_is_told_so_in_one_line(spec_file):
    Path("idle.py").write_text(
        "from schedlab.policies import ContinuousBatching\n\n\n"
        "class Idle(ContinuousBatching):\n"
        "    def hold(self, state, view):\n        return True\n"
    )
    done = schedlab("run", spec_file, "policy=idle:Idle")
    assert done.exit_code == 2
    assert "stalled at t = " in done.stderr
    assert "0 generated>" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("group", ["trace", "profile", "predictor", "regress"])
def test_group_without_a_command_shows_its_help(group):
    assert schedlab(group).output == schedlab(group, "--help").output


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "No space left on device"),
    ],
)
def test_run_cut_short_leaves_the_old_results(spec_file, monkeypatch, error, code, message):
    assert schedlab("run", spec_file, "-o", "out").exit_code == 0
    before = Path("out/result.json").read_bytes()

    def fail(*_):
        raise error

    monkeypatch.setattr(RunResult, "save", fail)
    done = schedlab("run", spec_file, "-o", "out", "seed=1")
    assert done.exit_code == code
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert Path("out/result.json").read_bytes() == before
    assert sorted(path.name for path in Path().iterdir()) == ["out", "tiny.yaml"]


def test_run_bug_is_a_traceback_not_a_line(spec_file, monkeypatch):
    monkeypatch.setattr(RunResult, "save", lambda *_: 1 / 0)
    done = schedlab("run", spec_file)
    assert done.exit_code == 1
    assert isinstance(done.exception, ZeroDivisionError)


@pytest.mark.slow
def test_plot_draws_into_the_folder_which_stays_replaceable(spec_file, blank_figures):
    assert schedlab("run", spec_file, "-o", "out").exit_code == 0
    done = schedlab("plot", "out")
    assert done.exit_code == 0, done.output
    assert Path("out/gantt.png") in map(Path, done.stdout.split())
    assert schedlab("run", spec_file, "-o", "out").exit_code == 0
    assert not Path("out/gantt.png").exists()


def test_plot_folder_without_results_is_an_error(spec_file):
    done = schedlab("plot", spec_file.parent)
    assert done.exit_code == 2
    assert "holds no results" in done.stderr


def test_metrics_by_name_finds_statistics_that_the_whole_list_leaves_to_their_mean():
    found = schedlab("metrics", "p99_ttft_ms", "--json")
    assert [row["name"] for row in json.loads(found.stdout)["metrics"]] == ["p99_ttft_ms"]
    listed = [row["name"] for row in json.loads(schedlab("metrics", "--json").stdout)["metrics"]]
    assert "mean_ttft_ms" in listed
    assert "p99_ttft_ms" not in listed


def test_policies_lists_every_registered_policy_and_its_knobs():
    output = schedlab("policies").stdout
    assert all(name in output for name in registry.names())
    assert "max_batch_size" in output
    assert "kendall_tau" in output


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["models", "meta-llama/Llama-3.3-70B-Instruct"], "llama-3.1-70b"),
        (["gpus", "NVIDIA H200"], "h200"),
    ],
)
def test_models_and_gpus_find_what_their_keys_take(arguments, found):
    assert f"\n{found} " in schedlab(*arguments).stdout


@pytest.mark.parametrize("limit", ["-5", "nan"])
@pytest.mark.parametrize("command", [("calibrate", "-o", "p"), ("measure", "tiny.yaml")])
def test_time_limit_that_is_no_time_is_refused(spec_file, monkeypatch, command, limit):
    for module in ("calibrate", "compare"):
        path = f"schedlab.experiments.comparing.{module}.{module}"
        monkeypatch.setattr(path, lambda *_, **__: pytest.fail("was begun"))
    done = schedlab(*command, "--time-limit-s", limit)
    assert done.exit_code == 2
    assert re.search(rf"--time-limit-s.* must be >= 0, got {limit}; see", done.stderr)


def test_calibration_that_no_request_fits_names_the_option():
    limits = EngineConfig(num_blocks=4, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16)
    with pytest.raises(SpecError, match=r"max_model_len 64: none of .* more \(--max-model-len, "):
        chat(limits, 4, seed=0)


@pytest.mark.parametrize("command", ["run", "calibrate", "trace", "profile"])
def test_help_tells_no_types_of_python(command):
    for more in ([], ["convert"] if command == "trace" else []):
        told = schedlab(command, *more, "--help").stdout
        assert not re.search(r"<(list|int|str|float|path)", told), told


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["1", ""])
@pytest.mark.parametrize("command", ["schema", "version", "--help"])
def test_output_that_a_full_disk_does_not_take_ends_in_one_line(tmp_path, unbuffered, command):
    resource = pytest.importorskip("resource")
    limit = 4096 if command == "schema" else 4
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "schedlab", command],
            stdout=out, stderr=subprocess.PIPE, text=True, check=False,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, f"error: [Errno {errno.EFBIG}] File too large\n")
    assert (tmp_path / "out").stat().st_size == limit


def test_models_and_gpus_list_every_name():
    models, gpus = schedlab("models").stdout, schedlab("gpus").stdout
    assert all(name in models for name in model_names())
    assert all(name in gpus for name in gpu_names())


def listed(command, kind, *more):
    rows = json.loads(schedlab(command, *more, "--json").stdout)[kind]
    return {row["name"]: row for row in rows}


def test_cells_of_lists_of_models_and_gpus_are_facts_of_their_own():
    models, gpus = listed("models", "models"), listed("gpus", "GPUs")
    assert (list(models), list(gpus)) == (list(model_names()), list(gpu_names()))
    for name, row in models.items():
        shape = model(name)
        assert float(row["parameters"].removesuffix(" B")) == round(shape.num_parameters / 1e9, 2)
        assert int(row["layers"]) == shape.num_layers
        kv_bytes = int(row["KV B/token (bf16)"].replace(",", ""))
        assert kv_bytes == shape.kv_bytes_per_token("bf16")
        assert int(row["max_model_len"].replace(",", "")) == shape.max_model_len
        assert row["source"] == shape.source
    for name, row in gpus.items():
        device = gpu(name)
        assert float(row["memory GiB"]) == round(device.memory_bytes / 1024**3, 1)
        assert float(row["bandwidth TB/s"]) == round(device.memory_bytes_per_s / 1e12, 2)
        flops = device.flops_per_s.get("bf16")
        told = row["dense bf16 TFLOP/s"]
        assert told == ("-" if flops is None else f"{flops / 1e12:.0f}")
        usd = device.usd_per_hour
        assert row["USD/hour"] == ("-" if usd is None else f"{usd:.2f}")
        assert row["source"] == device.source


def test_cells_of_lists_of_policies_predictors_and_cost_models_are_what_classes_say():
    for kind, command, of in (
        ("policies", "policies", registry.policy_class),
        ("predictors", "policies", predictors.predictor_class),
        ("cost models", "cost-models", cost_models.maker),
    ):
        for name, row in listed(command, kind).items():
            one = of(name)
            needs = getattr(one, "needs_prediction", False) and kind == "policies"
            first_line = one.__doc__.strip().splitlines()[0]
            assert row["purpose"] == first_line + (" Needs a predictor." if needs else "")
            knobs = cost_models.knobs(name) if kind == "cost models" else one.knobs()
            told = dict(knob.partition("=")[::2] for knob in row["knobs"].split(", "))
            assert set(told) in ({"-"}, set(knobs)) or "(" in row["knobs"]
            if kind == "cost models":
                assert row["profile"] == cost_models.profile_files().get(name, "-")
            else:
                assert row["source"] == one.source
    assert list(listed("policies", "policies", "CFS")) == ["fcfs", "program_fcfs"]


def test_doctor_names_versions_and_what_is_missing(monkeypatch):
    monkeypatch.delenv("SCHEDLAB_DATA", raising=False)
    done = schedlab("doctor")
    assert done.exit_code == 0
    assert "numpy" in done.stdout
    assert "SCHEDLAB_DATA is not set" in done.stdout


@pytest.mark.slow
def test_schema_prints_json():
    assert json.loads(schedlab("schema").stdout)["title"] == "ExperimentSpec"


def test_trace_commands_are_mounted():
    done = schedlab("trace", "describe", "no-such-file.csv")
    assert done.exit_code == 2
    assert "no-such-file.csv" in done.stderr


@pytest.mark.slow
def test_help_names_every_command_and_says_what_its_own_help_begins_with():
    loaded = get_command(app).commands
    for name, (module, told) in cli.COMMANDS.items():
        assert loaded[name].name == name
        assert " ".join(loaded[name].help.split("\n\n")[0].split()) == told, name
        others = getattr(loaded[name], "commands", None)
        alone = import_module(f"schedlab.experiments.commands.{module}").app.registered_commands
        assert others or {command.name or command.callback.__name__ for command in alone} <= set(
            cli.COMMANDS
        ), f"a command of {module} cannot be called"


def test_overview_says_what_the_options_of_the_command_say():
    group = get_command(app)
    options = [*group.params, group.get_help_option(group.make_context("schedlab", ["run"]))]
    told = " ".join(cli.overview(200).split())
    for option in options:
        assert f"{', '.join(sorted(option.opts, key=len))} {option.help}" in told


@pytest.mark.parametrize("width", [50, 78])
def test_overview_keeps_to_its_width(width):
    assert max(map(len, cli.overview(width).splitlines())) in range(width - 8, width + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "more"),
    [("--help", ("typer", "rich")), ("-h", ("typer", "rich")), ("run --help", ())],
)
def test_help_imports_nothing_heavy(arguments, more):
    heavy = ("numpy", "pandas", "pydantic", "scipy", "matplotlib", "pyarrow", "yaml", *more)
    code = (
        "import sys\nfrom schedlab.experiments.commands.cli import main\n"
        f"sys.argv[1:] = {arguments.split()}\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print([m for m in {heavy!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "Usage: schedlab" in done.stdout
    assert done.stderr.strip() == "[]"


def test_folder_whose_name_is_too_long_is_refused_in_a_line(spec_file):
    done = schedlab("sweep", spec_file, "-o", "9" * 5000)
    assert done.exit_code == 2
    assert "File name too long" in done.stderr
    assert len(done.stderr) < 400


def test_help_of_a_group_cuts_no_summary():
    for group in ("trace", "profile", "predictor", "regress"):
        assert "..." not in schedlab(group, "--help").stdout.replace("[ARGS]...", "")


def test_batch_means_of_a_sweep_asks_for_one_of_its_runs(tmp_path):
    (tmp_path / "out" / "a-s0").mkdir(parents=True)
    (tmp_path / "out" / "a-s0" / "result.json").write_text("{}")
    done = schedlab("batch-means", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert "holds several runs: name the folder of one, e.g." in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (SpecError("first\n  second"), 2, "error: of x: first; second"),
        (KeyboardInterrupt(), 130, "interrupted; no result was written"),
        (FileNotFoundError(2, "None", "a.txt"), 2, "error: [Errno 2] None: 'a.txt'"),
        (ModuleNotFoundError("no", name="torch.nn"), 2,
         "error: torch is not installed: pip install 'schedlab[gpu]'"),
        (ModuleNotFoundError("no", name="sklearn"), 2,
         "error: sklearn is not installed: pip install 'schedlab[predictors]'"),
        (MemoryError("so much"), 2, "error: of x: not enough memory: so much"),
    ],
)  # fmt: skip
def test_error_that_is_meant_for_users_is_a_line_and_an_exit_code(monkeypatch, error, code, told):
    def invoke(self, ctx):
        raise error

    monkeypatch.setattr(app_module.TyperGroup, "invoke", invoke)
    monkeypatch.setattr(app_module, "with_experiment", "of x: {}".format)
    done = CliRunner().invoke(app, ["examples"])
    assert (done.exit_code, done.stderr) == (code, f"{told}\n")


def test_error_of_a_module_that_nobody_offers_comes_as_it_is(monkeypatch):
    def invoke(self, ctx):
        raise ModuleNotFoundError("no", name="mine.inner")

    monkeypatch.setattr(app_module.TyperGroup, "invoke", invoke)
    done = CliRunner().invoke(app, ["examples"])
    assert isinstance(done.exception, ModuleNotFoundError)


def test_warnings_of_ours_are_told_once_and_without_their_source():
    tell = cli._told(lambda message, *_: f"as ever: {message}")
    ours = ExtrapolationWarning("outside")
    assert tell(ours, ExtrapolationWarning, "executor.py", 273) == "warning: outside\n"
    assert tell(ours, ExtrapolationWarning, "executor.py", 273, line="code") == ""
    assert tell("old", DeprecationWarning, "x.py", 1) == "as ever: old"
