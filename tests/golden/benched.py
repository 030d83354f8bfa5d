"""What the benches run, reckon, print and write, by a clock whose every reading is known."""

import io
import itertools
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

from schedlab.experiments.bench import (
    against,
    bench,
    decision_bench,
    distserve,
    fleet_bench,
    hit_rates,
    peers,
    point_bench,
    policy_shares,
    session_shares,
)
from schedlab.sim.core.engine import Engine
from tests.golden.rounding import json_digest


class _Clock:
    """Tells a later time at each reading, each time by more than before."""

    def __init__(self) -> None:
        self._readings = itertools.count(1)

    def process_time(self) -> float:
        return next(self._readings) ** 2 / 16

    def perf_counter_ns(self) -> int:
        return next(self._readings) ** 2 * 1_000


@contextmanager
def _clock(*modules: Any) -> Iterator[None]:
    """Let modules read a clock of their own, and whoever else asks for CPU time as well."""
    clock = _Clock()
    with mock.patch.object(time, "process_time", clock.process_time):
        for module in modules:
            patch = mock.patch.object(module, "time", clock)
            patch.start()
        try:
            yield
        finally:
            mock.patch.stopall()


def _printed(main: Any, argv: list[str]) -> list[str]:
    """Return the lines that a command prints but those that name core and machine."""
    out = io.StringIO()
    with redirect_stdout(out):
        try:
            main(argv)
        except SystemExit as end:
            print("exit", end.code)
    lines = out.getvalue().splitlines()
    return [line for line in lines if not line.startswith(("trace:", "core:"))]


# -- the simulator alone --------------------------------------------------------------------------


def simulator(_: str) -> dict[str, Any]:
    """Run the bench with stand-ins for its processes, and one of its workloads in small."""
    asked: list[list[str]] = []

    def cpu_of(arguments: list[str], folder: Path) -> tuple[float, str]:
        asked.append([one for one in arguments if not one.startswith("{")])
        assert folder.is_dir()
        n = len(asked)
        row = {
            "num_requests": 1000 + n, "completed": 1000, "num_steps": 9000 * n, "num_plans": 70 * n,
            "requests_per_cpu_s": 5000.5 / n, "loop_cpu_s": 0.25 * n, "peak_rss_mb": 80.25,
        }  # fmt: skip
        return 1.5 * n, json.dumps(row)

    cost = decision_bench.Cost("fcfs", (10.0, 20.0, 90.0), 33.0)
    overhead = fleet_bench.Overhead("vllm", 16, 1e4, 1.1, 1.2, 1.3, 4.5)
    with (
        TemporaryDirectory() as folder,
        mock.patch.dict("os.environ", {"SCHEDLAB_DATA": "no-data-folder"}),
        mock.patch.object(bench, "_cpu_of", cpu_of),
        mock.patch.object(decision_bench, "measure", return_value=[cost]),
        mock.patch.object(fleet_bench, "report", lambda *given, **more: [overhead, given, more]),
        mock.patch.object(fleet_bench.Overhead, "_asdict", lambda self: {"engines": self[1]}),
    ):
        file = Path(folder) / "figures.json"
        quick = _printed(bench.main, ["--quick"])
        calls = len(asked)
        with mock.patch.object(bench, "_fleets", return_value=[overhead._asdict()]):
            whole = _printed(bench.main, ["--json", str(file)])
        kept = json.loads(file.read_text(encoding="utf-8"))
    small = bench.workloads(None)["6 req/s"]
    small["workload"]["num_requests"] = 12
    with _clock():
        (one,) = _printed(bench.main, ["--one", json.dumps(small)])
    measured = json.loads(one)
    assert 20 < measured.pop("peak_rss_mb") < 100_000
    del kept["machine"]
    return {
        "asked": [calls, len(asked), json_digest(asked), asked[0], asked[-2:]],
        "quick": quick, "whole": whole[-8:], "num lines": len(whole), "one": measured,
        "kept": [sorted(kept), json_digest(kept), kept["skip_ahead_gain"], kept["drafts"]],
        "workloads": [json_digest(bench.workloads(at)) for at in (None, Path("a/trace.csv"))],
    }  # fmt: skip


