"""A sweep by many workers: same bytes, nothing lost, failures told."""

import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from schedlab.experiments.commands.app import app
from schedlab.experiments.results import point_folder
from schedlab.experiments.results.point_folder import POINT_FILE
from schedlab.experiments.results.results_folder import tidy_up_after_the_killed
from schedlab.experiments.running import point_hash as point_hash_module
from schedlab.experiments.running import run as run_module
from schedlab.experiments.running.point_hash import code_version, point_hash
from schedlab.experiments.specification.loading import load_spec, make_spec
from schedlab.experiments.specification.own_modules import find_own_modules
from schedlab.experiments.sweeps import dry_run, jobs, workers
from schedlab.experiments.sweeps.dry_run import describe_plan
from schedlab.experiments.sweeps.jobs import Done
from schedlab.experiments.sweeps.runs import Runs
from schedlab.experiments.sweeps.store import Store
from schedlab.experiments.sweeps.sweep_all import (
    Plan,
    Shard,
    Swept,
    plan,
    run_into,
    sweep_all,
    swept_data,
)
from schedlab.experiments.sweeps.timing import TimeEstimate, duration
from schedlab.experiments.sweeps.workers import InProcess, Processes
from schedlab.sim import user_modules
from schedlab.sim.errors import SchedlabError, SpecError
from schedlab.sim.result import RunResult

ROOT = Path(__file__).resolve().parents[2]
YAML = """\
name: tiny
workload: {trace: fixed, num_requests: 12}
replications: 2
sweep:
  policy: [fcfs, static]
  workload.request_rate: [2, 4]
"""
KILLS = """\
import os, signal
from schedlab.policies import ContinuousBatching
class Kills(ContinuousBatching):
    def plan(self, view, builder):
        os.kill(os.getpid(), signal.SIGKILL)
class Raises(ContinuousBatching):
    def plan(self, view, builder):
        raise RuntimeError("planned on purpose")
"""


@pytest.fixture
def spec_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.setattr(sys, "path", list(sys.path))
    code_version.cache_clear()  # workers read the sources anew, too
    path = tmp_path / "tiny.yaml"
    path.write_text(YAML)
    return path


