"""Measure the simulator's speed: ``python -m schedlab.experiments.bench.bench``.

CPU seconds of one process (user + system), not wall time, because machines are shared. Every
workload runs in a process of its own. "loop" is `running.run.run` and the metrics, without
imports; "process" is everything from the start of Python. The slow row does the same work
without skipping ahead: its ratio to the fast one does not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TRACE = "traces/azure_2023/AzureLLMInferenceTrace_conv.csv"

Row = dict[str, Any]


def workloads(trace: Path | None) -> dict[str, Row]:
    """Return the benchmark's specifications by name.

    Parameters
    ----------
    trace : Path or None
        The Azure 2023 conversation trace; `None` draws from the preset of its lengths.
    """
    source = {"trace": str(trace)} if trace else {"trace": "azure-conv"}
    clipped = {**source, "max_total_tokens": 4096, "too_long": "clip_prompt"}
    base = {
        "model": "llama-3-8b",
        "hardware": "a100-80gb",
        "engine": {"max_num_seqs": 128, "max_num_batched_tokens": 2048},
    }

    def spec(**changes: Any) -> Row:  # noqa: ANN401 - parts of a specification
        workload = {**clipped, "num_requests": 10_000, **changes.pop("workload", {})}
        engine = {**base["engine"], **changes.pop("engine", {})}  # type: ignore[dict-item]
        return {"name": "bench", **base, "engine": engine, "workload": workload, **changes}

    def sessions(count: int, **more: Any) -> Row:  # noqa: ANN401 - parts of an engine
        drawn = {
            "count": count,
            "turns": {"distribution": "uniform", "low": 1, "high": 5},
            "new_tokens": 200,
            "output_tokens": {"distribution": "exponential", "mean": 150},
            "think_s": {"distribution": "exponential", "mean_s": 10},
            "tools": {"search": {"share": 0.4, "seconds": 1.0, "tokens": 300}},
            "shared_prefix": {"tokens": 512, "groups": 8},
        }
        engine = {**base["engine"], "enable_prefix_caching": True, **more}  # type: ignore[dict-item]
        workload = {"session_rate": 1.2, "sessions": drawn}
        return {"name": "bench", **base, "engine": engine, "workload": workload}

    drafts = {"speculation": {"method": "ngram", "num_speculative_tokens": 4, "acceptance": 0.7}}
    many = {"resample": True} if trace else {}
    host = {"tiers": [{"name": "cpu", "gib": 16, "link": "pcie-4"}]}
    return {
        "all at once": spec(workload={"request_rate": "inf"}),
        "6 req/s": spec(workload={"request_rate": 6.0}),
        "6 req/s, step by step": spec(
            workload={"request_rate": 6.0}, engine={"fast_forward": False}
        ),
        "6 req/s, 4 drafts": spec(workload={"request_rate": 6.0}, engine=drafts),
        "6 req/s, 4 drafts, by step": spec(
            workload={"request_rate": 6.0}, engine={**drafts, "fast_forward": False}
        ),
        "6 req/s, two stages": spec(
            workload={"request_rate": 6.0}, engine={"pipeline_parallel_size": 2}
        ),
        "6 req/s, 1,500 blocks": spec(
            workload={"request_rate": 6.0}, engine={"num_gpu_blocks_override": 1_500}
        ),
        "6 req/s, vllm-0.19": spec(workload={"request_rate": 6.0}, engine={"profile": "vllm-0.19"}),
        "all at once, 1,500 blocks": spec(
            workload={"request_rate": "inf"}, engine={"num_gpu_blocks_override": 1_500}
        ),
        "all at once, 1,024 seats": spec(
            workload={"request_rate": "inf"},
            engine={"max_num_seqs": 1_024, "num_gpu_blocks_override": 8_000},
        ),
        "16 engines, 6 req/s each": spec(
            workload={"request_rate": 96.0, **many}, cluster={"count": 16, "router": "vllm"}
        ),
        "16 engines, in turn": spec(
            workload={"request_rate": 96.0, **many}, cluster={"count": 16, "router": "round_robin"}
        ),
        "2,000 sessions": sessions(2_000),
        "2,000 sessions, host memory": sessions(
            2_000, num_gpu_blocks_override=2_500, kv_offload=host
        ),
        "200,000 sessions": sessions(200_000),
        "100,000 at 6 req/s": spec(workload={"request_rate": 6.0, "num_requests": 100_000, **many}),
        "1,000,000 at 6 req/s": spec(
            workload={"request_rate": 6.0, "num_requests": 1_000_000, **many}
        ),
    }


def measure(spec: Row) -> Row:
    """Run one specification here and say what it took."""
    import resource
    import time

    from schedlab.experiments.running.run import run
    from schedlab.experiments.specification.loading import make_spec

    made = make_spec(spec)
    start_s = time.process_time()
    result = run(made)
    metrics = result.metrics()
    loop_s = time.process_time() - start_s
    return {
        "num_requests": int(metrics["num_requests"]),
        "completed": int(metrics["completed"]),
        "num_steps": result.provenance["num_steps"],
        "num_plans": result.provenance["num_plans"],
        "simulated_s": metrics["duration_s"],
        "loop_cpu_s": loop_s,
        "requests_per_cpu_s": metrics["num_requests"] / loop_s,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _cpu_of(arguments: list[str], folder: Path) -> tuple[float, str]:
    """Return CPU seconds and output of a child process."""
    before = os.times()
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    after = os.times()
    children = after.children_user + after.children_system
    return children - before.children_user - before.children_system, done.stdout


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark and print a table and JSON."""
    parser = argparse.ArgumentParser(description="Measure the simulator's speed.")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--quick", action="store_true", help="leave out the large workloads")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one is not None:
        print(json.dumps(measure(json.loads(options.one))))
        return

    data = Path(os.environ.get("SCHEDLAB_DATA", ROOT.parent / "shared" / "data"))
    trace = data / TRACE if (data / TRACE).is_file() else None
    found: dict[str, Any] = {
        "trace": "Azure 2023 conversation" if trace else "preset azure-conv (no data folder)",
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "workloads": {},
    }
    print(f"trace: {found['trace']}; {found['machine']}; CPU seconds, one process each")
    print(f"{'workload':26} {'requests/CPU-s':>14} {'loop s':>8} {'process s':>10} {'MB':>6}"
          f" {'plans':>10} {'steps':>11}")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for name, spec in workloads(trace).items():
            if options.quick and "00,000" in name:
                continue
            process_s, out = _cpu_of(
                ["-m", "schedlab.experiments.bench.bench", "--one", json.dumps(spec)], Path(folder)
            )
            row = {**json.loads(out), "process_cpu_s": process_s}
            found["workloads"][name] = row
            print(f"{name:26} {row['requests_per_cpu_s']:14,.0f} {row['loop_cpu_s']:8.2f}"
                  f" {process_s:10.2f} {row['peak_rss_mb']:6.0f} {row['num_plans']:10,}"
                  f" {row['num_steps']:11,}", flush=True)  # fmt: skip
        found["start_up"] = _start_up(Path(folder))
    if not options.quick:
        found["decisions"] = _decisions()
        found["fleets"] = _fleets()
    for name, seconds in found["start_up"].items():
        print(f"start-up, {name}: {seconds:.2f} s CPU")
    fast, slow = (found["workloads"][n]["loop_cpu_s"] for n in ("6 req/s", "6 req/s, step by step"))
    found["skip_ahead_gain"] = slow / fast
    print(f"skipping ahead at 6 req/s: {slow / fast:.1f} times faster than step by step")
    found["drafts"] = _drafts(found["workloads"])
    if options.json is not None:
        from schedlab.sim.files import write_text

        write_text(options.json, json.dumps(found, indent=1) + "\n")


