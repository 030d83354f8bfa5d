"""What commands hand to those who do the work, and what they make of the answer.

The work itself is replaced by something that notes every argument, all of them distinct: commands
are otherwise asked through dear runs, in which most options are left alone.
"""

import importlib
import json
import math
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from schedlab import testing, traces
from schedlab.experiments.analysis import policy_comparison
from schedlab.experiments.analysis.policy_comparison import PolicyChange
from schedlab.experiments.commands import measure as measure_module
from schedlab.experiments.commands import policy as policy_module
from schedlab.experiments.commands import predictor as predictor_module
from schedlab.experiments.commands import profile as profile_module
from schedlab.experiments.commands import recommend as recommend_module
from schedlab.experiments.commands import regress as regress_module
from schedlab.experiments.commands import results as results_module
from schedlab.experiments.commands import run as run_module
from schedlab.experiments.commands import sweep as sweep_module
from schedlab.experiments.commands import trace as trace_module
from schedlab.experiments.commands import trace_fetch
from schedlab.experiments.commands import validate as validate_module
from schedlab.experiments.commands.app import app
from schedlab.experiments.commands.running import told_what_is_kept
from schedlab.experiments.comparing import compare as comparing
from schedlab.experiments.comparing import comparison_files, frontend_measurement, load_tests
from schedlab.experiments.figures import figures
from schedlab.experiments.figures.chosen import Chosen
from schedlab.experiments.regression import check
from schedlab.experiments.regression.check import Move
from schedlab.experiments.regression.matrix import Matrix, MatrixPoint
from schedlab.experiments.regression.report import _sentence
from schedlab.experiments.results import saved_results
from schedlab.experiments.search import find as finding
from schedlab.experiments.search.recommend import ASK_A_COST_MODEL, NOT_IN_VLLM
from schedlab.experiments.specification import starter
from schedlab.experiments.statistics import LEAST_SEEDS, Change
from schedlab.experiments.sweeps import dry_run, store, sweep_all, workers
from schedlab.policies import registry as policies
from schedlab.sim.config import EngineConfig
from schedlab.sim.cost.importers import aiconfigurator, llmservingsim, splitwise, vidur
from schedlab.sim.cost.learning import errors as learning_errors
from schedlab.sim.cost.learning import fit, kernels_file
from schedlab.sim.cost.learning import tables as learning_tables
from schedlab.sim.drive import frontend as drive_frontend
from schedlab.sim.text import percent
from schedlab.testing import Case, LawBroken
from schedlab.traces import published
from tests.laws import arrival


def schedlab(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


# -- to start from ------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["", "new/er"])
def test_init_writes_what_to_start_from_and_says_what_to_run_next(monkeypatch, tmp_path, folder):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starter, "json_schema", lambda: {"of": "keys"})
    done = schedlab("init", *([folder] if folder else []))
    there = f"{folder}/" if folder else ""
    names = ["spec.yaml", "longest_first.py", starter.SCHEMA_FILE]
    cd = f"cd {folder} && " if folder else ""
    assert done.output.splitlines() == [
        *(f"{there}{name}" for name in names),
        f"next: {cd}schedlab run spec.yaml",
        "then: schedlab run spec.yaml policy=longest_first:LongestPromptFirst -o longest-first",
    ]
    spec, policy, schema = ((tmp_path / folder / name).read_text() for name in names)
    assert "schedlab run spec.yaml" in spec
    assert f"schedlab run {starter.EXAMPLE}" not in spec
    assert policy == starter.POLICY
    assert json.loads(schema) == {"of": "keys"}
    (tmp_path / folder / names[0]).unlink()
    (tmp_path / folder / names[1]).write_text("mine")
    again = schedlab("init", *([folder] if folder else []))
    assert again.exit_code == 2
    assert f"{there}longest_first.py is there already; name another folder" in again.output
    assert not (tmp_path / folder / names[0]).exists(), "none is written"
    assert (tmp_path / folder / names[1]).read_text() == "mine"


def test_example_is_printed_as_it_is_below_where_it_is_from(monkeypatch, tmp_path):
    path = tmp_path / "one.yaml"
    path.write_text("name: one\nseed: 3\n")
    found = "schedlab.experiments.specification.shipped"
    monkeypatch.setattr(f"{found}.experiment_file", lambda name: tmp_path / f"{name}.yaml")
    monkeypatch.setattr(f"{found}.shipped_experiments", lambda: {"one": path, "two": path})
    monkeypatch.setattr(f"{found}.title", lambda path: f"what {path.name} asks")
    assert schedlab("examples", "one").stdout == (
        f"# A copy of {path}; files it names are relative to that folder.\nname: one\nseed: 3\n"
    )
    lines = [line.split() for line in schedlab("examples").stdout.splitlines()]
    for name in ("one", "two"):
        assert [name, "what", "one.yaml", "asks"] in lines


# -- lists -------------------------------------------------------------------------------------


def test_list_of_policies_says_of_each_what_it_needs_and_where_it_runs():
    listed = {
        one["name"]: one for one in json.loads(schedlab("policies", "--json").stdout)["policies"]
    }
    assert list(listed) == policies.names()
    for name, told in listed.items():
        cls = policies.policy_class(name)
        needs = " Needs a predictor." if cls.needs_prediction else ""
        first_line = cls.__doc__.strip().splitlines()[0]
        assert told["purpose"] == f"{first_line}{needs}"
        assert told["source"] == cls.source
        where = "with a cost model" if name in ASK_A_COST_MODEL else "yes"
        assert told["in vLLM"] == ("no" if name in NOT_IN_VLLM else where)
    assert listed["sjf"]["purpose"].endswith(". Needs a predictor.")
    assert not listed["fcfs"]["purpose"].endswith("predictor.")


@pytest.mark.parametrize("command", ["policies", "metrics", "models", "gpus", "cost-models"])
def test_list_shows_whose_name_has_the_part_whatever_its_case(command):
    def names(*more):
        found = json.loads(schedlab(command, "--json", "--", *more).stdout)
        return [next(iter(row.values())) for rows in found.values() for row in rows]

    everything = names()
    part = everything[-1][1:4]
    assert names(part.upper()) == [name for name in everything if part.lower() in name.lower()]
    assert names(everything[0][-3:].title())[0]
    wrong = schedlab(command, "qqq")
    assert wrong.exit_code == 2
    assert "is called 'qqq'" in wrong.output


def test_list_of_metrics_has_those_of_every_table():
    (rows,) = json.loads(schedlab("metrics", "--json").stdout).values()
    tables = schedlab("metrics", "--markdown").stdout.split("### ")[1:]
    assert len(tables) > 3
    assert len(rows) == sum(table.count("\n| `") for table in tables)


# -- interrupted -------------------------------------------------------------------------------


def test_command_that_is_interrupted_says_where_points_are_kept_and_ends_as_a_signal(capsys):
    with pytest.raises(typer.Exit) as ended, told_what_is_kept(Path("kept")):
        raise KeyboardInterrupt
    assert ended.value.exit_code == 128 + signal.SIGINT
    assert "finished points are kept in kept: " in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt), told_what_is_kept(None):
        raise KeyboardInterrupt