def schedlab(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def contents(folder):
    """Everything a sweep wrote, but for how long points took and for locks."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not path.name.startswith(".lock"):
            content = path.read_bytes()
            if path.name == POINT_FILE:
                content = json.dumps({**json.loads(content), "seconds": 0}).encode()
            found[name] = content
    return found


def in_process(spec_file, folder, **keys):
    return sweep_all(load_spec(spec_file), Store(folder), InProcess(), **keys)


@pytest.mark.slow
def test_two_processes_give_the_bytes_of_one(spec_file):
    in_process(spec_file, Path("one"))
    with Processes(2) as workers:
        swept = sweep_all(load_spec(spec_file), Store(Path("two")), workers)
    assert (swept.num_points, swept.num_found, swept.failures) == (8, 0, [])
    one, two = contents(Path("one")), contents(Path("two"))
    assert len([name for name in one if name.endswith("result.json")]) == 8
    assert one == two


@pytest.fixture
def stand_ins(monkeypatch):
    """Begin threads for processes: one ends over a job that is negative."""
    begun, told = [], []

    def begin():
        ours, theirs = multiprocessing.Pipe()
        process = SimpleNamespace(exitcode=-9, join=lambda: None, terminate=lambda: None)
        begun.append(process)

        def serve():
            with suppress(EOFError, OSError):
                while (job := theirs.recv()) >= 0:
                    told.append(job)
                    theirs.send(Done(job, 1.5, None))
            theirs.close()

        threading.Thread(target=serve, daemon=True).start()
        return workers._Worker(process, ours)

    monkeypatch.setattr(workers, "_start", begin)
    return begun, told


def test_jobs_of_one_process_are_begun_and_come_back_in_the_order_they_are_given_in(stand_ins):
    begun, told = stand_ins
    with Processes(1) as one:
        assert [done.job for done in one.run([3, 1, 2])] == told == [3, 1, 2]
        assert list(one.run([7])) == [Done(7, 1.5, None)]
        assert list(one.run([])) == []
    assert len(begun) == 1


def test_process_that_dies_costs_its_job_alone_and_another_takes_its_place(stand_ins):
    begun, told = stand_ins
    death = "its process was ended by SIGKILL (out of memory?)"
    with Processes(1) as one:
        assert [(done.job, done.error) for done in one.run([4, -1, 5, 6])] == [
            (4, None), (-1, death), (5, None), (6, None),
        ]  # fmt: skip
    assert (told, len(begun)) == ([4, 5, 6], 2)


@pytest.mark.parametrize(("num_jobs", "expected"), [(1, 1), (2, 2), (3, 3), (9, 3)])
def test_no_more_processes_are_begun_than_there_are_jobs(stand_ins, num_jobs, expected):
    with Processes(3) as three:
        assert sorted(done.job for done in three.run(range(num_jobs))) == [*range(num_jobs)]
    assert len(stand_ins[0]) == expected


@pytest.mark.parametrize("told", [[], None])
def test_run_of_several_points_ends_with_the_first_that_fails(tmp_path, told):
    class Breaking:
        """Stands for processes, of which the second point breaks."""

        num_workers = 2
        count = 0

        def run(self, jobs):
            for self.count, job in enumerate(jobs, start=1):
                yield Done(job, 1.0, "it broke" if self.count == 2 else None)

    def progress(count, total, timing, done):
        told.append((count, total, done and done.error))

    workers = Breaking()
    spec = make_spec({"name": "s", "workload": {"trace": "fixed", "num_requests": 3},
                      "replications": 9, "seed": 4})  # fmt: skip
    with pytest.raises(SchedlabError, match=r"^s, seed 5: it broke$"):
        run_into(spec, tmp_path, workers, None if told is None else progress)
    assert workers.count == 2
    assert told in (None, [(0, 9, None), (1, 9, None), (2, 9, "it broke")])


@pytest.mark.slow
def test_light_sweep_keeps_metrics_and_no_tables(spec_file):
    def sweep(folder, light=False):
        store = Store(Path(folder), light=light)
        return sweep_all(load_spec(spec_file), store, InProcess()).num_found

    spec_file.write_text("name: tiny\nworkload: {trace: fixed, num_requests: 3}\n")
    sweep("full")
    sweep("light", light=True)
    full, light = contents(Path("full")), contents(Path("light"))
    assert not [name for name in light if name.endswith(".parquet")]
    assert all(light[n] == full[n] for n in full if n.endswith(("result.json", "summary.csv")))
    point = next(Path("light").glob("*/result.json")).parent
    with pytest.raises(SchedlabError, match="run it again without --light"):
        RunResult.load(point)
    # What is there without tables is enough for the same question, and not for one of more.
    assert [sweep("light", light=True), sweep("full", light=True), sweep("light")] == [1, 1, 0]
    assert contents(Path("light")).keys() == full.keys()


def test_metric_that_needs_tables_is_refused_in_a_light_sweep(spec_file):
    done = schedlab("sweep", spec_file, "-o", "out", "--light", "-m", "largest(latency=itl)")
    assert done.exit_code == 2
    assert "--light keeps no tables, and largest(latency=itl)" in done.output
    assert not Path("out").exists()


@pytest.mark.slow
def test_run_and_sweep_leave_the_same_files(spec_file, monkeypatch):
    monkeypatch.setattr("schedlab.experiments.sweeps.workers.Processes", lambda n: InProcess())
    assert schedlab("sweep", spec_file, "-o", "swept", "-q").exit_code == 0
    assert schedlab("run", spec_file, "-o", "run", "-q").exit_code == 0
    swept, run = contents(Path("swept")), contents(Path("run"))
    assert {"summary.json", "summary.csv", "throughput_p99.svg", "points.json"} < run.keys()
    del run[".schedlab.json"]  # lists what a run may replace; a sweep replaces nothing
    assert run == swept


@pytest.mark.slow
def test_run_of_one_point_leaves_the_folder_of_that_point(spec_file):
    asked = {"name": "tiny", "workload": {"trace": "fixed", "num_requests": 12, "request_rate": 2}}
    spec_file.write_text(yaml.safe_dump(asked))
    assert schedlab("run", spec_file, "-o", "one", "-q").exit_code == 0
    in_process(spec_file, Path("swept"))
    (folder,) = (path.parent for path in Path("swept").glob("*/point.json"))
    assert contents(Path("one")) == contents(folder)


@pytest.mark.slow
def test_second_sweep_runs_nothing_and_a_wider_one_only_what_is_new(spec_file):
    before = in_process(spec_file, Path("out"))
    again = in_process(spec_file, Path("out"))
    assert (before.num_found, again.num_found) == (0, 8)
    assert repr(again.results.rows) == repr(before.results.rows)  # NaN is not equal to itself
    spec_file.write_text(YAML.replace("[2, 4]", "[4, 8]"))
    wider = in_process(spec_file, Path("out"))
    assert (wider.num_points, wider.num_found, wider.num_others) == (8, 4, 4)


@pytest.mark.slow
def test_point_with_a_missing_or_torn_file_runs_again(spec_file):
    in_process(spec_file, Path("out"))
    whole = contents(Path("out"))
    first, second = sorted(Path("out").glob("*/result.json"))[:2]
    first.write_text(first.read_text()[:100])
    (second.parent / "steps.parquet").unlink()
    assert in_process(spec_file, Path("out")).num_found == 6
    assert contents(Path("out")) == whole


@pytest.mark.slow
def test_sweep_killed_in_the_middle_of_a_write_loses_no_finished_point(spec_file):
    in_process(spec_file, Path("whole"))
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from schedlab.experiments.specification.loading import load_spec\n"
        "from schedlab.experiments.sweeps.store import Store\n"
        "from schedlab.experiments.sweeps.sweep_all import sweep_all\n"
        "from schedlab.experiments.sweeps.workers import InProcess\n"
        "import schedlab.sim.record.saved_log as r\n"
        "write, calls = r.write_table, []\n"
        "def dying(path, batches):\n"
        "    calls.append(path)\n"
        "    if len(calls) == 21:\n"  # six tables a point: in the middle of the fourth
        "        path.write_bytes(b'half')\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    write(path, batches)\n"
        "r.write_table = dying\n"
        f"sweep_all(load_spec({str(spec_file)!r}), Store(Path('out')), InProcess())\n"
    )
    died = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": ROOT})
    assert died.returncode == -signal.SIGKILL
    assert len(list(Path("out").glob("[!.]*/result.json"))) == 3
    assert list(Path("out").glob(".*.new-*/*"))  # the half-written point
    swept = in_process(spec_file, Path("out"))
    assert (swept.num_found, swept.failures) == (3, [])
    assert contents(Path("out")) == contents(Path("whole"))


@pytest.mark.slow
def test_sweep_of_processes_killed_from_outside_goes_on(spec_file):
    spec_file.write_text(YAML.replace("num_requests: 12", "num_requests: 250"))
    command = [
        sys.executable,
        "-m",
        "schedlab.experiments.commands.cli",
        "sweep",
        spec_file,
        "-o",
        "out",
        "-j",
        "2",
    ]
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": ROOT}, start_new_session=True
    )
    while process.poll() is None and len(list(Path("out").glob("[!.]*/point.json"))) < 2:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)  # its workers notice and end themselves
    process.wait()
    kept = len(list(Path("out").glob("[!.]*/point.json")))
    swept = in_process(spec_file, Path("out"))
    assert 2 <= kept <= swept.num_found <= 8
    in_process(spec_file, Path("whole"))
    assert contents(Path("out")) == contents(Path("whole"))


@pytest.mark.slow
def test_worker_that_dies_costs_its_point_only(spec_file):
    Path("killing.py").write_text(KILLS)
    done = schedlab(
        "sweep", spec_file, "-o", "out", "-j", "2",
        "sweep.policy=['killing:Kills', fcfs, 'killing:Raises']", "sweep.workload.request_rate=[2]",
    )  # fmt: skip
    assert done.exit_code == 1, done.output
    assert "failed: killing:Kills, request_rate=2, seed 0: its process was ended by SIGKILL" in (
        done.output
    )
    assert "planned on purpose" in done.output
    assert "4 FAILED" in done.output
    summary = json.loads(Path("out/summary.json").read_text())
    assert [row["policy"] for row in summary["rows"]] == ["fcfs"]


@pytest.mark.slow
def test_failing_point_does_not_stop_the_rest_and_is_tried_again(spec_file):
    Path("faulty_once.py").write_text(KILLS)
    sys.path.insert(0, str(Path.cwd()))
    spec = load_spec(
        spec_file, ["sweep.policy=['faulty_once:Raises', fcfs]", "sweep.workload.request_rate=[2]"]
    )
    for _ in range(2):
        swept = sweep_all(spec, Store(Path("out")), InProcess())
        assert [done.job.spec.seed for done in swept.failures] == [0, 1]
        assert "planned on purpose" in swept.failures[0].error
    assert swept.num_found == 2


def test_sweep_json_holds_the_table_and_what_failed(spec_file, monkeypatch):
    Path("failing.py").write_text(KILLS)
    monkeypatch.setattr("schedlab.experiments.sweeps.workers.Processes", lambda n: InProcess())
    done = schedlab(
        "sweep", spec_file, "-o", "out", "--json", "replications=1",
        "sweep.policy=['failing:Raises', fcfs]", "sweep.workload.request_rate=[2]",
    )  # fmt: skip
    assert done.exit_code == 1
    data = json.loads(done.stdout)
    assert [row["policy"] for row in data["rows"]] == ["fcfs"]
    (failure,) = data["failures"]
    assert failure["label"] == "failing:Raises, request_rate=2"
    assert "planned on purpose" in failure["error"]


@pytest.mark.slow
def test_shards_share_the_points_and_the_last_sums_up(spec_file):
    for index in (1, 2, 3):
        swept = in_process(spec_file, Path("parts"), shard=Shard(index, 3))
        assert swept.num_points == {1: 3, 2: 3, 3: 2}[index]
        assert (swept.results is None) == (index < 3)
    in_process(spec_file, Path("whole"))
    assert contents(Path("parts")) == contents(Path("whole"))


@pytest.mark.parametrize("shard", ["0/2", "3/2", "a/2", "2"])
def test_shard_that_is_none_raises(spec_file, shard):
    done = schedlab("sweep", spec_file, "-o", "out", "--shard", shard)
    assert done.exit_code == 2
    assert f"--shard {shard}" in done.output


def test_sweep_into_a_folder_of_others_is_refused(spec_file):
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("x")
    done = schedlab("sweep", spec_file, "-o", "mine")
    assert done.exit_code == 2
    assert "no folder of a sweep" in done.output
    assert [path.name for path in Path("mine").iterdir()] == ["thesis.tex"]


def test_sweep_killed_before_it_had_marked_its_folder_is_begun_again(tmp_path):
    (tmp_path / "..schedlab-sweep.json.4711.tmp").write_text("{")
    Store(tmp_path)
    assert (tmp_path / ".schedlab-sweep.json").exists()


def test_two_sweeps_at_the_same_time_in_one_folder_are_refused(spec_file):
    store = Store(Path("out"))
    with store.lock(""), pytest.raises(SpecError, match="another sweep is at work"):
        in_process(spec_file, Path("out"))


@pytest.mark.slow
def test_dry_run_writes_nothing_and_says_how_much_is_left(spec_file):
    done = schedlab("sweep", spec_file, "-o", "out", "--dry-run", "-j", "2")
    assert done.exit_code == 0, done.output
    assert "8 points: 4 settings x 2 replications; 8 of them here, 0 done, 8 to run" in done.output
    assert "12 of 12 requests" in done.output
    assert not Path("out").exists()
    in_process(spec_file, Path("out"), shard=Shard(1, 2))
    done = schedlab("sweep", spec_file, "-o", "out", "--dry-run")
    assert "4 done, 4 to run" in done.output
    assert "from the 4 points that are done" in done.output


def test_sweep_on_the_real_backend_runs_one_point_at_a_time(spec_file):
    done = schedlab("sweep", spec_file, "-o", "out", "-j", "2", "backend=real")
    assert done.exit_code == 2
    assert "one point at a time" in done.output


# -- what a result depends on ------------------------------------------------------------------


def spec(**keys):
    workload = {"trace": "fixed", "num_requests": 5, **keys.pop("workload", {})}
    return make_spec({"workload": workload, **keys})


def test_point_hash_changes_with_what_can_change_the_result(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    base = point_hash(spec())
    assert point_hash(spec(name="other")) == base
    for other in (spec(seed=1), spec(policy="static"), spec(engine={"block_size": 32})):
        assert point_hash(other) != base
    monkeypatch.setattr("schedlab.experiments.running.point_hash.versions", lambda: {"numpy": "0"})
    assert point_hash(spec()) != base


def test_point_hash_follows_the_trace_by_content(tmp_path):
    a, b = tmp_path / "a.csv", tmp_path / "b.csv"
    for path in (a, b):
        path.write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n1,5,5\n")
    traced = [spec(workload={"trace": str(path), "num_requests": 2}) for path in (a, b)]
    assert point_hash(traced[0]) == point_hash(traced[1])
    b.write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n1,5,6\n")
    assert point_hash(traced[0]) != point_hash(traced[1])


def test_point_hash_follows_a_policy_and_the_modules_it_imports(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hashed_policy.py").write_text(
        "from hashed_helper import N\nfrom schedlab.policies import ContinuousBatching\n"
        "class Mine(ContinuousBatching):\n    source = 'mine'\n"
    )
    (tmp_path / "hashed_helper.py").write_text("N = 1\n")
    mine = spec(policy="hashed_policy:Mine")
    before = point_hash(mine)
    assert point_hash(mine) == before
    (tmp_path / "hashed_helper.py").write_text("N = 2\n")
    find_own_modules()
    assert point_hash(mine) != before


def test_point_hash_leaves_out_what_is_installed_anywhere_and_what_cannot_be_looked_at(
    tmp_path, monkeypatch
):
    of_user = tmp_path / "lib" / "python3" / "site-packages"
    broken = tmp_path / "hashed_broken"
    for folder in (of_user, broken):
        folder.mkdir(parents=True)
        monkeypatch.syspath_prepend(str(folder.parent if folder is broken else folder))
    (of_user / "hashed_library.py").write_text("N = 1\n")
    (broken / "__init__.py").write_text("raise AttributeError('of another version')\n")
    (tmp_path / "hashed_user.py").write_text(
        "from hashed_library import N\nfrom schedlab.policies import ContinuousBatching\n"
        "try:\n    from hashed_broken.part import thing\nexcept Exception:\n    thing = None\n"
        "class Mine(ContinuousBatching):\n    source = 'mine'\n"
    )
    mine = spec(policy="hashed_user:Mine")
    before = point_hash(mine)
    (of_user / "hashed_library.py").write_text("N = 2\n")
    assert point_hash(mine) == before
    with (tmp_path / "hashed_user.py").open("a") as own:
        own.write("N = 3\n")
    find_own_modules()
    assert point_hash(mine) != before


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A copy of the program's sources, which results are then hashed by."""
    for package in ("sim", "policies", "traces", "gpu_backend", "experiments"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    monkeypatch.setattr("schedlab.experiments.running.point_hash._ROOT", tmp_path)
    yield tmp_path
    code_version.cache_clear()


@pytest.mark.slow
def test_point_hash_follows_every_file_that_makes_a_run_and_no_other(sources):
    def now():
        code_version.cache_clear()
        return point_hash(spec())

    known = [now()]

    def changed(path):
        path.write_text(path.read_text() + "# edited\n")
        known.append(now())
        return known[-1] != known[-2]

    rooms = ("sim/core", "sim/cost", "policies", "traces/readers")
    takes_part = [min((sources / room).glob("*.py")) for room in rooms]
    for room in ("running", "specification"):
        takes_part += (sources / "experiments" / room).glob("*.py")
    assert all(map(changed, takes_part))
    (sources / "experiments" / "running" / "later.py").write_text("")
    known.append(now())
    assert known[-1] != known[-2]
    assert changed(sources / "experiments" / "running" / "later.py")
    reads_results = ("report", "figures", "sweeps", "commands", "results")
    for room in reads_results:
        assert not changed(max((sources / "experiments" / room).glob("*.py")))
    assert not changed(sources / "gpu_backend" / "__init__.py")
    for left in (".engine.py.swp", "engine.py~"):  # by an editor
        (sources / "sim" / "core" / left).write_text("")
        known.append(now())
        assert known[-1] == known[-2]


@pytest.mark.slow
def test_a_run_imports_nothing_of_experiments_that_is_not_hashed():
    code = (
        "import sys, schedlab.experiments.running.run as r\n"
        "from schedlab.experiments.specification.loading import make_spec\n"
        "spec = {'workload': {'trace': 'fixed', 'num_requests': 3}}\n"
        "loaded = make_spec(spec)\n"
        "r.run(loaded)\n"
        "print(*{m.split('.')[2] for m in sys.modules if m.startswith('schedlab.experiments.')})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    # What a specification says is hashed itself, with its defaults.
    assert set(done.stdout.split()) == {"running", "specification"}


def test_plan_runs_first_replications_first_and_equal_points_once(spec_file, tmp_path):
    sweep = {"policy": ["fcfs", {"name": "fcfs"}, "static"]}
    twice = spec(replications=2, sweep=sweep)
    planned = plan(twice, Store(tmp_path / "out"))
    assert len(planned.points) == 6
    assert [job.spec.seed for job in planned.wanted] == [0, 0, 1, 1]


# -- how long it takes -------------------------------------------------------------------------


def test_timing_expects_a_replication_to_take_as_long_as_its_sibling():
    now = [0.0]
    timing = TimeEstimate(["a", "a", "b", "b"], num_workers=1, clock=lambda: now[0])
    assert timing.remaining_s() is None
    timing.finish("a", 10.0)
    assert timing.remaining_s() == 30.0  # everything else as long as what is known
    timing.finish("b", 100.0)
    assert timing.remaining_s() == 110.0
    now[0] = 60.0
    assert timing.remaining_s() == 50.0


def test_timing_of_many_workers_is_silent_until_each_has_had_a_turn():
    timing = TimeEstimate(["a"] * 8, num_workers=4, clock=lambda: 0.0)
    for _ in range(3):
        timing.finish("a", 8.0)
        assert timing.remaining_s() is None
    timing.finish("a", 8.0)
    assert timing.remaining_s() == 8.0
    assert timing.text() == "about 8 s left"


def test_timing_is_never_below_the_longest_point():
    timing = TimeEstimate(["a", "b"], num_workers=2, clock=lambda: 0.0)
    timing.know("a", 1.0)
    timing.know("b", 99.0)
    assert timing.remaining_s() == 99.0
    short = TimeEstimate(["a", "b"], num_workers=2, clock=lambda: 0.0)
    short.know("a", 0.25)
    short.know("b", 0.5)
    assert short.remaining_s() == 0.5
    # A setting without points left counts no longer, however long it took.
    short.finish("b", 0.75)
    assert short.remaining_s() == 0.25
    short.finish("a", 0.25)
    assert short.remaining_s() == 0.0


def test_timing_ignores_how_fast_points_fail():
    timing = TimeEstimate(["a", "b"], num_workers=1, clock=lambda: 0.0)
    timing.finish("a", None)
    assert timing.remaining_s() is None
    assert math.isclose(TimeEstimate([], 1).remaining_s(), 0.0)


def test_duration_is_no_more_precise_than_it_needs_to_be():
    shown = [duration(s) for s in (0.2, 1, 1.6, 59, 60, 61, 605, 3600, 90_000)]
    assert shown == ["1 s", "1 s", "2 s", "59 s", "1 min", "1 min", "10 min", "1 h", "25 h"]
    assert [duration(s) for s in (7.4, 86, 200, 3590, 7300, 7311)] == [
        "7 s", "1 min 30 s", "3 min 20 s", "59 min 50 s", "2 h 2 min", "2 h 2 min",
    ]  # fmt: skip


# -- Ray ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_local_ray_cluster_gives_the_bytes_of_one_process(spec_file):
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    done = schedlab("sweep", spec_file, "-o", "clustered", "-j", "2", "-q", "--ray")
    assert done.exit_code == 0, done.output
    in_process(spec_file, Path("one"))
    assert contents(Path("clustered")) == contents(Path("one"))


@pytest.mark.slow
def test_ray_reports_failing_points(spec_file):
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    Path("killing.py").write_text(KILLS)
    done = schedlab(
        "sweep", spec_file, "-o", "out", "--ray", "sweep.workload.request_rate=[2]",
        "sweep.policy=['killing:Kills', fcfs, 'killing:Raises']",
    )  # fmt: skip
    assert done.exit_code == 1, done.output
    assert "planned on purpose" in done.output
    assert "killing:Kills, request_rate=2, seed 1: WorkerCrashedError" in done.output
    assert len(list(Path("out").glob("[!.]*/result.json"))) == 2


def test_ray_without_the_package_says_how_to_get_it(spec_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    done = schedlab("sweep", spec_file, "-o", "out", "--ray")
    assert done.exit_code == 2
    assert "schedlab[ray]" in done.output


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["quickstart"], "local"),
        (["tiny.yaml"], "local"),
        (["auto", "quickstart"], "auto"),
        (["ray://head:10001", "tiny.yaml", "seed=1"], "ray://head:10001"),
        (["-q", "quickstart"], "local"),
    ],
)
def test_what_follows_ray_is_its_address_unless_it_is_an_experiment(
    spec_file, monkeypatch, words, address
):
    asked = []

    def choose(jobs, ray):
        asked.append(ray)
        raise SpecError("no cluster here")

    monkeypatch.setattr(workers, "choose_workers", choose)
    done = schedlab("sweep", "-o", "out", "--ray", *words)
    assert "no cluster here" in done.output
    assert asked == [address]


def a_point(seed):
    return make_spec({"workload": {"trace": "fixed", "num_requests": 3}, "seed": seed})


def test_results_of_other_points_are_counted_without_those_of_the_sweep(tmp_path):
    store = Store(tmp_path / "out")
    ours, others = (
        [store.job(a_point(seed), f"{seed}") for seed in seeds] for seeds in ((1, 2, 3), (4, 5))
    )
    store._known = {job.content_hash: job.folder for job in [*ours[:2], *others]}
    assert (store.num_others(ours), store.num_others(others), store.num_others([])) == (2, 2, 4)


def test_every_cost_model_behind_the_points_is_told_once(tmp_path, monkeypatch):
    runs = Runs(Store(tmp_path / "out"), InProcess())
    models = {f"{i}": {"name": name} for i, name in enumerate(["a", "b", "a", "c"])}
    monkeypatch.setattr(Runs, "run", lambda self, jobs: [])
    monkeypatch.setattr(
        Store, "load",
        lambda self, job: SimpleNamespace(cost_model=models[job.label], warnings=[]),
    )  # fmt: skip
    wanted = [(a_point(int(label)), label) for label in models]
    runs.tried(wanted[:2])
    runs.tried(wanted[1:])
    assert [one["name"] for one in runs.cost_models] == ["a", "b", "c"]


def test_time_of_a_point_is_that_of_its_first_requests_and_of_those_left(monkeypatch):
    """Runs that take 2 s and 10 ms a request."""
    monkeypatch.setattr(dry_run, "_seconds", lambda job, n, folder: 2.0 + 0.01 * n)
    for n, timed in ((1000, 300), (300, 300), (100, 100), (10, 10)):
        monkeypatch.setattr(dry_run, "_num_requests", lambda spec, n=n: n)
        found = dry_run.time_point(SimpleNamespace(label="x", spec=None))
        assert found == ("x", pytest.approx(2.0 + 0.01 * n), timed, n)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="tells zombies by /proc")