def _drafts(rows: dict[str, Row]) -> dict[str, dict[str, float]]:
    """Print and return what runs with drafts cost beside those without, by what it is shared by."""
    pairs = {
        "skipping ahead": ("6 req/s", "6 req/s, 4 drafts"),
        "step by step": ("6 req/s, step by step", "6 req/s, 4 drafts, by step"),
    }
    found = {}
    for how, names in pairs.items():
        plain, drafted = (rows[name] for name in names)
        ratio = drafted["loop_cpu_s"] / plain["loop_cpu_s"]
        shared = {"step": "num_steps", "plan": "num_plans", "request": "num_requests"}
        found[how] = {
            unit: ratio * plain[number] / drafted[number] for unit, number in shared.items()
        }
        by_unit = ", ".join(f"a {unit} {times:.2f}" for unit, times in found[how].items())
        print(f"4 drafts, {how}, times what plain decoding costs: {by_unit}")
    return found


def _decisions() -> list[Row]:
    """Measure and print what a decision costs, by policy."""
    from schedlab.experiments.bench.decision_bench import BATCH, DEPTHS, LARGE_BATCH, measure

    depths = "".join(f"{depth:>8,}" for depth in DEPTHS)
    print(f"CPU microseconds a step, {BATCH} running (last column: {LARGE_BATCH}), by queue depth")
    print(f"{'policy':24}{depths} {'slope':>6} {f'{DEPTHS[0]} x {LARGE_BATCH}':>10}")
    rows = []
    for cost in measure():
        by_depth = "".join(f"{us:8.0f}" for us in cost.by_depth_us)
        print(
            f"{cost.policy:24}{by_depth} {cost.slope:6.2f} {cost.large_batch_us:10.0f}", flush=True
        )
        rows.append({**cost._asdict(), "slope": cost.slope})
    return rows


def _fleets() -> list[Row]:
    """Measure and print what fleets cost beyond their engines."""
    from schedlab.experiments.bench.fleet_bench import FLEETS, ROUTERS, report

    return [found._asdict() for found in report(ROUTERS, FLEETS, rounds=3)]


def _start_up(folder: Path) -> dict[str, float]:
    """Measure the command line: help, and a run of one request."""
    (folder / "one.yaml").write_text(
        "name: one\nworkload: {trace: fixed, num_requests: 1}\n", encoding="utf-8"
    )
    cli = ["-c", "from schedlab.experiments.commands.cli import main; main()"]
    return {
        "schedlab --help": min(_cpu_of([*cli, "--help"], folder)[0] for _ in range(3)),
        "schedlab run of one request": min(
            _cpu_of([*cli, "run", "one.yaml", "-o", f"out{i}"], folder)[0] for i in range(3)
        ),
    }


if __name__ == "__main__":
    main()
