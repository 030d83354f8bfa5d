"""Measure the simulator beside a peer: ``python -m schedlab.experiments.bench.peers``.

Both run as processes of their own, in turn, on the same requests; what counts is the ratio inside a
round, because a shared machine changes its speed by the minute. "slope" is what one request more
costs, from a short and a long run; "whole" is the whole short run, start-up and files included.
Where requests are drawn, our long run has ten times those of the peer's, more of the same: what
so many cost ours would be lost in what one start differs from the next.

The peer is AISimulate (NVIDIA, Apache-2.0), which simulates vLLM's scheduler in Rust. Its Python
package belongs in an environment of its own: ``make bench-peers`` makes it. Of Vidur and BLIS see
docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from schedlab import core
from schedlab.experiments.bench.bench import ROOT, TRACE, workloads
from schedlab.experiments.running.workload import load_workload
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.files import write_text

TIMES = {"schedlab": 3, "AISimulate": 1}
"""How often a contestant takes both lengths in a round: our runs are short beside the peer's, and
one start differs from the next by a tenth of a second."""

MOONCAKE = "traces/mooncake/conversation_trace.jsonl"
ENGINE = {"max_num_seqs": 128, "max_num_batched_tokens": 2048}


class PeerCase(NamedTuple):
    """What both simulate."""

    spec: dict[str, Any]
    few: int
    """Requests of the short run."""
    many: int
    """Of the peer's long run."""
    our_many: int
    """Of ours."""
    peer_model: str
    peer_hardware: str
    longest_tokens: int


def cases(data: Path) -> dict[str, PeerCase]:
    """Return what is measured, by name; without the data folder lengths come from the preset."""
    azure = data / TRACE
    bench = workloads(azure if azure.is_file() else None)
    found = {}
    for name in ("all at once", "6 req/s"):
        spec = bench[name]
        if azure.is_file():  # it has fewer rows than we need
            spec = {**spec, "workload": {**spec["workload"], "resample": True}}
        found[name] = PeerCase(
            spec, 1_000, 10_000, 100_000, "meta-llama/Meta-Llama-3.1-8B", "a100_sxm", 4_096
        )
    if (data / MOONCAKE).is_file():
        spec = {
            "name": "bench",
            "model": "llama-3.1-8b",
            "hardware": "h200",
            "engine": {**ENGINE, "max_num_seqs": 256, "max_num_batched_tokens": 8192,
                       "enable_prefix_caching": True},
            "workload": {"trace": str(data / MOONCAKE), "max_total_tokens": 131_072},
        }  # fmt: skip
        found["Mooncake, prefix caching"] = PeerCase(
            spec, 500, 6_000, 6_000, "meta-llama/Meta-Llama-3.1-8B", "h200_sxm", 131_072
        )
    return found