def test_folder_of_a_process_that_ended_and_was_not_waited_for_is_removed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    gone, alive = (tmp_path / f".run.new-{pid}" for pid in (process.pid, os.getpid()))
    gone.mkdir()
    alive.mkdir()
    tidy_up_after_the_killed(tmp_path)
    assert [path.exists() for path in (gone, alive)] == [False, True]
    process.wait()


def test_dry_run_of_a_shard_counts_its_own_points():
    point = [SimpleNamespace(label=label, settings={}) for label in "aab"]
    job = [SimpleNamespace(label=label, spec=SimpleNamespace(seed=0)) for label in "ab"]
    told = describe_plan(Plan([*point, point[2]], job, job, []), None, 1)
    assert told == ["4 points: 2 settings x 2 replications; 2 of them here, 2 done, 0 to run"]


PLAIN = {"workload": {"trace": "azure-conv", "num_requests": 1}}


def test_what_a_sweep_came_to_tells_found_and_missing_points_apart():
    told = swept_data(make_spec(PLAIN), Swept(None, 9, 5, [], num_missing=3))
    assert (told["num_points"], told["num_found"], told["num_missing"]) == (9, 5, 3)


@pytest.mark.parametrize(
    ("exitcode", "told"),
    [(0, "its process ended with status 0"), (None, "its process ended with status None"),
     (-9, "its process was ended by SIGKILL (out of memory?)"),
     (-15, "its process was ended by SIGTERM")],
)  # fmt: skip
def test_death_of_a_worker_is_told_by_signal_or_status(exitcode, told):
    assert workers._death(exitcode) == told