def test_measuring_that_is_interrupted_says_where_what_is_finished_is_kept(monkeypatch, tmp_path):
    def interrupted(*given, **more):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("schedlab.experiments.comparing.calibrate.calibrate", interrupted)
    monkeypatch.setattr("schedlab.experiments.comparing.compare.compare", interrupted)
    goes_on = "are kept in {}: the same command goes on\n"
    for words, said in (
        (["calibrate", "-o", "cal"], "interrupted; finished readings " + goes_on.format("cal")),
        (["measure", "quickstart", "--keep", "runs"],
         "interrupted; finished runs " + goes_on.format("runs")),
        (["measure", "quickstart"], "interrupted; no result was written\n"),
    ):  # fmt: skip
        done = CliRunner().invoke(app, words)
        assert (done.exit_code, done.stderr) == (128 + signal.SIGINT, said)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "at"),
    [
        (["claims", "-o", "file"], "file/policies.md"),
        (["claims", "--page", "claims", "-o", "file"], "file/claims.md"),
        (["regress", "check", "--junit", "file/j.xml"], "file/j.xml"),
        (["regress", "check", "--markdown", "file/m.md"], "file/m.md"),
    ],
)
def test_command_whose_output_cannot_be_written_runs_nothing(monkeypatch, tmp_path, words, at):
    def never(*given, **more):
        raise AssertionError("it ran")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr("schedlab.experiments.claims.claims.examine", never)
    monkeypatch.setattr("schedlab.experiments.claims.page.run_page", never)
    monkeypatch.setattr(regress_module, "_measure", never)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert done.stderr.endswith(f"{at} cannot be written: {tmp_path / 'file'} is a file\n")


def test_processes_that_begin_while_interrupts_are_held_see_none():
    ask = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    begin = [sys.executable, "-c", ask]
    with workers._interrupts_held():
        held = subprocess.run(begin, capture_output=True, text=True, check=True)
    free = subprocess.run(begin, capture_output=True, text=True, check=True)
    assert (held.stdout, free.stdout) == ("True\n", "False\n")


# -- regress -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metrics", "light"),
    [(["mean_ttft_ms"], True), (["mean_ttft_ms", "kv_waste"], False)],
)
def test_matrix_keeps_tables_if_a_metric_needs_them(monkeypatch, metrics, light):
    asked = []

    @contextmanager
    def opened(*given):
        asked.append(given)
        yield "runs"

    monkeypatch.setattr(regress_module, "opened_runs", opened)
    monkeypatch.setattr(regress_module, "local_workers", lambda jobs, specs: (jobs, specs))
    monkeypatch.setattr(check, "measure", lambda matrix, runs: (matrix, runs))
    matrix = Matrix([MatrixPoint("w", "p", 0, "spec", "")], dict.fromkeys(metrics))
    assert regress_module._measure(matrix, None, Path("kept"), True) == (matrix, "runs")
    assert asked == [(Path("kept"), (1, ["spec"]), True, light)]


@pytest.mark.parametrize(
    ("jobs", "num_points", "num_jobs"), [(None, 19, 1), (None, 20, None), (3, 19, 3), (3, 20, 3)]
)
def test_matrix_of_few_points_runs_in_this_process(monkeypatch, jobs, num_points, num_jobs):
    asked = []

    def workers(jobs, specs):
        asked.append((jobs, len(specs)))

    monkeypatch.setattr(regress_module, "local_workers", workers)
    monkeypatch.setattr(regress_module, "opened_runs", lambda *_: contextmanager(iter)([None]))
    monkeypatch.setattr(check, "measure", lambda matrix, runs: runs)
    matrix = Matrix([MatrixPoint("w", "p", i, "spec", "") for i in range(num_points)], {})
    assert regress_module._measure(matrix, jobs, None, True) is None
    assert asked == [(num_jobs, num_points)]


# -- policy check ------------------------------------------------------------------------------


def test_check_of_a_policy_hands_on_every_option_and_ends_by_what_was_found(monkeypatch):
    asked, broken = [], []

    def verdicts(make, **options):
        assert make.__qualname__ == "sarathi", "a law that breaks is told of this name"
        asked.append((make().chunk_size, options))
        laws = [SimpleNamespace(law="a", meaning="one", broken=None)]
        return laws + [SimpleNamespace(law=b.law, meaning="other", broken=b) for b in broken]

    monkeypatch.setattr(testing, "policy_verdicts", verdicts)
    words = ["policy", "check", "sarathi", "chunk_size=77", "--seed", 7, "--cases", 3]
    assert schedlab(*words, "--law", "a", "--law", "b", "--may-wait").exit_code == 0
    assert schedlab(*words).exit_code == 0
    assert asked == [
        (77, {"may_wait": True, "only": ["a", "b"], "seed": 7, "num_cases": 3}),
        (77, {"may_wait": False, "only": None, "seed": 7, "num_cases": 3}),
    ]
    case = Case((), EngineConfig(num_blocks=9, max_model_len=9))
    broken += [
        LawBroken("P", name, "m", why, case) for name, why in (("b", "x"), ("c", "x"), ("d", "y"))
    ]
    done = schedlab(*words)
    assert done.exit_code == 1
    assert done.output.count("BROKEN") == 3
    assert done.output.count("the same breaks c") == 1
    # What breaks for another reason, or in another case, is told by itself.
    other = Case((arrival(3),), EngineConfig(num_blocks=9, max_model_len=9))
    broken[:] = [
        LawBroken("P", name, "m", why, at)
        for name, why, at in (
            ("b", "x", case), ("c", "x", other), ("d", "y", case), ("e", "x", case),
            ("f", "y", case), ("g", "y", case),
        )
    ]  # fmt: skip
    told = schedlab(*words).output
    assert [line for line in told.splitlines() if "the same breaks" in line] == [
        "the same breaks e", "the same breaks f, g",
    ]  # fmt: skip
    assert [told.count(str(broken[i])) for i in range(6)] == [1, 1, 1, 0, 0, 0]


# -- compare -----------------------------------------------------------------------------------


def change(of, low, high, num_pairs=LEAST_SEEDS, p_value=0.001):
    found = Change((low + high) / 2, low, high, 1.5, num_pairs, p_value)
    return PolicyChange("rate=3", "mean_ttft_ms", of, "fcfs", (2.0, 1.0), found, f"says {of}")


def test_comparison_has_the_mean_of_either_side_its_effect_and_its_seeds(monkeypatch):
    monkeypatch.setattr(saved_results, "read_points", lambda folder: [folder.name])
    one = Change(0.3, 0.2, 0.4, 1.25, LEAST_SEEDS + 4, 0.001)
    found = [
        PolicyChange("workload.rate=3", "mean_ttft_ms", "a", "b", (2.5, 9.5), one, "clearly"),
        PolicyChange("", "mean_ttft_ms", "a", "b", (3.5, 8.5), one, "surely"),
    ]
    monkeypatch.setattr(policy_comparison, "rejections", lambda runs: "")
    monkeypatch.setattr(policy_comparison, "left_out", lambda *given: [])
    monkeypatch.setattr(policy_comparison, "compare_policies", lambda *given: found)
    lines = [line.split() for line in schedlab("compare", "out", "--key", "k").output.splitlines()]
    seeds = str(LEAST_SEEDS + 4)
    assert ["rate=3", "clearly", "2.50", "9.50", "1.2", seeds] in lines
    assert ["-", "surely", "3.50", "8.50", "1.2", seeds] in lines


def test_comparisons_that_decide_nothing_are_counted_and_shown_when_asked_for(monkeypatch):
    found = [
        change("clear", 0.2, 0.4), change("worse", -0.4, -0.2), change("around", -0.1, 0.3),
        change("few", 0.2, 0.4, num_pairs=LEAST_SEEDS - 1), change("chance", 0.2, 0.4, p_value=0.2),
    ]  # fmt: skip
    asked = []
    monkeypatch.setattr(saved_results, "read_points", lambda folder: [folder.name])
    monkeypatch.setattr(policy_comparison, "rejections", lambda runs: "")
    monkeypatch.setattr(policy_comparison, "left_out", lambda *given: [])
    monkeypatch.setattr(
        policy_comparison, "compare_policies", lambda *given: asked.append(given) or found
    )

    def shown(*more):
        text = schedlab("compare", "out", "--against", "x", "--key", "k", *more).output
        return [
            one.of for one in found if f"says {one.of}" in text
        ], "decide nothing (--all)" in text

    assert shown() == (["clear", "worse"], True)
    assert "3 of 5 comparisons decide nothing (--all)" in schedlab("compare", "out").output
    every = [one.of for one in found]
    assert shown("--all") == (every, False)
    assert shown("-m", "mean_ttft_ms") == (every, False)
    assert [(given[0], list(given[1])[:1], *given[2:]) for given in asked] == [
        (["out"], ["request_throughput"], "x", "k"),
        (["out"], ["request_throughput"], None, "policy"),
        (["out"], ["request_throughput"], "x", "k"),
        (["out"], ["mean_ttft_ms"], "x", "k"),
    ]
    data = json.loads(schedlab("compare", "out", "--json").stdout)
    assert [row["of"] for row in data] == every