def peer_trace(spec: dict[str, Any], longest_tokens: int) -> Iterator[str]:
    """Yield the requests of a specification as lines of a Mooncake trace."""
    made = make_spec(spec)
    trace = load_workload(made, longest_tokens)
    hashes = None if trace.prefix is None else trace.prefix.rows()
    arrivals_ms = trace.require_arrivals() / 1e6
    unique = 0
    for i, (at_ms, prompt, output) in enumerate(
        zip(arrivals_ms.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist(),
            strict=True)
    ):  # fmt: skip
        ids = range(unique, unique + -(-prompt // 512)) if hashes is None else hashes[i]
        unique += len(ids)
        row = {"timestamp": at_ms, "input_length": prompt, "output_length": output}
        yield json.dumps({**row, "hash_ids": list(ids)}) + "\n"


def peer_config(case: PeerCase, trace: Path) -> dict[str, Any]:
    """Return the peer's configuration: the same limits, its own step times."""
    engine = case.spec["engine"]
    return {
        # On a busy machine it takes longer to begin, and to end, than it gives itself.
        "execution": {
            "resources": {"initialization_timeout_seconds": 600.0, "shutdown_timeout_seconds": 60.0}
        },
        "traffic": {
            "source": {"type": "trace", "paths": [str(trace)], "format": "mooncake"},
            "load": {"type": "trace_timestamps"},
        },
        "engine": {
            "mode": "aggregated",
            "model": case.peer_model,
            "hardware": case.peer_hardware,
            "backend": "vllm",
            "context_length": case.longest_tokens,
            "workers": {
                "aggregated": {
                    "scheduler": {
                        "max_sequences": engine["max_num_seqs"],
                        "max_batched_tokens": engine["max_num_batched_tokens"],
                    },
                    "kv_cache": {
                        "block_size": 16,
                        "prefix_caching": bool(engine.get("enable_prefix_caching")),
                    },
                }
            },
        },
    }


def cpu_s(arguments: list[str], folder: Path) -> float:
    """Return the CPU seconds (user and system) of a process and its children.

    Raises
    ------
    SystemExit
        If it has not finished its requests (see `_has_finished`); with the end of what it printed.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # the peer's was written when it was installed
    before = os.times()
    done = subprocess.run(
        arguments,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    after = os.times()
    if not _has_finished(folder / arguments[-1], done.returncode):
        sys.exit(f"{' '.join(arguments)} failed ({done.returncode}):\n{done.stdout[-2000:]}")
    spent = after.children_user + after.children_system
    return spent - before.children_user - before.children_system


def _has_finished(output: Path, status: int) -> bool:
    """Whether a contestant wrote what it is to write, for all requests.

    On a busy machine AISimulate's supervisor gives its worker up after the report is written, and
    says so by its exit status; the report counts.
    """
    report = output / "prediction.json"
    if not report.exists():
        return status == 0
    told = json.loads(report.read_text(encoding="utf-8"))
    return bool(told["completed_requests"] == told["num_requests"])


def commands(case: PeerCase, peer: Path, folder: Path) -> dict[str, list[list[str]]]:
    """Write what both need, and return their command lines by name: a short and a long run."""
    theirs = []
    for count in {case.few, case.many, case.our_many}:
        write_text(folder / f"{count}.yaml", json.dumps(_of_length(case, count)))
    ours = [
        [sys.executable, "-m", "schedlab", "run", f"{count}.yaml", "-o", f"ours{count}"]
        for count in (case.few, case.our_many)
    ]
    for count in (case.few, case.many):
        trace = folder / f"{count}.jsonl"
        lines = peer_trace(_of_length(case, count), case.longest_tokens)
        write_text(trace, "".join(lines))
        write_text(folder / f"{count}.peer.yaml", json.dumps(peer_config(case, trace)))
        theirs.append([
            str(peer), "predict", "-c", f"{count}.peer.yaml", "--overwrite",
            "--output-dir", f"theirs{count}",
        ])  # fmt: skip
    return {"schedlab": ours, "AISimulate": theirs}


def _of_length(case: PeerCase, num_requests: int) -> dict[str, Any]:
    return {**case.spec, "workload": {**case.spec["workload"], "num_requests": num_requests}}


def measure(case: PeerCase, peer: Path, rounds: int) -> list[dict[str, list[float]]]:
    """Return CPU seconds of the short and the long run by contestant, a row a round."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        lines = commands(case, peer, folder)
        return [
            {name: medians(both, TIMES[name], folder) for name, both in lines.items()}
            for _ in range(rounds)
        ]


def medians(both: list[list[str]], times: int, folder: Path) -> list[float]:
    """Return CPU seconds of the short and the long run, medians of runs in turn."""
    runs = [[cpu_s(line, folder) for line in both] for _ in range(times)]
    return [median(one) for one in zip(*runs, strict=True)]


def ratios(case: PeerCase, rows: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Return requests a CPU second by contestant, and the ratios inside the rounds."""
    more = {"schedlab": case.our_many - case.few, "AISimulate": case.many - case.few}
    by_slope = [{n: more[n] / (long - short) for n, (short, long) in row.items()} for row in rows]
    whole = [row["AISimulate"][0] / row["schedlab"][0] for row in rows]
    slope = [row["schedlab"] / row["AISimulate"] for row in by_slope]
    return {
        "requests_per_cpu_s": {n: median(row[n] for row in by_slope) for n in rows[0]},
        "slope_ratio": median(slope),
        "slope_ratio_range": (min(slope), max(slope)),
        "whole_ratio": median(whole),
        "whole_ratio_range": (min(whole), max(whole)),
    }


def main(argv: list[str] | None = None) -> None:
    """Measure every case and print a table; with ``--json`` also write the figures."""
    parser = argparse.ArgumentParser(description="Measure the simulator beside a peer.")
    parser.add_argument("--peer", type=Path, required=True, help="the command aisimulate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(argv)
    data = Path(os.environ.get("SCHEDLAB_DATA", ROOT.parent / "shared" / "data"))
    print(f"core: {core.running()}; {options.rounds} rounds in turn; CPU seconds of processes")
    print(f"{'case':26} {'ours/CPU-s':>11} {'peer/CPU-s':>11} {'slope ratio':>22}"
          f" {'short run':>20}")  # fmt: skip
    found: dict[str, Any] = {"core": core.running()}
    for name, case in cases(data).items():
        found[name] = {"few": case.few, "many": case.many, "our_many": case.our_many}
        rows = measure(case, options.peer.resolve(), options.rounds)
        told = ratios(case, rows)
        found[name] |= {**told, "cpu_s": rows}
        speed = told["requests_per_cpu_s"]
        spans = [
            f"{told[kind]:.2f} ({told[f'{kind}_range'][0]:.2f}-{told[f'{kind}_range'][1]:.2f})"
            for kind in ("slope_ratio", "whole_ratio")
        ]
        print(f"{name:26} {speed['schedlab']:11,.0f} {speed['AISimulate']:11,.0f} {spans[0]:>22}"
              f" {spans[1]:>20}  {case.few:,} to {case.our_many:,} and {case.many:,} requests",
              flush=True)  # fmt: skip
    if options.json is not None:
        write_text(options.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