def test_point_keeps_the_seconds_of_its_run_and_tells_those_with_writing(monkeypatch, tmp_path):
    clock = iter((100.0, 102.0, 107.0))
    kept = []
    monkeypatch.setattr(jobs, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(jobs, "replacing_folder", lambda folder, is_as_good: nullcontext(folder))
    monkeypatch.setattr(point_hash_module, "point_hash", lambda spec: "hash")
    monkeypatch.setattr(point_hash_module, "own_modules", lambda spec: {})
    monkeypatch.setattr(run_module, "run", lambda spec, progress: "result")
    monkeypatch.setattr(point_folder, "write_point", lambda *given: kept.append(given))
    spec = SimpleNamespace(modules=user_modules.places())
    job = SimpleNamespace(spec=spec, content_hash="hash", folder=tmp_path, light=True)
    assert jobs.run_point(job).seconds == 7.0
    assert kept == [("result", spec, tmp_path, "hash", 2.0, True)]


def test_worker_answers_every_job_with_the_path_it_was_given_until_nobody_asks(monkeypatch):
    jobs, told, begun = [3, 4], [], []

    class Connection:
        def recv(self):
            if not jobs:
                raise EOFError
            return jobs.pop(0)

        def send(self, done):
            told.append((done, list(sys.path)))

    monkeypatch.setattr(workers, "run_job", lambda job: f"done {job}")
    monkeypatch.setattr(workers.signal, "signal", lambda *given: begun.append(given))
    thread = SimpleNamespace(start=lambda: begun.append("thread"))
    monkeypatch.setattr(workers.threading, "Thread", lambda **given: begun.append(given) or thread)
    monkeypatch.setattr(sys, "path", [*sys.path])
    workers._serve(Connection(), ["here", *sys.path])
    assert [done for done, _ in told] == ["done 3", "done 4"]
    assert all(path[0] == "here" for _, path in told)
    assert begun == [
        (signal.SIGINT, signal.SIG_IGN), {"target": workers._end_with_parent, "daemon": True},
        "thread",
    ]  # fmt: skip


def test_worker_ends_when_its_parent_is_gone(monkeypatch):
    waited, ended = [], []
    parent = SimpleNamespace(sentinel=7)
    monkeypatch.setattr(workers.multiprocessing, "parent_process", lambda: parent)
    monkeypatch.setattr(workers, "wait", waited.append)
    monkeypatch.setattr(workers.os, "_exit", ended.append)
    workers._end_with_parent()
    assert (waited, ended) == ([[7]], [1])


def test_environment_of_workers_is_put_back_as_it_was(monkeypatch):
    monkeypatch.setenv("SCHEDLAB_A", "before")
    monkeypatch.delenv("SCHEDLAB_B", raising=False)
    with workers._environment({"SCHEDLAB_A": "1", "SCHEDLAB_B": "2"}):
        assert (os.environ["SCHEDLAB_A"], os.environ["SCHEDLAB_B"]) == ("1", "2")
    assert os.environ["SCHEDLAB_A"] == "before"
    assert "SCHEDLAB_B" not in os.environ
