"""Run a split cluster here and in DistServe's: ``python -m schedlab.experiments.bench.distserve``.

One A100 computes prompts of OPT-13B, another one goes on; requests and what a step takes are the
same: the curves that DistServe fitted to its engine, and what its simulator adds for Ray
(`PeerProfile`). It sends KV in no time, and so does this.

The peer is public (github.com/LLMServe/DistServe, Apache 2.0, folder simdistserve) and needs
pandas and SimPy of the environment that runs it; docs/fleets.md says how to get both.
"""

from __future__ import annotations

import csv
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.experiments.bench.beside import Peer, Seconds, beside_peer
from schedlab.experiments.running.run import run
from schedlab.experiments.running.workload import load_workload
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.files import read_json_object, write_text
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.record.columns import whole_numbers

_HERE = "schedlab.experiments.bench.distserve"
_MODEL = "facebook/opt-13b"
_PROFILE = Path("simdistserve", "estimators", "profile_data", "profiler-a100-80g.distserve.json")
# Most tokens of a batch of prompts, and of all KV: its max_num_tokens.csv, one A100.
_MOST_TOKENS = 66_144
_MAX_MODEL_LEN = 2048
# Its simulator adds them to each step: of a pipeline of one stage (prompts), and of Ray.
_PIPELINE_MS, _RAY_MS, _RAY_TOKEN_MS = 1.0, 2.0, 0.0001


class PeerProfile(CostModel):
    """Steps as DistServe's simulator prices them.

    Parameters
    ----------
    deployment : Deployment
        Whose degree of tensor parallelism says which curves count.
    curves : str
        Its `profiler-a100-80g.distserve.json`.
    """

    name = "distserve"

    def __init__(self, deployment: Deployment, curves: str) -> None:
        self._curves = curves
        fitted: Any = read_json_object(Path(curves))
        found = fitted[_MODEL][str(deployment.tensor_parallel_size)]
        self._prefill, self._small, self._large = (
            found[key] for key in ("prefill", "decoding_smallbs", "decoding_largebs")
        )
        self._large_from = found["decoding_large_small_bs_threshold"]

    def step_ns(self, shape: BatchShape, k: int = 1) -> list[int]:
        """Return what prompts take by their tokens and squares, or decodes by their contexts."""
        if shape.chunks:
            tokens = sum([n for n, _ in shape.chunks])
            constant, by_token, by_square = self._prefill
            squares = sum([n * n for n, _ in shape.chunks])
            curve_ms = constant + by_token * tokens + by_square * squares
            return [_with_ray_ns(curve_ms + _PIPELINE_MS, tokens)]
        batch = shape.num_decodes
        constant, by_token, by_request = self._small if batch < self._large_from else self._large
        contexts = [shape.decode_context_sum_tokens + batch * i for i in range(k)]
        return [
            _with_ray_ns(constant + by_token * (tokens + batch) + by_request * batch, tokens)
            for tokens in contexts
        ]

    def describe(self) -> dict[str, object]:
        """Return where the times are from."""
        return {"name": self.name, "model": _MODEL, "curves": self._curves}


def _with_ray_ns(curve_ms: float, tokens: int) -> int:
    return round((curve_ms + _RAY_MS + _RAY_TOKEN_MS * tokens) * 1e6)


def specification(peer: Path, request_rate: float, num_requests: int) -> dict[str, Any]:
    """Return the experiment."""
    return {
        "name": "distserve",
        "model": "opt-13b",
        "hardware": "a100-80gb",
        "cost_model": {
            "name": f"{_HERE}:PeerProfile",
            "curves": str(peer.resolve() / _PROFILE),
        },
        "engine": {
            "max_num_seqs": 512,
            "max_num_batched_tokens": _MOST_TOKENS,
            "enable_chunked_prefill": False,
            "max_model_len": _MAX_MODEL_LEN,
            "num_gpu_blocks_override": _MOST_TOKENS // 16,
        },
        "workload": {
            "trace": "azure-conv",
            "num_requests": num_requests,
            "request_rate": request_rate,
            "max_total_tokens": _MAX_MODEL_LEN,
            "too_long": "clip_prompt",
        },
        "cluster": {
            "link": {"gb_per_s": 1e9, "latency_us": 0},
            "pools": {
                "prompts": {"role": "prefill", "count": 1},
                "answers": {"role": "decode", "count": 1},
            },
        },
    }


def ours(spec: dict[str, Any]) -> Seconds:
    """Run it here; return the peer's metrics."""
    requests = run(make_spec(spec)).requests
    assert (requests["status"] == 0).all(), "all are answered"
    arrival_ns = whole_numbers(requests, "arrival_ns")
    first_s = (whole_numbers(requests, "first_token_ns") - arrival_ns) / 1e9
    whole_s = (whole_numbers(requests, "last_token_ns") - arrival_ns) / 1e9
    # It counts the steps of an answer behind its first token.
    steps = np.maximum(whole_numbers(requests, "generated_tokens") - 1, 1)
    between_s = (whole_s - first_s) / steps
    return {
        "first token": first_s.tolist(),
        "between tokens": between_s.tolist(),
        "whole answer": whole_s.tolist(),
    }


def theirs(spec: dict[str, Any], peer: Path, python: Path) -> Seconds:
    """Run it there; return its metrics."""
    trace = load_workload(make_spec(spec), _MAX_MODEL_LEN)
    arrival_s = trace.require_arrivals() / 1e9
    arrival_s -= arrival_s[0]
    lengths = zip(trace.prompt_tokens, trace.output_tokens, strict=True)
    asked = [
        {"start_time": at_s, "prompt_len": int(prompt), "output_len": int(output) - 1}
        for at_s, (prompt, output) in zip(arrival_s.tolist(), lengths, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        workload, found = Path(folder, "workload.json"), Path(folder, "latency.csv")
        write_text(workload, json.dumps(asked))
        subprocess.run(
            [
                python.absolute(), "-m", "simdistserve.benchmarks.simulate_dist",
                "--model", _MODEL, "--workload", workload, "--arrival", "custom",
                "--N", str(len(asked)), "--output-request-latency", found,
            ],
            cwd=peer,
            check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        with found.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
    columns = ("first_token_latency", "tpot", "total_latency")
    first_s, between_s, whole_s = ([float(row[c] or 0) / 1e3 for row in rows] for c in columns)
    return {"first token": first_s, "between tokens": between_s, "whole answer": whole_s}


def main(argv: list[str] | None = None) -> None:
    """Run both and print a table."""
    beside_peer(
        Peer("DistServe", "with pandas and SimPy", specification, ours, theirs),
        (1.0, 2.0, 3.0),
        500,
        argv,
    )


if __name__ == "__main__":
    main()