# -- regress -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "which"), [(None, "ttft:"), (0, "(seed 0):"), (3, "(seed 3):")])
def test_move_of_a_metric_names_its_seed_if_it_is_of_one(seed, which):
    assert which in _sentence(Move("ttft", 2.0, 3.0, 0.1, False, seed))


# -- run, sweep, find --------------------------------------------------------------------------

SPEC = "name: one\nworkload: {trace: fixed, num_requests: 2}\n"


class Noted(list):
    """Stands in for what makes something, and notes what it is asked for."""

    def __init__(self, name, made):
        self.name, self.made = name, made

    def __call__(self, *given, **more):
        self.append((*given, *more.values()))
        return self.made


@pytest.fixture
def work(monkeypatch, tmp_path):
    """Notes that stand in for the work behind `run`, `sweep` and `find`, by name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.yaml").write_text(SPEC)

    @contextmanager
    def opened(made):
        yield made

    rows = [SimpleNamespace(mean=lambda name, n=n: n) for n in (0.0, 2.0)]
    results = SimpleNamespace(rows=rows, runs=[], cost_models=["told"], warnings=[], predictors=[])
    bar = SimpleNamespace(requests_done="requests", point_ended="points")
    notes = SimpleNamespace(results=results)
    for module, name, made in (
        (run_module, "points_bar", opened(bar)),
        (sweep_module, "points_bar", opened(bar)),
        (run_module, "print_results", None),
        (workers, "InProcess", opened("one by one")),
        (workers, "Processes", opened("many")),
        (workers, "choose_workers", opened("chosen")),
        (sweep_all, "run_into", results),
        (saved_results, "read_results", "read anew"),
        (saved_results, "summary", {"said": 1}),
        (figures, "draw_throughput", None),
        (store, "Store", "store"),
    ):
        noted = Noted(name, made)
        monkeypatch.setattr(module, name, noted)
        setattr(notes, f"{module.__name__.rpartition('.')[2]}_{name}", noted)
    return notes


@pytest.mark.parametrize(
    ("options", "who", "is_quiet"),
    [((), "InProcess", False), (("-j", 3), "Processes", False), (("--quiet",), "InProcess", True)],
)
def test_run_hands_on_jobs_and_quiet_and_shows_what_came_of_it(work, options, who, is_quiet):
    done = schedlab("run", "one.yaml", "-o", "out", *options)
    assert done.exit_code == 0, done.output
    ((spec, folder, by, progress),) = work.sweep_all_run_into
    assert (spec.name, progress) == ("one", "points")
    assert folder.name != "out", "it is written beside and takes its place when all is there"
    assert (by, work.run_points_bar) == (
        "one by one" if who == "InProcess" else "many",
        [(is_quiet,)],
    )
    if who == "InProcess":
        assert (work.workers_InProcess, work.workers_Processes) == ([("requests", True)], [])
    else:
        assert (work.workers_InProcess, work.workers_Processes) == ([], [(3,)])
    assert work.figures_draw_throughput == [(work.results,)]
    printed = [] if is_quiet else [(work.results, "one", ())]
    assert [(one, name, tuple(asked)) for one, name, asked in work.run_print_results] == printed
    assert ("results: out" in done.output) == (not is_quiet)


def test_run_reads_the_tables_anew_for_further_metrics_and_prints_json_instead(work):
    assert schedlab("run", "one.yaml", "-o", "out", "-m", "mean_itl_ms").exit_code == 0
    assert work.run_print_results == [("read anew", "one", ["mean_itl_ms"])]
    assert [str(folder) for (folder,) in work.saved_results_read_results] == ["out"]


def test_run_prints_json_instead_of_a_table(work):
    done = schedlab("run", "one.yaml", "-o", "out", "--json")
    assert json.loads(done.stdout) == {"said": 1}
    assert (work.run_print_results, done.exit_code) == ([], 0)


def test_run_in_which_no_setting_answered_anything_fails(work):
    work.results.rows.pop()
    done = schedlab("run", "one.yaml", "-o", "out")
    assert done.exit_code != 0
    assert "no request was answered, in any setting" in str(done.exception) + done.output


def test_dry_run_of_a_sweep_looks_for_what_the_sweep_would_and_runs_nothing(work, monkeypatch):
    planned, told = Noted("plan", "planned"), Noted("describe_plan", ["9 points"])
    monkeypatch.setattr(sweep_all, "plan", planned)
    monkeypatch.setattr(dry_run, "describe_plan", told)
    words = ["sweep", "one.yaml", "-o", "out", "-j", 5, "--shard", "2/3", "--dry-run"]
    for light in (False, True):
        done = schedlab(*words, *["--light"] * light)
        assert (done.exit_code, done.stdout) == (0, "9 points\n")
    assert [given[1:] for given in work.store_Store] == [(True, False), (True, True)]
    assert [given[1:] for given in planned] == [("store", sweep_all.Shard(2, 3))] * 2
    assert told == [("planned", "store", 5)] * 2
    assert work.workers_choose_workers == []


@pytest.mark.parametrize("is_failed", [False, True])
def test_sweep_hands_on_its_part_and_ends_by_what_failed(work, monkeypatch, is_failed):
    job = SimpleNamespace(label="p", spec=SimpleNamespace(seed=4))
    failures = [SimpleNamespace(job=job, error="no room", trace="")] if is_failed else []
    swept = SimpleNamespace(
        results=None, failures=failures, num_points=9, num_found=3, num_missing=2, num_others=1
    )
    noted = Noted("sweep_all", swept)
    monkeypatch.setattr(sweep_all, "sweep_all", noted)
    words = ["sweep", "one.yaml", "-o", "out", "-j", 5, "--shard", "2/3", "--light"]
    done = schedlab(*words)
    assert done.exit_code == int(is_failed), done.output
    ((spec, kept, by, part, progress),) = noted
    assert (spec.name, kept, by, part, progress) == (
        "one", "store", "chosen", sweep_all.Shard(2, 3), "points",
    )  # fmt: skip
    ((folder, light),) = work.store_Store
    assert (str(folder), light) == ("out", True)
    assert work.workers_choose_workers == [(5, None)]
    assert work.sweep_points_bar == [(False,)]
    assert work.figures_draw_throughput == []
    assert f"9 points: 3 were there, {5 if is_failed else 6} run" in done.output
    assert ("failed: p, seed 4: no room" in done.output) == is_failed
    assert ("1 FAILED (their settings are not in the table)" in done.output) == is_failed
    assert "2 left to other shards" in done.output
    assert "1 more results in the folder are of other settings" in done.output
    assert "results: out" in done.output


@pytest.mark.parametrize(
    ("options", "needs", "light", "is_quiet"),
    [
        ((), False, True, False), (("--tables",), False, False, False), ((), True, False, False),
        (("--quiet", "-j", 6), False, True, True),
    ],
)  # fmt: skip
def test_search_keeps_tables_if_asked_or_needed_and_writes_what_it_found(
    work, monkeypatch, tmp_path, options, needs, light, is_quiet
):
    from schedlab.experiments.search import cheapest, constraints, search_report

    runs = SimpleNamespace(num_asked=7, cost_models=["told"], extrapolated={"a": "far", "b": "off"})
    opened = []

    @contextmanager
    def opening(*given):
        opened.append(given)
        yield runs

    monkeypatch.setattr(sweep_module, "opened_runs", opening)
    monkeypatch.setattr(constraints, "needs_tables", lambda spec: needs)
    monkeypatch.setattr(finding, "find", lambda spec, given: ("found", given is runs))
    monkeypatch.setattr(cheapest, "cheapest", lambda *given: SimpleNamespace(lines=["cheapest"]))
    monkeypatch.setattr(search_report, "find_data", lambda *given: {"asked": given[2:4]})
    monkeypatch.setattr(
        search_report, "find_table", lambda *given: (("setting", "rate"), [("a", "1")])
    )
    monkeypatch.setattr(search_report, "find_lines", lambda spec, found: [f"it {found[0]}"])
    monkeypatch.setattr(search_report, "basis_lines", lambda models, far: [f"by {models}, {far}"])
    (tmp_path / "one.yaml").write_text(
        SPEC + "find: {maximize: workload.request_rate, between: [1, 9], "
        "at_most: {p99_ttft_ms: 500}}\n"
    )
    (tmp_path / "out").mkdir()
    done = schedlab("find", "one.yaml", "-o", "out", *options)
    assert done.exit_code == 0, done.output
    ((folder, _, quiet, kept_light),) = opened
    assert (str(folder), quiet, kept_light) == ("out", is_quiet, light)
    assert work.workers_choose_workers == [(6 if is_quiet else 1, None)]
    data = json.loads((tmp_path / "out" / "find.json").read_text())
    basis = "by ['told'], ['far', 'off']"
    assert data == {
        "asked": [["cheapest"], 7],
        "cost_models": ["told"],
        "basis": [basis],
        "table": {"header": ["setting", "rate"], "rows": [["a", "1"]], "num_text": 1},
        "lines": ["it found", "cheapest", basis],
    }
    for line in ("it found", "cheapest", basis, "7 runs in out"):
        assert (line in done.output) == (not is_quiet)


def test_what_was_tuned_has_a_column_for_each_key_by_its_short_name(monkeypatch):
    from schedlab.experiments.search import search_report, tune

    over = {"engine.max_num_seqs": None, "policy.knobs.offset": None}
    spec = SimpleNamespace(tune=SimpleNamespace(over=over, goal="goodput"))
    runs = SimpleNamespace(num_asked=9)
    monkeypatch.setattr(tune, "tune", lambda *given: ("tuned", *given))
    monkeypatch.setattr(search_report, "tune_data", lambda *given: {"data": given})
    monkeypatch.setattr(search_report, "tune_rows", lambda found: [("row", *found)])
    monkeypatch.setattr(search_report, "tune_lines", lambda *given: ["line", *given])
    found = sweep_module._tune(spec, runs)
    tuned = ("tuned", spec, runs)
    assert found.data == {"data": (spec, tuned, 9)}
    assert found.header == ("max_num_seqs", "offset", "goodput", "constraints")
    assert (found.rows, found.lines) == ([("row", *tuned)], ["line", spec, tuned])


@pytest.mark.parametrize("is_quiet", [False, True])
@pytest.mark.parametrize("output", [None, "out"])
@pytest.mark.parametrize("page", ["policies", "fleets", "claims", "files"])
def test_claims_are_examined_with_workers_for_them_shown_and_written(
    monkeypatch, tmp_path, page, output, is_quiet
):
    asked = []

    def noting(name, answer=None):
        return lambda *given: asked.append((name, *given)) or answer

    @contextmanager
    def opened(keep, workers, quiet):
        asked.append(("opened", keep, workers, quiet))
        yield "runs"

    place = "schedlab.experiments.claims"
    loaded = [("a.yaml", "spec a"), ("b.yaml", "spec b")]
    for name, stand_in in {
        f"{place}.claims.load_claims": noting("load", loaded),
        f"{place}.claims.shipped": lambda kind: f"shipped {kind}",
        f"{place}.claims.examine": lambda path, spec, runs: f"{spec} of {path} by {runs}",
        f"{place}.report.row_texts": lambda found: [("rows", *found)],
        f"{place}.report.write": noting("write", ["one.md", "two.json"]),
        f"{place}.page.run_page": lambda runs: ("quoted", f"found by {runs}"),
        f"{place}.page.claim_rows": lambda *given: [("rows", *given)],
        f"{place}.page.write": noting("write page", ["page.md"]),
    }.items():
        monkeypatch.setattr(name, stand_in)
    module = importlib.import_module("schedlab.experiments.commands.claims")
    monkeypatch.setattr(module, "local_workers", lambda jobs, specs: (jobs, specs))
    monkeypatch.setattr(module, "opened_runs", opened)
    monkeypatch.setattr(module, "print_table", noting("table"))
    monkeypatch.chdir(tmp_path)
    options = ["--jobs", "3", "--keep", "kept"]
    options += [] if output is None else ["-o", output]
    options += ["-q"] if is_quiet else []
    options += ["x/a.yaml", "y/b.yaml"] if page == "files" else ["--page", page]
    done = CliRunner().invoke(module.app, options)
    assert done.exit_code == 0, done.output
    into = None if output is None else Path(output)
    specs = [] if page == "claims" else ["spec a", "spec b"]
    runs = ("opened", Path("kept"), (3, specs), is_quiet)
    if page == "claims":
        table = ("table", "claims", ("", "claim as quoted", "verdict"),
                 [("rows", "quoted", "found by runs")])  # fmt: skip
        expected = [runs, table, ("write page", "quoted", "found by runs", into)]
        files = ["page.md"]
    else:
        found = ["spec a of a.yaml by runs", "spec b of b.yaml by runs"]
        header = ("system", "figure", "paper", "accepted", "measured [95 %]", "verdict")
        given = [Path("x/a.yaml"), Path("y/b.yaml")]
        expected = [
            ("load", given if page == "files" else f"shipped {page}"), runs,
            ("table", "claims", header, [("rows", *found)]),
            ("write", found, into, "policies" if page == "files" else page),
        ]  # fmt: skip
        files = ["one.md", "two.json"]
    if output is None:
        del expected[-1]
    if is_quiet:
        expected = [one for one in expected if one[0] != "table"]
    assert asked == expected
    assert done.output.split() == ([] if output is None else files)


def test_run_of_what_measures_this_machine_takes_one_point_at_a_time(work, tmp_path):
    file = tmp_path / "real.yaml"
    file.write_text(
        "{backend: real, model: schedlab-tiny, hardware: cpu,"
        " workload: {trace: fixed, num_requests: 3}}"
    )
    done = schedlab("run", file, "-j", 2)
    assert done.exit_code == 2
    assert "backend: real measures this machine: one point at a time (-j 1)" in done.output
    assert work.sweep_all_run_into == []
    done = schedlab("run", file, "-j", 1, "-o", tmp_path / "out")
    assert len(work.sweep_all_run_into) == 1, done.output


# -- what is written as KEY=VALUE --------------------------------------------------------------


def test_value_of_a_knob_may_hold_the_sign_again():
    assert policy_module._knob("quantile=0.5") == ("quantile", 0.5)
    assert policy_module._knob("rule=a=b") == ("rule", "a=b")


def test_label_is_split_at_the_last_sign_and_what_is_filtered_by_at_the_first():
    given = ["sarathi:chunk_size=512=ours"]
    assert results_module._pairs("--label", given) == [("sarathi:chunk_size=512", "ours")]
    assert results_module._pairs("--filter", given) == [("sarathi:chunk_size", "512=ours")]


def test_check_shows_settings_of_equal_memory_in_one_row_and_others_one_by_one(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(
        "workload: {trace: fixed, num_requests: 2}\n"
        "engine: {num_gpu_blocks_override: 300, max_model_len: 2048}\n"
        "sweep: {policy: [fcfs, sarathi]}\n"
    )
    shown = schedlab("check", path).stdout
    assert "every setting" in shown
    assert "sarathi" not in shown
    path.write_text(
        path.read_text().replace("policy: [fcfs, sarathi]", "engine.max_model_len: [1024, 2048]")
    )
    shown = schedlab("check", path).stdout
    assert "every setting" not in shown
    assert re.search(r"4,800 +1,024\n.* 4,800 +2,048\n", shown)


# -- profiles ----------------------------------------------------------------------------------


class Imported:
    """Stands for a profile that was read, and notes where it is written."""

    assumptions = ("one thing", "another")

    def __init__(self, *given, **more):
        self.given, self.more = given, more

    def save(self, output):
        self.output = output


@pytest.mark.parametrize("cluster", [None, "cluster.json"])
def test_import_of_a_bundle_hands_on_every_option_in_its_units(monkeypatch, cluster):
    made = []
    monkeypatch.setattr(
        llmservingsim, "import_bundle", lambda *given: made.append(Imported(*given)) or made[-1]
    )
    monkeypatch.setattr(llmservingsim, "read_link", lambda path: (f"link of {path}", 5.0))
    words = [
        "--tp", 2, "--model-config", "m.json", "--architecture", "a.yaml", "--link-latency-us", 7,
        "--link-gb-per-s", 3, "--all-reduce", "r.csv", "--data-parallel-size", 4,
        "--expert-parallel", "--no-skew",
    ]  # fmt: skip
    words += [] if cluster is None else ["--cluster", cluster]
    done = schedlab("profile", "import", "llmservingsim", "bundle", "-o", "out", *words)
    assert done.exit_code == 0, done.output
    (found,) = made
    assert found.given == (
        Path("bundle"),
        llmservingsim.Options(
            tensor_parallel_size=2,
            model_config=Path("m.json"),
            architecture=Path("a.yaml"),
            link_latency_s=pytest.approx(7e-6) if cluster is None else "link of cluster.json",
            link_bytes_per_s=3e9 if cluster is None else 5.0,
            all_reduce=Path("r.csv"),
            data_parallel_size=4,
            expert_parallel=True,
            use_skew=False,
        ),
    )
    assert found.output == Path("out")
    assert done.stdout.splitlines() == [
        "assumed: one thing", "assumed: another",
        "profile: out (use it with cost_model: out)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "words", "given", "more"),
    [
        (aiconfigurator, ["m", "--hardware", "h", "--tp", 2, "--backend", "trtllm",
                          "--backend-version", "1.2", "--expert-parallel"],
         ("m", "h", 2, "trtllm", "1.2"), {"expert_parallel": True}),
        (vidur, ["f", "--hardware", "h", "--model", "m", "--tp", 2, "--network", "n"],
         (Path("f"), "h", "m", 2, Path("n")), {}),
        (splitwise, ["f", "--hardware", "h", "--model", "m", "--tp", 2],
         (Path("f"), "m", "h", 2), {}),
    ],
)  # fmt: skip
def test_import_of_other_profiles_hands_on_every_option(monkeypatch, module, words, given, more):
    made = []

    def read(*given, **more):
        made.append(Imported(*given, **more))
        return made[-1]

    name = module.__name__.rpartition(".")[2]
    monkeypatch.setattr(module, f"import_{name}", read)
    done = schedlab("profile", "import", name, "-o", "out", *words)
    assert done.exit_code == 0, done.output
    assert (made[0].given, made[0].more, made[0].output) == (given, more, Path("out"))


def test_learning_reads_each_kind_of_tables_and_shows_errors_of_kernels_and_layers(monkeypatch):
    asked, printed = [], []
    for name in ("aiconfigurator_tables", "llmservingsim_tables", "vidur_tables"):
        monkeypatch.setattr(learning_tables, name, lambda path, name=name: [(name, str(path))])
    monkeypatch.setattr(fit, "learn", lambda tables: ("learnt", *tables))
    errors = [
        SimpleNamespace(gpu="g1", kind="k1", num_rows=12, error=0.25, without_gpu=None),
        SimpleNamespace(gpu="g2", kind="k2", num_rows=7, error=0.5, without_gpu=0.75),
    ]
    layers = {"g1": {"m1": {"learnt": 0.1, "other_models": 0.2}, "m2": {"learnt": 0.3}}}
    monkeypatch.setattr(
        learning_errors, "table_errors", lambda *given: asked.append(given) or errors
    )
    monkeypatch.setattr(
        learning_errors, "layer_errors", lambda *given: asked.append(given) or layers
    )
    monkeypatch.setattr(kernels_file, "write_kernels", lambda *given: asked.append(given))
    monkeypatch.setattr(profile_module, "print_table", lambda *given: printed.append(given))
    done = schedlab(
        "profile", "learn", "-o", "out.json", "--aiconfigurator", "a", "--llmservingsim", "b",
        "--vidur", "c",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    tables = [("aiconfigurator_tables", "a"), ("llmservingsim_tables", "b")]
    learnt = ("learnt", *tables)
    assert asked == [
        (tables, learnt), ([("vidur_tables", "c")], learnt),
        (Path("out.json"), learnt, errors, layers),
    ]  # fmt: skip
    (_, header, rows), (_, layer_header, layer_rows) = printed
    assert header == ("GPU", "kernel", "rows", "learnt", "without this GPU")
    assert rows == [("g1", "k1", "12", percent(0.25), "-"),
                    ("g2", "k2", "7", percent(0.5), percent(0.75))]  # fmt: skip
    assert layer_header == ("GPU", "model", "learnt", "learnt on the other models")
    assert layer_rows == [("g1", "m1", percent(0.1), percent(0.2)), ("g1", "m2", percent(0.3), "-")]


# -- predictor ---------------------------------------------------------------------------------


def test_report_of_a_predictor_shows_quality_by_application_and_what_learning_costs(monkeypatch):
    printed = []
    monkeypatch.setattr(predictor_module, "print_table", lambda *given: printed.append(given))
    one = {"kendall_tau": 0.5, "interval": [0.25, 0.75], "pairs_right": 0.625,
           "pairs_right_interval": None}  # fmt: skip
    report = {
        "kind": "buckets",
        "test": {
            **one, "num_prompts": 1234, "mean_absolute_error_tokens": 56.78,
            "application_mean": {**one, "kendall_tau": None}, "gain": {**one, "pairs_right": 0.1},
            "by_application": {"qa": {**one, "num_prompts": 7}, "": {**one, "num_prompts": 8}},
        },
        "learning_curve": [
            {"num_prompts": 1000, "generated_tokens": 20_000, "training_cpu_s": 1.25, **one},
            {"num_prompts": 3000, "generated_tokens": 60_000, "training_cpu_s": 3.75, **one},
        ],
        "latency_s": {"median": 0.002},
    }  # fmt: skip
    predictor_module._print_report(report)
    tau, right = "0.500 [0.250, 0.750]", "0.625 [nan, nan]"
    assert printed == [
        ("", ("", "prompts", "Kendall's tau-b", "pairs right", "mean error, tokens"), [
            ("overall", "1,234", tau, right, "56.8"),
            ("mean of the application", "", "-", right, ""),
            ("gain over that mean", "", tau, "0.100 [nan, nan]", ""),
            ("within qa", "7", tau, right, ""), ("within (none)", "8", tau, right, ""),
        ]),
        ("", ("learned from prompts", "tokens generated for it", "Kendall's tau-b", "CPU s"), [
            ("1,000", "20,000", tau, "1.2"), ("3,000", "60,000", tau, "3.8"),
        ]),
    ]  # fmt: skip
    del report["test"]["application_mean"], report["test"]["gain"], report["learning_curve"][1:]
    printed.clear()
    predictor_module._print_report(report)
    ((_, _, rows),) = printed
    assert [row[0] for row in rows] == ["overall", "within qa", "within (none)"]


# -- compare, traces and recorded runs -----------------------------------------------------------


def test_comparison_of_backends_shows_a_table_a_load_and_writes_what_it_found(
    monkeypatch, tmp_path
):
    asked = []
    found = [SimpleNamespace(label="at 2"), SimpleNamespace(label="at 4")]
    monkeypatch.chdir(tmp_path)
    Path("one.yaml").write_text("{name: one, workload: {trace: fixed, num_requests: 3}}")
    monkeypatch.setattr(
        comparing, "compare", lambda *given, **more: asked.append((given, more)) or found
    )
    for name in ("agreement_lines", "point_lines", "point_rows", "runs_told"):
        monkeypatch.setattr(
            comparison_files, name, lambda one, *_, name=name: f"{name} {one.label}"
            if hasattr(one, "label") else name if name == "runs_told" else [name]
        )  # fmt: skip
    monkeypatch.setattr(
        comparison_files, "write", lambda found, spec, folder: (folder / "x").write_text("")
    )
    monkeypatch.setattr(measure_module, "print_table", lambda *given: asked.append(given))
    monkeypatch.setattr(measure_module, "print_lines", lambda lines: asked.append(list(lines)))
    done = schedlab("compare", "one.yaml", "-o", "out", "--keep", "kept", "--write-only")
    assert done.exit_code == 0, done.output
    ((spec, _), more), *shown = asked
    assert spec.name == "one"
    assert more == {"keep": Path("kept"), "max_s": more["max_s"], "check": None,
                    "write_only": True}  # fmt: skip
    header = comparison_files.HEADER
    assert shown[:4] == [
        ("at 2", header, "point_rows at 2"), ["", *"point_lines at 2", ""],
        ("at 4", header, "point_rows at 4"), ["", *"point_lines at 4", ""],
    ]  # fmt: skip
    last = shown[4]
    assert last[0] == "do both backends rank alike? agreement_lines"
    assert last[-2:] == ["runs_told", "results: out"]
    assert Path("out", "x").exists()


def test_list_of_traces_says_which_are_here_and_what_they_are(monkeypatch, tmp_path):
    printed = []
    (tmp_path / "a.csv").write_text("")
    traces = {
        name: SimpleNamespace(
            name=name, size_bytes=size, path=tmp_path / f"{name}.csv", licence=f"of {name}",
            summary=f"what {name} is",
        )
        for name, size in (("a", 1_234_567), ("b", 20_000))
    }  # fmt: skip
    monkeypatch.setattr(published, "PUBLISHED", traces)
    monkeypatch.setattr(trace_fetch, "print_table", lambda *given: printed.append(given))
    trace_fetch._print_list()
    ((_, header, rows),) = printed
    assert header == ("trace", "MB", "here", "licence", "what it is")
    assert rows == [
        ("a", "1.2", "yes", "of a", "what a is"),
        ("b", "0.0", "-", "of b", "what b is"),
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tests.yaml", "--fitted-on", "x.yaml"], "--fitted-on and --by-step need single requests"),
        (["tests.yaml", "--by-step"], "--fitted-on and --by-step need single requests"),
        (["one.yaml", "--measure-frontend", "f"], "--measure-frontend needs a file of load tests"),
        (["one.yaml", "--run", "a"], "--run is of a file of load tests, which one.yaml is not"),
        (["one.yaml", "--spec-only", "a=1"], "--spec-only needs --fitted-on"),
        (["one.yaml", "--other-only", "a=1"], "--other-only needs --fitted-on"),
        (["one.yaml", "--by-step", "--fitted-on", "o.yaml"], "answer different questions"),
        (["one.yaml", "--figure", "f.svg"], "--figure needs --by-step"),
    ],
)
def test_options_of_validate_that_do_not_go_together_are_refused(
    monkeypatch, tmp_path, words, said
):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "o"):
        Path(f"{name}.yaml").write_text("{name: x, workload: {trace: fixed, num_requests: 3}}")
    Path("tests.yaml").write_text("")
    monkeypatch.setattr(load_tests, "is_load_test", lambda path: path.name == "tests.yaml")
    done = schedlab("validate", *words)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("as_json", [False, True])
def test_recorded_run_is_predicted_and_told_by_metric_measured_predicted_and_error(
    monkeypatch, tmp_path, elsewhere, as_json
):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        text = f"{{name: {name}, workload: {{trace: fixed, num_requests: 3}}}}"
        Path(f"{name}.yaml").write_text(text)
    found = SimpleNamespace(
        to_data=lambda: {"d": 1}, rows=lambda: [("TTFT Mean", "11", "22", "+100%")],
        lines=lambda: ["a line"],
    )  # fmt: skip
    asked = []

    def with_terms(spec, other, progress):
        asked.append((spec, other))
        return "the terms", found

    comparing = "schedlab.experiments.comparing"
    monkeypatch.setattr(f"{comparing}.validate.validate", lambda one: asked.append(one) or found)
    monkeypatch.setattr(f"{comparing}.host_terms.validate_elsewhere", with_terms)
    words = ["seed=4"]
    if elsewhere:
        words += ["--fitted-on", "two.yaml", "--spec-only", "engine.max_num_seqs=5",
                  "--other-only", "engine.max_num_seqs=6"]  # fmt: skip
    done = schedlab("validate", "one.yaml", *words, *(["--json"] if as_json else []))
    assert done.exit_code == 0, done.output
    told = "fitted on two.yaml: the terms"
    if as_json:
        assert json.loads(done.stdout) == {"d": 1}
        assert (told in done.stderr) is elsewhere
    else:
        first, *others = filter(str.strip, done.stdout.splitlines())
        assert (first == told) is elsewhere
        title, header, *_, row, line = others if elsewhere else [first, *others]
        assert title.strip() == "one (ms)"
        assert header.split() == ["metric", "measured", "predicted", "error"]
        assert row.split() == ["TTFT", "Mean", "11", "22", "+100%"]
        assert line == "a line"
    (given,) = asked
    specs = given if elsewhere else [given]
    assert [(one.name, one.seed, one.engine.max_num_seqs) for one in specs] == (
        [("one", 4, 5), ("two", 4, 6)] if elsewhere else [("one", 4, specs[0].engine.max_num_seqs)]
    )


@pytest.mark.parametrize("front_end", [None, "f.yaml"])
def test_load_tests_are_predicted_or_measure_their_front_end(monkeypatch, tmp_path, front_end):
    asked = []
    monkeypatch.chdir(tmp_path)
    Path("some").mkdir()
    monkeypatch.setattr(load_tests, "is_load_test", lambda path: True)
    monkeypatch.setattr(load_tests, "experiments_of", lambda *given: asked.append(given) or ["e"])
    told = SimpleNamespace(to_data=lambda: {"d": 1}, header=lambda: ("h",), rows=lambda: [("r",)],
                           lines=lambda: ["line"])  # fmt: skip
    monkeypatch.setattr(
        load_tests, "validate_load_tests", lambda specs, progress: asked.append(specs) or told
    )
    measured = SimpleNamespace(
        frontend="front", to_data=lambda: {"e": 2}, held_out=told, lines=lambda: ["measured"]
    )
    monkeypatch.setattr(
        frontend_measurement,
        "measure_frontend",
        lambda specs, source, progress: asked.append((specs, source)) or measured,
    )
    monkeypatch.setattr(drive_frontend, "write_frontend", lambda *given: asked.append(given))
    words = [] if front_end is None else ["--measure-frontend", front_end]
    done = schedlab(
        "validate", "some/tests.yaml", "a=1", "--run", "b", "--profiles", "p", "--json", *words
    )
    assert done.exit_code == 0, done.output
    assert asked[0] == (Path("some/tests.yaml"), ["a=1"], ["b"], Path("p"))
    if front_end is None:
        assert asked[1:] == [["e"]]
    else:
        source = "load tests of some/tests.yaml less their simulated engines"
        assert asked[1:] == [(["e"], source), (Path("f.yaml"), "front", {"e": 2})]
    assert json.loads(done.stdout) == {"d": 1}


# -- what is told of the work, and how it ends -------------------------------------------------


@pytest.mark.parametrize("passes", [True, False])
@pytest.mark.parametrize("quiet", [True, False])
def test_check_for_regressions_tells_and_writes_its_cases_and_fails_if_they_do(
    monkeypatch, tmp_path, passes, quiet
):
    """The folder that comes with schedlab is taken where there is none here."""
    monkeypatch.chdir(tmp_path)
    told = []
    regression = "schedlab.experiments.regression"
    monkeypatch.setattr(
        "schedlab.experiments.specification.shipped.shipped_folder", lambda name: Path("with", name)
    )
    for module, name, stand_in in (
        ("baseline", "kept_baseline", lambda folder: ("kept", folder)),
        ("baseline", "version_change", lambda kept: f"versions of {kept[0]}"),
        ("check", "compare", lambda *given: [given]),
        ("report", "write_junit", lambda cases, path: path.write_text(str(len(cases)))),
        ("report", "markdown", lambda cases, versions: f"{cases[0][0]}, {versions}"),
        ("report", "passes", lambda cases: passes),
    ):
        monkeypatch.setattr(f"{regression}.{module}.{name}", stand_in)
    monkeypatch.setattr(regress_module, "_matrix", lambda folder: ("matrix", folder))
    monkeypatch.setattr(regress_module, "_measure", lambda *given: given)
    monkeypatch.setattr(regress_module, "_print", lambda *given: told.append(given))

    def checked(*words):
        done = schedlab("regress", "check", *words, *(["--quiet"] if quiet else []))
        assert done.exit_code == (0 if passes else 1)

    for words, folder, jobs, keep in (
        ([], Path("with/regression"), None, None),
        (["--baseline", "mine", "-j", 3, "--keep", "runs"], Path("mine"), 3, Path("runs")),
    ):
        checked(*words)
        matrix, kept = ("matrix", folder), ("kept", folder)
        case = (matrix, kept, (matrix, jobs, keep, quiet))
        assert told == ([] if quiet and passes else [([case], "versions of kept")])
        told.clear()
    checked("--junit", "told.xml", "--markdown", "told.md")
    assert Path("told.xml").read_text() == "1"
    assert Path("told.md").read_text().endswith(", versions of kept")
    Path("regression").mkdir()
    told.clear()
    checked()
    if told:
        assert told[0][0][0][0] == ("matrix", Path("regression"))


@pytest.mark.parametrize("num_moved", [0, 2, 3, 5])
def test_moves_are_printed_up_to_a_number_and_then_counted(monkeypatch, num_moved):
    printed = []
    monkeypatch.setattr(regress_module, "_MOST_ROWS", 3)
    report = "schedlab.experiments.regression.report"
    moved = [(f"row {i}",) for i in range(num_moved)]
    monkeypatch.setattr(f"{report}.rows", lambda cases: moved)
    monkeypatch.setattr(f"{report}.HEADER", "header")
    monkeypatch.setattr(f"{report}.summary_lines", lambda *given: [given])
    monkeypatch.setattr(regress_module, "print_table", lambda *given: printed.append(given))
    monkeypatch.setattr(regress_module, "print_lines", printed.append)
    regress_module._print("cases", "versions")
    table = [("", "header", moved[:3])] if num_moved else []
    more = [["... and 2 more rows (--markdown FILE has more)"]] if num_moved == 5 else []
    assert printed == [*table, *more, [("cases", "versions")]]


@pytest.mark.parametrize("shown", [[], ["--json"], ["-q"]])
def test_recommendation_is_printed_as_tables_as_json_or_not_and_written(
    monkeypatch, tmp_path, shown
):
    monkeypatch.chdir(tmp_path)
    search = "schedlab.experiments.search"
    found = SimpleNamespace(at_rate=2.5)
    runs = SimpleNamespace(cost_models=["model"], num_asked=17)
    for name, stand_in in {
        "recommend.recommend": lambda asked, given: found,
        "recommend.serve_line": lambda one: "vllm serve it",
        "recommend_report.HEADER": ("a", "b", "c", "d", "e", "f", "g"),
        "recommend_report.tried_rows": lambda one: [tuple("uvwxyz1")],
        "recommend_report.expected_rows": lambda one: [("a metric", "12")],
        "recommend_report.recommend_lines": lambda one, models: [f"by {models}"],
        "recommend_report.recommend_data": lambda one, models, num: {"of": [models, num]},
    }.items():
        monkeypatch.setattr(f"{search}.{name}", stand_in)
    monkeypatch.setattr(
        "schedlab.experiments.report.search_page.write_search_page", lambda folder: folder / "page"
    )
    monkeypatch.setattr(
        recommend_module, "opened_runs", lambda *_, **__: contextmanager(iter)([runs])
    )
    done = schedlab(
        "recommend", "--model", "qwen2.5-3b", "--gpu", "h100", "--workload", "azure-conv",
        "--ttft-ms", 100, "-o", "out", *shown,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    data = {"of": [["model"], 17]}
    assert json.loads(Path("out/recommend.json").read_text()) == data
    assert Path("out/serve.sh").read_text() == "vllm serve it\n"
    if shown == ["--json"]:
        assert json.loads(done.stdout) == data
        return
    if shown:
        assert done.stdout == ""
        return
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    after = lines.index("vllm serve it")
    assert lines[after - 1].split()[-1] == "1"
    assert lines[after + 1] == "expected at 2.50 requests/s"
    assert any(line.split() == ["a", "metric", "12"] for line in lines)
    assert lines[-2:] == ["by ['model']", "17 runs in out; the page: out/page"]


@pytest.mark.parametrize(
    ("words", "hardware", "dtype"),
    [
        ([], "found on cpu", "fp32"),
        (["--device", "cuda:1"], "found on cuda:1", "bf16"),
        (["--hardware", "h100", "--dtype", "fp16"], "h100", "fp16"),
    ],
)
@pytest.mark.parametrize("quiet", [True, False])
def test_calibration_is_asked_with_every_option_and_what_is_found_where_one_is_not_given(
    monkeypatch, words, hardware, dtype, quiet
):
    asked = []
    comparing_at = "schedlab.experiments.comparing"

    def calibrate(output, *, progress, **more):
        asked.append((output, more))
        assert (progress is None) is quiet
        return SimpleNamespace(verdict="it is good")

    def config(*given, **more):
        asked.append((given, more))
        return "config"

    monkeypatch.setattr(f"{comparing_at}.calibrate.calibrate", calibrate)
    monkeypatch.setattr(f"{comparing_at}.calibrate.calibration_config", config)
    monkeypatch.setattr(f"{comparing_at}.machine.detected_hardware", "found on {}".format)
    end = ["-q"] if quiet else []
    done = schedlab("calibrate", "-o", "profile", *words, *end)
    assert done.stdout == ("" if quiet else "it is good\nprofile: profile\n")
    device = words[1] if "--device" in words else "cpu"
    assert asked == [
        (("schedlab-small", hardware, dtype),
         {"max_num_seqs": 32, "max_num_batched_tokens": 256, "max_model_len": 1024,
          "block_size": 16, "num_blocks": None}),
        (Path("profile"),
         {"model_name": "schedlab-small", "hardware": hardware, "device": device, "dtype": dtype,
          "config": "config", "engine": "schedlab", "clock": "virtual", "threads": 1,
          "num_rounds": 5, "max_s": math.inf, "seed": 0}),
    ]  # fmt: skip
    asked.clear()
    schedlab(
        "calibrate", "-o", "other", "--model", "m", "--engine", "vllm", "--clock", "reference",
        "--max-num-seqs", 2, "--max-num-batched-tokens", 3, "--max-model-len", 4, "--block-size", 5,
        "--num-blocks", 6, "--rounds", 7, "--time-limit-s", 8, "--threads", 9, "--seed", 10,
        *words, *end,
    )  # fmt: skip
    assert asked == [
        (("m", hardware, dtype),
         {"max_num_seqs": 2, "max_num_batched_tokens": 3, "max_model_len": 4, "block_size": 5,
          "num_blocks": 6}),
        (Path("other"),
         {"model_name": "m", "hardware": hardware, "device": device, "dtype": dtype,
          "config": "config", "engine": "vllm", "clock": "reference", "threads": 9,
          "num_rounds": 7, "max_s": 8.0, "seed": 10}),
    ]  # fmt: skip
    for wrong, said in (
        (["--engine", "vlm"], "--engine vlm: unknown; schedlab or vllm"),
        (["--clock", "wall"], "--clock wall: a calibration knows virtual and reference"),
    ):
        done = schedlab("calibrate", "-o", "profile", *wrong)
        assert done.exit_code != 0
        assert said in f"{done.output}{done.exception}"
    assert len(asked) == 2


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("figure", [None, Path("some/steps.svg")])
def test_replay_by_step_is_told_as_a_table_or_json_and_drawn_where_it_is_asked_for(
    monkeypatch, capsys, as_json, figure
):
    drawn = []
    comparing_at = "schedlab.experiments.comparing"
    found = SimpleNamespace(
        to_data=lambda: {"kinds": 2}, rows=lambda: [("decode", "7", "1.5", "+0.1")],
        lines=lambda: ["a line"],
    )  # fmt: skip
    spec = SimpleNamespace(name="mine")
    monkeypatch.setattr(f"{comparing_at}.forced_replay.forced_replay", lambda asked: found)
    monkeypatch.setattr(
        f"{comparing_at}.by_step_figures.step_time_figure", lambda one, name: (one, name)
    )
    monkeypatch.setattr(
        "schedlab.experiments.figures.style.save", lambda *given: drawn.append(given)
    )
    validate_module._print_steps(spec, as_json, figure)
    assert drawn == ([] if figure is None else [((found, "mine"), Path("some/steps"))])
    told = capsys.readouterr().out
    if as_json:
        assert json.loads(told) == {"kinds": 2}
    else:
        lines = told.splitlines()
        assert lines[0].strip() == "mine: recorded times forced on the replay"
        assert lines[-1] == "a line"
        assert any(line.split() == ["decode", "7", "1.5", "+0.1"] for line in lines)


def test_figures_are_asked_for_by_every_option_and_told_where_they_are(monkeypatch, tmp_path):
    asked = []
    chosen = "schedlab.experiments.figures.chosen"

    def draw_chosen(*given):
        asked.append(given)
        return [Path("one.svg"), Path("two.svg")], ["this does not fit"]

    monkeypatch.setattr(f"{chosen}.draw_chosen", draw_chosen)
    monkeypatch.setattr(
        results_module, "known_metrics", lambda names: [f"known {n}" for n in names or []]
    )
    monkeypatch.setattr(saved_results, "missing_points", lambda folder: f"{folder} lacks two")
    done = schedlab("plot", "a", "b")
    assert done.stdout == "one.svg\ntwo.svg\n"
    assert done.stderr == (
        "left out: this does not fit\nwarning: a lacks two\nwarning: b lacks two\n"
    )
    plain = Chosen([], [], None, [], {}, {}, None)
    assert asked.pop() == ([Path("a"), Path("b")], plain, None, ("png", "svg"), None)
    schedlab(
        "plot", "a", "--figure", "heat-map", "--figure", "lines", "--metric", "m", "--x", "key",
        "--by", "p", "--by", "q", "--filter", "k=1,2", "--label", "name(a=b)=mine",
        "--title", "said", "--format", "pdf", "--size", "column", "-o", "out",
    )  # fmt: skip
    every = Chosen(
        ["heat_map", "lines"], ["known m"], "key", ["p", "q"], {"k": ["1", "2"]},
        {"name(a=b)": "mine"}, "said",
    )  # fmt: skip
    assert asked.pop() == ([Path("a")], every, Path("out"), ["pdf"], "column")
    schedlab("plot", "a", "--figure", "cdf", "--metric", "ttft")
    assert asked.pop()[1] == Chosen(["cdf"], ["ttft"], None, [], {}, {}, None)
    for words, said in (
        ([], "name a results folder, or --list the figures"),
        (["a", "--format", "pgn"], "--format pgn: did you mean png?"),
        (["a", "--size", "colum"], "--size colum: did you mean column?"),
        (["a", "--filter", "k"], "--filter k: write it as --filter KEY=VALUE"),
        (["a", "--label", "=v"], "--label =v: write it as --label KEY=VALUE"),
    ):
        done = schedlab("plot", *words)
        assert done.exit_code != 0
        assert said in f"{done.output}{done.exception}"
    assert asked == []
    listed = schedlab("plot", "--list").stdout
    assert all(name in listed for name in ("lines", "goodput_per_dollar", "answers", "recommended"))


@pytest.mark.parametrize("given", [True, False])
def test_trace_commands_read_and_write_as_they_are_asked(monkeypatch, given):
    asked = []
    monkeypatch.setattr(
        traces, "read", lambda *words, **more: asked.append((words, more)) or [1, 2, 3]
    )
    monkeypatch.setattr(traces, "write", lambda *words: asked.append(words))
    monkeypatch.setattr(trace_module, "_print_report", lambda trace: print("report", trace))
    monkeypatch.setattr(
        trace_module, "_print_description", lambda trace, as_json: print("told", trace, as_json)
    )
    options = ["-f", "azure", "--tokenizer", "estimate", "--default-output-tokens", 7]
    options = [*options, "--drop-empty"] if given else []
    read = (
        ("azure" if given else "auto"),
        {
            "tokenizer": "estimate" if given else "auto",
            "default_output_tokens": 7 if given else None,
            "drop_empty": given,
        },
    )
    done = schedlab(
        "trace", "convert", "in.csv", "out.csv", *options, *(["--to", "burstgpt"] if given else [])
    )
    assert done.output == "report [1, 2, 3]\nwrote 3 requests to out.csv\n"
    assert asked == [
        ((Path("in.csv"), read[0]), read[1]),
        ([1, 2, 3], Path("out.csv"), "burstgpt" if given else "schedlab"),
    ]
    asked.clear()
    more = ["--sessions", "--json"] if given else []
    assert schedlab("trace", "describe", "in.csv", *options, *more).output == (
        f"told [1, 2, 3] {given}\n"
    )
    assert asked == [((Path("in.csv"), read[0]), {**read[1], "sessions": given})]


@pytest.mark.parametrize("output", [None, "some/page.html"])
def test_page_is_of_the_first_folder_beside_the_others(monkeypatch, output):
    asked = []
    monkeypatch.setattr(
        "schedlab.experiments.report.page.write_page",
        lambda *given: asked.append(given) or "where.html",
    )
    done = schedlab("report", "a", "b", "c", *([] if output is None else ["-o", output]))
    assert done.stdout.strip() == "where.html"
    others = [Path("b"), Path("c")]
    assert asked == [(Path("a"), None if output is None else Path(output), others)]
