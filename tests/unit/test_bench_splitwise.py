from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.experiments.bench import splitwise
from schedlab.experiments.bench.splitwise import PeerProfile
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.models import model
from schedlab.traces.trace import Trace

TABLE = """model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel
llama2-70b,h100-80gb,100,1,8,10,40,8
llama2-70b,h100-80gb,100,1,8,12,42,8
llama2-70b,h100-80gb,100,1,8,50,43,8
llama2-70b,h100-80gb,100,2,8,22,52,8
llama2-70b,a100-80gb,100,2,8,99,99,8
"""


@pytest.fixture
def profile(tmp_path):
    (tmp_path / "table.csv").write_text(TABLE)
    deployment = Deployment(model("llama-2-70b"), gpu("h100-80gb"), tensor_parallel_size=8)
    return PeerProfile(deployment, str(tmp_path / "table.csv"))


def test_profile_of_the_peer_interpolates_medians_and_goes_on_beyond_them(profile):
    prompts = [BatchShape(0, 0, 0, ((n, 0),)) for n in (100, 150, 300)]
    assert [profile.step_ns(shape) for shape in prompts] == [
        [12_000_000],
        [17_000_000],
        [32_000_000],
    ]
    assert profile.step_ns(BatchShape(50, 9, 9), 2) == [37_000_000] * 2
    both = BatchShape(50, 9, 9, ((60, 0), (40, 0)))
    assert profile.step_ns(both) == [18_700_000], "a mixed batch is a tenth slower than prompts"