def processes(_: str) -> dict[str, Any]:
    """Start processes that take known times, here and of another checkout."""
    asked: list[Any] = []

    def run(arguments: list[str], **options: Any) -> Any:
        given = options.pop("env")
        kept = {name: one.replace(str(bench.ROOT), "ROOT") for name, one in given.items()}
        asked.append([arguments[1:], str(options.pop("cwd")), kept, options])
        return SimpleNamespace(returncode=int("bad" in arguments), stdout="x" * 3000 + "end")

    times = [SimpleNamespace(children_user=u, children_system=s) for u, s in
             ((1.0, 0.5), (4.0, 0.75))]  # fmt: skip
    found = {}
    for name, call in (
        ("bench", lambda: bench._cpu_of(["-m", "x"], Path("f"))[0]),
        ("peers", lambda: peers.cpu_s(["p", "-o", "out"], Path("f"))),
        ("against", lambda: against.cpu_s(Path("r"), ["-m", "y"], Path("f"))),
        ("peers bad", lambda: peers.cpu_s(["p", "bad"], Path("f"))),
        ("against bad", lambda: against.cpu_s(Path("r"), ["bad"], Path("f"))),
    ):
        with (
            mock.patch.object(subprocess, "run", run),
            mock.patch("os.times", side_effect=list(times)),
            mock.patch.dict("os.environ", {"PYTHONDONTWRITEBYTECODE": "1", "A": "b"}, clear=True),
        ):
            try:
                found[name] = call()
            except SystemExit as end:
                told = str(end.code)
                found[name] = [told[:30], len(told), told[-4:]]
    return {"seconds": found, "asked": asked}


def decisions(_: str) -> dict[str, Any]:
    """Hold a queue at its depth for a few steps; say by depth what a step costs."""
    drawn = [make(7) for make, _ in zip(decision_bench._requests(), range(1030), strict=False)]
    facts = [
        [a.request.id, a.request.arrival_ns, a.request.prompt_tokens, a.request.predicted_tokens,
         a.output_tokens, a.request.priority, a.request.tenant, a.request.max_tokens, a.ready_ns]
        for a in drawn
    ]  # fmt: skip
    depths: list[int] = []

    def watched(*given: Any) -> Any:
        return Engine(*given, observer=lambda e: depths.append(e.requests.num_waiting))

    with _clock(decision_bench), mock.patch.object(decision_bench, "Engine", watched):
        us = decision_bench.step_us("wait", 5, 4, decisions=4)
    asked: list[Any] = []

    def step_us(*given: Any) -> float:
        asked.append(given)
        return float(2 ** len(asked))

    with mock.patch.object(decision_bench, "step_us", step_us):
        costs = [[*one, one.slope] for one in decision_bench.measure(["sjf", "fcfs"])]
        every = len(list(decision_bench.measure()))
    return {
        "drawn": [facts[0], json_digest(facts)], "us": us, "depths": depths,
        "asked": asked[:8], "costs": costs, "all": every > 20,
    }  # fmt: skip


def fleets(_: str) -> dict[str, Any]:
    """Measure small fleets, and reckon what they cost beyond their engines."""
    with mock.patch.object(fleet_bench, "_NUM_REQUESTS", 24), _clock(fleet_bench):
        rows = fleet_bench.report(["vllm"], [2, 3], 3)
        sent = []
        for with_prefixes in (False, True):
            spec, arrivals = fleet_bench._load(3, with_prefixes=with_prefixes)
            sent.append(
                [spec.cluster and spec.cluster.count, spec.workload.request_rate,
                 spec.engine.enable_prefix_caching,
                 [[a.request.id, a.request.arrival_ns, a.request.prompt_tokens,
                   a.request.prefix_hash_ids] for a in arrivals][:9]]
            )  # fmt: skip
        printed = _printed(fleet_bench.main, ["llm_d", "--engines", "2", "--rounds", "1"])
    with mock.patch.object(fleet_bench, "report") as asked:
        fleet_bench.main([])
    given = fleet_bench._Given([3, 1])
    return {
        "rows": [list(row) for row in rows], "sent": sent, "printed": printed,
        "asked": [list(map(str, call.args)) for call in asked.call_args_list],
        "given": [given.route(None, ()) for _ in range(5)],  # type: ignore[arg-type]
    }  # fmt: skip


