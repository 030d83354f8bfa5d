"""Run a split cluster here and in SplitwiseSim: ``python -m schedlab.experiments.bench.splitwise``.

Two H100 servers compute prompts, two A100 servers go on; requests, routing rules and what an
iteration takes are the same: SplitwiseSim's measurements of Llama 2 70B (`data/perf_model.csv`),
interpolated as it does (`PeerProfile`). Both send requests, and their KV, to engines in turn:
kv_round_robin there. (Its kv_token_jsq only ever takes back what it never counted, so that all go
to one server of each kind.)

It has a rule that is not ours: who was passed over in `max_preemptions` iterations, waiting prompts
among them, goes first. Its queue is kept in order of how often that was when a request came, so
that the newest stands before all who were passed over since, and once nobody new comes those are
served last come, first served. It is switched off (`_NEVER`; 4 by default).

The peer is public (github.com/Mutinifni/splitwise-sim, MIT) and reads its dependencies from the
environment that runs it; docs/fleets.md says how to get both.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from schedlab.experiments.bench.beside import Peer, beside_peer
from schedlab.experiments.running.run import run
from schedlab.experiments.running.workload import load_workload
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.files import write_text
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.record.columns import whole_numbers

_HERE = "schedlab.experiments.bench.splitwise"
_MODEL = "llama2-70b"
# Its links: 200 GiB/s for each transfer.
_LINK_BYTES_PER_S = 200 * 1024**3
# It counts full heads: keys and values of 80 layers of 8192, two bytes each.
_PEER_KV_BYTES, _KV_BYTES = 2 * 80 * 8192 * 2, 2 * 80 * 1024 * 2
_NEVER = 10**9  # iterations after which it serves who was passed over first
_METRICS = ("ttft_times", "tbt_times", "response_times")


class PeerProfile(CostModel):
    """Iterations as SplitwiseSim prices them, by the tokens in the batch alone.

    Parameters
    ----------
    deployment : Deployment
        Whose GPU says which rows of the table count.
    table : str
        Its `data/perf_model.csv`.
    """

    name = "splitwise-sim"

    def __init__(self, deployment: Deployment, table: str) -> None:
        self._hardware, self._table = deployment.gpu.name, table
        with Path(table).open(encoding="utf-8", newline="") as lines:
            rows = [
                row
                for row in csv.DictReader(lines)
                if (row["model"], row["hardware"], row["tensor_parallel"])
                == (_MODEL, self._hardware, str(deployment.tensor_parallel_size))
            ]
        if not rows:
            raise ValueError(f"{table}: no rows of {_MODEL} on {self._hardware}")
        self._prompt = _medians(rows, "prompt_time")
        self._token = _medians(rows, "token_time")

    def step_ns(self, shape: BatchShape, k: int = 1) -> list[int]:
        """Return so many times what an iteration of this batch takes."""
        if not shape.chunks:
            return [_interpolated_ns(self._token, shape.num_decodes)] * k
        tokens = shape.num_decodes + sum(n for n, _ in shape.chunks)
        ns = _interpolated_ns(self._prompt, tokens)
        return [round(1.1 * ns) if shape.num_decodes else ns]

    def describe(self) -> dict[str, object]:
        """Return where the times are from."""
        return {"name": self.name, "hardware": self._hardware, "table": self._table}


Points = tuple[list[int], list[float]]


def _medians(rows: Sequence[dict[str, str]], column: str) -> Points:
    """Return the median time (ms) of each number of tokens, in order."""
    points = sorted(
        (int(row["prompt_size"]) * int(row["batch_size"]), float(row[column])) for row in rows
    )
    groups = [(x, [y for _, y in some]) for x, some in groupby(points, key=itemgetter(0))]
    return [x for x, _ in groups], [median(ys) for _, ys in groups]


def _interpolated_ns(points: Points, tokens: int) -> int:
    """Interpolate, and extrapolate by the outermost two points."""
    xs, ys = points
    i = min(max(int(np.searchsorted(xs, tokens)), 1), len(xs) - 1)
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    return round((ys[i - 1] + slope * (tokens - xs[i - 1])) * 1e6)


def specification(peer: Path, request_rate: float, num_requests: int) -> dict[str, Any]:
    """Return the experiment; no prompt is longer than what a batch takes."""
    gb_per_s = _LINK_BYTES_PER_S * _KV_BYTES / _PEER_KV_BYTES / 8 / 1e9
    return {
        "name": "splitwise",
        "model": "llama-2-70b",
        "hardware": "h100-80gb",
        "cost_model": {
            "name": f"{_HERE}:PeerProfile",
            "table": str(peer.resolve() / "data" / "perf_model.csv"),
        },
        "engine": {
            "tensor_parallel_size": 8,
            "max_num_seqs": 512,
            "max_num_batched_tokens": 2048,
            "enable_chunked_prefill": False,
            "max_model_len": 2048,
            "num_gpu_blocks_override": (640 * 10**9 - 135 * 10**9) // (_PEER_KV_BYTES * 16),
        },
        "workload": {
            "trace": "azure-conv",
            "num_requests": num_requests,
            "request_rate": request_rate,
            "max_total_tokens": 2048,
            "too_long": "clip_prompt",
        },
        "cluster": {
            "router": "round_robin",
            "decode_router": "round_robin",
            "link": {"gb_per_s": gb_per_s, "latency_us": 0},
            "pools": {
                "prompts": {"role": "prefill", "count": 2, "hardware": "h100-80gb"},
                "answers": {"role": "decode", "count": 2, "hardware": "a100-80gb"},
            },
        },
    }


def ours(spec: dict[str, Any]) -> dict[str, list[float]]:
    """Run it here; return the peer's metrics in seconds, and its definitions of them."""
    requests = run(make_spec(spec)).requests
    assert (requests["status"] == 0).all(), "all are answered"
    arrival_ns = whole_numbers(requests, "arrival_ns")
    ttft_s = (whole_numbers(requests, "first_token_ns") - arrival_ns) / 1e9
    e2e_s = (whole_numbers(requests, "last_token_ns") - arrival_ns) / 1e9
    tbt_s = (e2e_s - ttft_s) / whole_numbers(requests, "generated_tokens")
    return dict(zip(_METRICS, (ttft_s.tolist(), tbt_s.tolist(), e2e_s.tolist()), strict=True))