def test_table_has_ours_over_the_peers_for_every_rate_metric_and_percentile(monkeypatch, capsys):
    def found(factor, rate):
        return {
            name: [factor * rate * (i + 1)] * 99 + [factor * rate * 10.0]
            for i, name in enumerate(splitwise._METRICS)
        }

    monkeypatch.setattr(splitwise, "specification", lambda peer, rate, n: (peer, rate, n))
    monkeypatch.setattr(splitwise, "ours", lambda asked: found(1.0, asked[1]))
    monkeypatch.setattr(splitwise, "theirs", lambda asked, peer, python: found(4.0, asked[1]))
    splitwise.main(["--peer", "p", "--python", "q", "--rates", "2", "3", "--num-requests", "7"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    timed = [row for row in rows if "seconds" in row]
    assert [row[0] for row in timed] == ["2", "3"]
    for rate in (2.0, 3.0):
        for i, name in enumerate(splitwise._METRICS):
            (median,) = [r for r in rows if r[:3] == [f"{rate:g}", name, "p50"]]
            assert [float(cell) for cell in median[3:]] == [
                rate * (i + 1),
                4 * rate * (i + 1),
                0.25,
            ]


def test_peer_gets_prompts_and_answers_and_no_launcher_and_is_left_as_it_was(monkeypatch, tmp_path):
    for folder in ("configs", "traces"):
        (tmp_path / folder).mkdir()
    config = "defaults:\n  - x: y\n  - override hydra/launcher: ray\nhydra:\n  a: b\n"
    (tmp_path / "configs/config.yaml").write_text(f"{config}  launcher:\n    ray: 1\n")
    trace = Trace(
        prompt_tokens=np.array([100, 300]),
        output_tokens=np.array([7, 9]),
        arrival_ns=np.array([0, 500_000_000]),
    )
    given = {}

    def run(command, cwd, **_):
        options = dict(str(part).split("=", 1) for part in command if "=" in str(part))
        given["rows"] = (cwd / f"traces/{options['trace.filename']}.csv").read_text().split()
        given["config"] = (command[3] / "config.yaml").read_text()
        out = Path(options["output_dir"], "detailed")
        out.mkdir(parents=True)
        (out / "0.csv").write_text(
            "request_ids,tbt_times,ttft_times,response_times\n10,2,1,3\n9,5,4,6\n"
        )

    monkeypatch.setattr(splitwise, "make_spec", lambda spec: spec)
    monkeypatch.setattr(splitwise, "load_workload", lambda spec, longest_tokens: trace)
    monkeypatch.setattr(splitwise.subprocess, "run", run)
    found = splitwise.theirs({}, tmp_path, Path("python"))
    assert given["rows"][1:] == ["0,2,0,0.0,1,100,7", "1,2,0,0.5,1,300,9"]
    assert given["config"] == config.replace("  - override hydra/launcher: ray\n", "")
    assert found == {"ttft_times": [4, 1], "tbt_times": [5, 2], "response_times": [6, 3]}
    assert not any((tmp_path / "traces").iterdir())


def test_specification_of_the_peer_has_its_memory_and_link():
    spec = splitwise.specification(Path("peer"), 3.5, 40)
    # 640 GB less 135 GB of weights, in blocks of 16 tokens; keys of all 64 heads in 80 layers.
    assert spec["engine"]["num_gpu_blocks_override"] == 505 * 10**9 // (2 * 80 * 8192 * 2 * 16)
    # 200 Gbit/s, of an eighth of the heads.
    link = spec["cluster"]["link"]["gb_per_s"]
    assert link == pytest.approx(200 * 1024**3 / 8 / 8 / 1e9)
    assert (spec["workload"]["request_rate"], spec["workload"]["num_requests"]) == (3.5, 40)


def test_specification_of_the_peer_is_its_cluster_and_says_all_of_it():
    spec = splitwise.specification(Path("peer"), 3.5, 40)
    link = spec["cluster"]["link"].pop("gb_per_s")
    assert link > 0
    assert spec == {
        "name": "splitwise",
        "model": "llama-2-70b",
        "hardware": "h100-80gb",
        "cost_model": {
            "name": "schedlab.experiments.bench.splitwise:PeerProfile",
            "table": str(Path("peer").resolve() / "data" / "perf_model.csv"),
        },
        "engine": {
            "tensor_parallel_size": 8,
            "max_num_seqs": 512,
            "max_num_batched_tokens": 2048,
            "enable_chunked_prefill": False,
            "max_model_len": 2048,
            "num_gpu_blocks_override": 505 * 10**9 // (2 * 80 * 8192 * 2 * 16),
        },
        "workload": {
            "trace": "azure-conv",
            "num_requests": 40,
            "request_rate": 3.5,
            "max_total_tokens": 2048,
            "too_long": "clip_prompt",
        },
        "cluster": {
            "router": "round_robin",
            "decode_router": "round_robin",
            "link": {"latency_us": 0},
            "pools": {
                "prompts": {"role": "prefill", "count": 2, "hardware": "h100-80gb"},
                "answers": {"role": "decode", "count": 2, "hardware": "a100-80gb"},
            },
        },
    }


def test_our_run_is_read_by_the_peers_definitions(monkeypatch):
    """Ours counts the first token in what follows, as the peer does: all of them share it."""
    columns = {
        "status": [0, 0],
        "arrival_ns": [1_000_000_000, 2_000_000_000],
        "queued_ns": [1, 1],
        "first_token_ns": [1_250_000_000, 3_000_000_000],
        "last_token_ns": [2_250_000_000, 3_500_000_000],
        "generated_tokens": [4, 10],
    }
    asked = []

    def run(spec):
        asked.append(spec)
        return SimpleNamespace(requests={k: np.array(v) for k, v in columns.items()})

    monkeypatch.setattr(splitwise, "run", run)
    monkeypatch.setattr(splitwise, "make_spec", lambda keys: ("made", keys))
    found = splitwise.ours({"name": "x"})
    assert asked == [("made", {"name": "x"})]
    assert found == {
        "ttft_times": [0.25, 1.0],
        "tbt_times": [1.0 / 4, 0.5 / 10],
        "response_times": [1.25, 1.5],
    }
    columns["status"] = [0, 1]
    with pytest.raises(AssertionError, match="all are answered"):
        splitwise.ours({})