def shares(_: str) -> dict[str, Any]:
    """Measure policies beside FCFS, and points beside their runs."""
    with _clock(policy_shares):
        rows = [list(row) for row in policy_shares.measure(["sjf", "static"], 20, 3)]
        printed = _printed(policy_shares.main, ["edf", "--requests", "10", "--rounds", "1"])
    with mock.patch.object(policy_shares, "measure", return_value=[]) as asked:
        policy_shares.main([])
    names, *rest = asked.call_args.args
    with _clock(session_shares):
        sessions = [list(row) for row in session_shares.measure(5, 3)]
        told = _printed(session_shares.main, ["--sessions", "4", "--rounds", "1"])
    with mock.patch.object(point_bench, "measure", lambda *given: (sum(given), 2.25)):
        points = _printed(point_bench.main, [])
        few = _printed(point_bench.main, ["--points", "3", "--rounds", "2"])
    with _clock(point_bench):
        ms = [point_bench._cpu_ms(lambda: None) for _ in range(2)]
    spec = point_bench._spec(4)
    return {
        "rows": rows, "printed": printed, "asked": [len(names) > 20, rest],
        "sessions": [sessions, told],
        "points": [points, few, ms, spec.seed, spec.workload.num_requests, spec.hardware],
    }  # fmt: skip


# -- beside others --------------------------------------------------------------------------------


def checkouts(_: str) -> dict[str, Any]:
    """Measure two checkouts, one of them slower, and say so on the screen and in a file."""
    asked: list[Any] = []

    def cpu_s(root: Path, arguments: list[str], folder: Path) -> float:
        given = [one.replace(str(root), "ROOT") for one in arguments[-4:]]
        asked.append([root.name, given, sorted(one.name for one in folder.iterdir())])
        return 1.0 + len(asked) % 7 * (1.5 if root.name == "other" else 1.0)

    with TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        (other / "schedlab").mkdir(parents=True)
        (other / "schedlab" / "__init__.py").touch()
        file = Path(folder) / "speed.md"
        with (
            mock.patch.object(against, "cpu_s", cpu_s),
            mock.patch.object(against, "ROOT", Path(folder) / "this"),
            mock.patch.object(against, "cases", return_value={"a": {"x": 1}, "b": {"y": 2}}),
        ):
            given = [str(other), "--rounds", "3", "--markdown", str(file)]
            fast = _printed(against.main, [*given, "--limit", "9"])
            slow = _printed(against.main, [*given, "--limit", "0.1"])
        kept = file.read_text(encoding="utf-8").splitlines()
    return {"fast": fast, "slow": slow, "kept": kept[:3], "num": len(asked),
            "turns": json_digest([one[:2] for one in asked[2:]]), "first": asked[1]}  # fmt: skip


def peer(_: str) -> dict[str, Any]:
    """Take turns with a peer, and print and write what each costs."""
    seconds = itertools.count(1)
    with mock.patch.object(peers, "cpu_s", lambda line, _: next(seconds) ** 1.5 + len(line)):
        medians = peers.medians([["a"], ["b", "c"]], 3, Path())
        rounds = []
        with mock.patch.object(
            peers, "commands",
            return_value={"schedlab": [["x"], ["y"]], "AISimulate": [["z"]]},
        ):  # fmt: skip
            case = next(iter(peers.cases(Path("nowhere")).values()))
            rounds = peers.measure(case, Path("p"), 2)
    cost = {"schedlab": [1.0, 12.0], "AISimulate": [2.0, 30.0]}
    told = []

    def measure(case: Any, at: Path, num_rounds: int) -> Any:
        told.append([case.few, at.name, num_rounds])
        return [{name: [s * (1 + i / 8) for s in one] for name, one in cost.items()}
                for i in range(num_rounds)]  # fmt: skip

    with TemporaryDirectory() as folder, mock.patch.object(peers, "measure", measure):
        file = Path(folder) / "figures.json"
        with mock.patch.dict("os.environ", {"SCHEDLAB_DATA": folder}):
            given = ["--peer", "aisimulate", "--json", str(file)]
            printed = _printed(peers.main, given)
        kept = json.loads(file.read_text(encoding="utf-8"))
    return {"medians": medians, "rounds": rounds, "printed": printed, "asked": told,
            "kept": {name: one for name, one in kept.items() if name != "core"}}  # fmt: skip