def theirs(spec: dict[str, Any], peer: Path, python: Path) -> dict[str, list[float]]:
    """Run it there, in a folder that is left as it was; return its metrics."""
    trace = load_workload(make_spec(spec), 2048)
    arrival_s = trace.require_arrivals() / 1e9
    lines = ["request_id,request_type,application_id,arrival_timestamp,batch_size,"
             "prompt_size,token_size"]  # fmt: skip
    for i, at_s in enumerate(arrival_s.tolist()):
        prompt, output = trace.prompt_tokens[i], trace.output_tokens[i]
        lines.append(f"{i},2,0,{at_s!r},1,{prompt},{output}")
    file = peer / "traces" / "schedlab.csv"
    with tempfile.TemporaryDirectory() as folder:
        write_text(file, "\n".join(lines) + "\n")
        configs = _without_ray(peer, Path(folder))
        try:
            subprocess.run(
                [
                    python.absolute(), "run.py", "--config-path", configs, "cluster=half_half",
                    "cluster.servers.0.count=2", "cluster.servers.1.count=2",
                    "applications.0.scheduler=kv_round_robin",
                    f"applications.0.model_architecture={_MODEL}",
                    f"applications.0.model_size={_MODEL}-fp16",
                    "start_state=splitwise", "start_state.split_type=heterogeneous",
                    f"start_state.prompt.max_preemptions={_NEVER}",
                    f"start_state.token.max_preemptions={_NEVER}",
                    "performance_model=db", f"trace.filename={file.stem}", "seed=0",
                    f"output_dir={folder}/out",
                ],
                cwd=peer,
                check=True,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            file.unlink()
        (results,) = Path(folder, "out").glob("detailed/0.csv")
        with results.open(encoding="utf-8", newline="") as rows:
            found = sorted(csv.DictReader(rows), key=lambda row: float(row["request_ids"]))
    return {name: [float(row[name]) for row in found] for name in _METRICS}


def _without_ray(peer: Path, folder: Path) -> Path:
    """Copy its configuration, less the launcher on a cluster of machines."""
    configs = Path(shutil.copytree(peer / "configs", folder / "configs"))
    top = configs / "config.yaml"
    text = top.read_text(encoding="utf-8").replace("  - override hydra/launcher: ray\n", "")
    write_text(top, text.partition("  launcher:\n")[0])
    return configs


def main(argv: list[str] | None = None) -> None:
    """Run both and print a table."""
    beside_peer(
        Peer("SplitwiseSim", "that has what it needs", specification, ours, theirs),
        (4.0, 12.0, 20.0),
        2000,
        argv,
    )


if __name__ == "__main__":
    main()
