"""The first commands: from an empty folder to results, without a collision."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from schedlab.experiments.commands.app import app
from schedlab.experiments.specification.starter import POLICY
from schedlab.traces import PRESETS

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["workload.num_requests=12", "replications=1", "workload.request_rate=4", "-q"]

pytestmark = pytest.mark.usefixtures("blank_figures")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def schedlab(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.slow
def test_init_writes_an_experiment_and_a_policy_that_run(monkeypatch):
    done = schedlab("init", "study")
    assert done.exit_code == 0, done.output
    monkeypatch.chdir("study")
    assert schedlab("run", "spec.yaml", *SMALL).exit_code == 0
    own = schedlab("run", "spec.yaml", "policy=longest_first:LongestPromptFirst", *SMALL, "-o", "o")
    assert own.exit_code == 0, own.output
    assert json.loads(Path("o/result.json").read_text())["schedlab"]["policy"].startswith("longest")


@pytest.mark.slow
def test_init_overwrites_nothing():
    Path("longest_first.py").write_text("mine")
    done = schedlab("init")
    assert done.exit_code == 2
    assert "longest_first.py is there already" in done.stderr
    assert not Path("spec.yaml").exists()


@pytest.mark.slow
def test_init_names_the_schema_in_the_first_line_for_editors():
    schedlab("init")
    first, *others = Path("spec.yaml").read_text().split("\n")
    assert not any("yaml-language-server" in line for line in others)
    schema = json.loads(Path(first.partition("$schema=")[2]).read_text())
    assert "sjf" in str(schema["properties"]["policy"])


def test_readme_shows_the_files_that_init_writes():
    readme = (ROOT / "README.md").read_text()
    assert POLICY in readme
    shown = yaml.safe_load(readme.partition("```yaml\n")[2].partition("```")[0])
    assert shown == yaml.safe_load((ROOT / "experiments/sjf-against-fcfs.yaml").read_text())


@pytest.mark.parametrize(
    ("asked", "now"),
    [
        (["compare-policies", "there"], "compare"),
        (["compare", "gone.yaml"], "measure"),
        (["compare", "compare-cpu", "no.such_key=1"], "measure"),
    ],
)
def test_earlier_name_works_and_says_what_it_is_called_now(asked, now):
    done = schedlab(*asked)
    assert done.exit_code == 2  # there is nothing to compare
    told, error = done.stderr.splitlines()
    assert told == f"schedlab {asked[0]} is called schedlab {now} now; this name will go"
    assert error == schedlab(now, *asked[1:]).stderr.rstrip()


def test_compare_of_a_folder_that_is_called_like_an_experiment_takes_the_folder():
    Path("compare-cpu").mkdir()
    assert "is called" not in schedlab("compare", "compare-cpu").stderr


def test_examples_prints_one_by_name_to_change_it():
    done = schedlab("examples", "quickstart")
    assert yaml.safe_load(done.stdout)["name"] == "quickstart"
    assert "quickstart comes with schedlab" in schedlab("examples", "quikstart").stderr


@pytest.mark.slow
def test_runs_into_results_and_into_the_default_do_not_collide():
    schedlab("init")
    for _ in range(2):
        assert schedlab("run", "spec.yaml", "-o", "results", *SMALL).exit_code == 0
        assert schedlab("run", "spec.yaml", *SMALL, "policy=fcfs").exit_code == 0
    assert Path("schedlab-results/sjf-against-fcfs/result.json").is_file()


@pytest.mark.slow
def test_run_by_two_processes_writes_what_one_writes():
    schedlab("init")
    small = [*SMALL, "sweep.workload.request_rate=[2, 4]"]
    for jobs in "12":
        assert schedlab("run", "spec.yaml", "-j", jobs, "-o", jobs, *small).exit_code == 0
    assert Path("1/summary.csv").read_text() == Path("2/summary.csv").read_text()


@pytest.mark.parametrize("arguments", [["--version"], ["version"]])
def test_version_is_an_option_and_a_command(arguments):
    done = schedlab(*arguments)
    assert done.exit_code == 0
    assert done.stdout.startswith("schedlab ")


@pytest.mark.parametrize("command", [[], ["run"], ["trace", "describe"], ["regress", "check"]])
def test_h_is_help_everywhere(command):
    assert schedlab(*command, "-h").stdout == schedlab(*command, "--help").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["re"], ["recommend", "regress", "report"]),
        (["run", "quick"], ["quickstart"]),
        (["run", "mine"], ["mine.yaml"]),
        (["run", "x", "engine.max_num_s"], ["engine.max_num_seqs=", "engine.max_num_seqs=..."]),
        (["run", "quickstart", "policy", "=", "sj"], ["sjf"]),  # as bash cuts it up
        (["run", "quickstart", "workload.trace", "="], sorted(PRESETS)),
        (["run", "quickstart", "engine.block_size", "=", "1"], []),
        (["run", "quickstart", "policy=sj"], ["policy=sjf"]),  # as zsh and fish leave it
        (["recommend", "--model", "llama-3-"], ["llama-3-70b", "llama-3-8b"]),
        (["recommend", "--gpu", "h2"], ["h200"]),
        (["plot", "out", "--figure", "gan"], ["gantt"]),
        (["run", "quickstart", "-m", "p99_tt"], ["p99_ttft_ms"]),
    ],
)  # fmt: skip
def test_shell_completes_commands_experiments_keys_and_names(words, offered):
    Path("mine.yaml").touch()
    given = {"COMP_WORDS": " ".join(["schedlab", *words]), "COMP_CWORD": str(len(words))}
    env = {"_SCHEDLAB_COMPLETE": "complete_bash", **given}
    done = CliRunner().invoke(app, [], env=env, prog_name="schedlab")
    assert sorted(done.stdout.split()) == offered


def test_init_into_a_file_is_refused_by_its_name():
    Path("llf.py").touch()
    for folder in ("llf.py", "llf.py/in"):
        done = schedlab("init", folder)
        assert done.exit_code != 0
        assert "llf.py is a file; name a folder to write spec.yaml" in done.stderr


@pytest.mark.parametrize("name", ["llf", "llf.py"])
def test_policy_named_by_its_file_is_told_with_its_classes(name):
    Path("llf.py").write_text(
        "import nothing\nclass LeastLaxity: ...\ndef f(): ...\nclass B: ...\n"
    )
    done = schedlab("policy", "check", name)
    said = f"unknown policy {name!r}; of llf.py name the class: llf:LeastLaxity, llf:B"
    assert done.stderr.endswith(f"{said}\n")
    Path("llf.py").write_text("no python (")
    assert "choose from aged" in schedlab("policy", "check", name).stderr


@pytest.mark.parametrize("name", ["pm", "./pm"])
def test_predictor_named_by_its_folder_is_told_as_a_trained_one(name):
    Path("pm").mkdir()
    Path("pm/meta.json").write_text("{}")
    done = schedlab("check", "quickstart", f"policy={{name: sjf, predictor: {name}}}")
    said = f"unknown predictor {name!r}; write {{name: trained, model: {name}}}"
    assert said in done.stderr


def test_override_that_contradicts_sessions_is_blamed_with_what_to_write():
    done = schedlab("check", "sessions", "workload.request_rate=2")
    said = "override 'workload.request_rate=2': workload.request_rate: not with sessions"
    assert done.stderr.startswith(f"error: {said}")
    assert done.stderr.endswith("session_rate says how many begin\n")