def distserved(_: str) -> dict[str, Any]:
    """Ask the peer for requests whose steps are counted behind the first token."""
    asked: list[Any] = []

    def run(arguments: list[Any], **options: Any) -> None:
        given = [str(one) for one in arguments]
        sent = json.loads(Path(given[given.index("--workload") + 1]).read_text(encoding="utf-8"))
        Path(given[-1]).write_text(
            "first_token_latency,tpot,total_latency\n100.5,,100.5\n20,3.5,90\n", encoding="utf-8"
        )
        asked.append([given[1:5], given[7:11], sent, options["check"]])

    curves = {
        "prefill": [10.0, 0.1, 0.001], "decoding_large_small_bs_threshold": 3,
        "decoding_smallbs": [20.0, 0.01, 0.5], "decoding_largebs": [5.0, 0.02, 1.0],
    }  # fmt: skip
    with TemporaryDirectory() as folder, mock.patch.object(subprocess, "run", run):
        file = Path(folder) / distserve._PROFILE
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"facebook/opt-13b": {"1": curves}}), encoding="utf-8")
        spec = distserve.specification(Path(folder), 2.0, 3)
        found = distserve.theirs(spec, Path(folder), Path("python"))
    spec["cost_model"] = {}
    return {"found": found, "asked": asked, "spec": spec}


def hits(_: str) -> dict[str, Any]:
    """Tell hit rates of a few prompts with common beginnings on small fleets."""
    rows = [
        {"timestamp": 400 * i, "input_length": 512 * (2 + i % 3) + (1 if i % 2 else 0),
         "output_length": 3, "hash_ids": [i % 2, 10 + i % 2, 20 + i, 30 + i][: 2 + i % 3 + i % 2]}
        for i in range(12)
    ]  # fmt: skip
    said = io.StringIO()
    with TemporaryDirectory() as folder, redirect_stderr(said):
        trace = Path(folder) / "mooncake.jsonl"
        trace.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        printed = _printed(
            hit_rates.main,
            [str(trace), "--engines", "1", "3", "--routers", "round_robin",
             "prefix_aware, precise", "--num-requests", "11"],
        )  # fmt: skip
        spec = hit_rates.fleet(trace, 9, 2, "random", evicts=True)
        sent = hit_rates.requests_of(spec)
        bounds = [hit_rates.bounds(sent, num, 512) for num in (1, 2, 5)]
    with mock.patch.object(hit_rates, "table", return_value=[]) as asked:
        hit_rates.main(["t"])
    return {
        "printed": printed, "said": said.getvalue().splitlines(), "bounds": bounds,
        "asked": [str(one) for one in asked.call_args.args],
        "sent": [[one.arrival_ns, one.prompt_tokens, one.prefix_hash_ids] for one in sent],
    }  # fmt: skip


CASES = {
    "bench of the simulator": (simulator, ""),
    "bench of processes": (processes, ""),
    "bench of decisions": (decisions, ""),
    "bench of fleets": (fleets, ""),
    "bench of shares": (shares, ""),
    "bench of checkouts": (checkouts, ""),
    "bench beside a peer": (peer, ""),
    "bench beside DistServe": (distserved, ""),
    "bench of hit rates": (hits, ""),
}
