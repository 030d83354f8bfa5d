"""The backend `vllm` of experiments: a model of one layer runs in vLLM's own engine loop."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.gpu_backend.decoder_config import decoder_config
from schedlab.gpu_backend.stopwatch import ReferenceSpeed
from schedlab.gpu_backend.vllm import opening
from schedlab.policies import Policy
from schedlab.policies.fcfs import FirstComeFirstServed
from schedlab.sim.core.plan_log import first_difference
from schedlab.sim.errors import PolicyError, SpecError, Stalled
from schedlab.sim.result import RunResult
from tests.gpu.backend import random_tensors

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
NOISY = {"predictor": {"name": "noisy", "kendall_tau": 0.6}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def spec_of(model, backend="vllm", policy="fcfs", clock="modelled", engine=None, **changes):
    workload = {
        "prompt_tokens": {"distribution": "lognormal", "mu": 3.6, "sigma": 0.8, "cap": 150},
        "output_tokens": {"distribution": "exponential", "mean": 12, "cap": 60},
        "num_requests": 40,
        "request_rate": 2000,
    } | changes.pop("workload", {})
    limits = {
        "profile": "vllm-0.32", "async_scheduling": False, "cuda_graph_padding": False,
        "dtype": "fp32", "block_size": 32, "max_num_seqs": 8, "max_num_resident": 8,
        "max_num_batched_tokens": 96, "max_model_len": 224, "num_gpu_blocks_override": 15,
    }  # fmt: skip
    return make_spec({
        "name": "in vLLM", "model": model, "hardware": "cpu", "backend": backend,
        "engine": limits | (engine or {}), "workload": workload, "policy": policy,
        "real": {"clock": clock}, **changes,
    })  # fmt: skip


def assert_same(measured, simulated):
    for name, column in simulated.requests.items():
        np.testing.assert_array_equal(measured.requests[name], column, err_msg=name)
    ours, theirs = simulated.log.steps(), measured.log.steps()
    for name in ours:
        np.testing.assert_array_equal(theirs[name], ours[name], err_msg=name)
    for name, column in simulated.log.preemptions().items():
        np.testing.assert_array_equal(measured.log.preemptions()[name], column, err_msg=name)
    for name, column in simulated.log.token_counts().items():
        np.testing.assert_array_equal(measured.log.token_counts()[name], column, err_msg=name)
    for name, column in simulated.log.token_gaps().items():
        np.testing.assert_array_equal(measured.log.token_gaps()[name], column, err_msg=name)


@pytest.mark.parametrize(
    "policy",
    ["fcfs", "priority", {"name": "sjf", **NOISY}, {"name": "srtf", **NOISY}, "slai", "qoserve"],
    ids=str,
)
def test_run_by_modelled_times_is_the_simulated_one_in_every_column(model, policy):
    steps, simulated_steps = [], []
    slo = {"ttft_ms": 50.0, "tpot_ms": 5.0}
    measured = run(spec_of(model, policy=policy, slo=slo), record=steps)
    simulated = run(spec_of(model, "sim", policy=policy, slo=slo), record=simulated_steps)
    assert first_difference(steps, simulated_steps) is None
    assert_same(measured, simulated)
    assert simulated.requests["num_preemptions"].sum() > 0


def test_shared_prefixes_are_found_by_vllm_as_by_the_simulation(model):
    shared = {"classes": {"chat": {"share": 1.0, "shared_prefix": {"tokens": 64, "groups": 2}}}}
    measured, simulated = (run(spec_of(model, b, workload=shared)) for b in ("vllm", "sim"))
    assert_same(measured, simulated)
    assert simulated.requests["prefix_hit_tokens"].sum() > 0


def test_closed_loop_sends_the_next_request_when_one_is_answered(model):
    closed = {"arrivals": "closed_loop", "max_concurrency": 3, "request_rate": None}
    measured, simulated = (run(spec_of(model, b, workload=closed)) for b in ("vllm", "sim"))
    assert_same(measured, simulated)
    assert measured.log.steps()["num_running"].max() == 3


def test_policy_that_waits_for_a_time_wakes_then(model):
    policy = {"name": "wait", "predictor": "oracle"}
    measured, simulated = (run(spec_of(model, b, policy=policy)) for b in ("vllm", "sim"))
    assert_same(measured, simulated)


@pytest.mark.parametrize("clock", ["virtual", "reference"])
def test_measured_run_says_where_the_time_of_each_step_went(model, tmp_path, clock):
    slower = {"profile": str(tmp_path / "profile"), "allow_mismatch": True}
    known = Path(__file__).parents[2] / "profiles" / "cpu" / "schedlab-small" / "fp32-tp1"
    shutil.copytree(known, tmp_path / "profile")
    ReferenceSpeed(1.0).write(tmp_path / "profile")
    costs = {"cost_model": slower} if clock == "reference" else {}
    run(spec_of(model, clock=clock, policy="slai", **costs)).save(tmp_path / "run")
    tmp_path /= "run"
    saved = RunResult.load(tmp_path)
    steps = saved.log.steps()
    duration_ns = steps["end_ns"] - steps["start_ns"]
    parts = sum(steps[f"{name}_ns"] for name in ("schedule", "model", "update", "between"))
    assert (parts <= duration_ns).all()
    assert (parts > duration_ns * 0.99).all()
    np.testing.assert_array_equal(steps["overhead_ns"], duration_ns - steps["model_ns"])
    batch = dict(text.split(":") for text in str(steps["batch"][0]).split())
    assert batch["0"] == f"{min(saved.requests['prompt_tokens'][0], 96)}@0"
    assert (saved.requests["status"] == 0).all()
    told = saved.provenance["real"]
    assert (told["engine"], told["clock"]) == ("vllm", clock)
    if clock == "reference":
        timed_s = duration_ns.sum() / 1e9 + told["first_requests_s"]
        assert timed_s == pytest.approx(told["reference_s"], rel=0.1)
        assert told["reference_s"] > 10 * told["cpu_s"]
    assert told["first_requests_s"] > 0


class Raises(Policy):
    def plan(self, view, builder):
        raise RuntimeError("no idea")


class Sleeps(Policy):
    def plan(self, view, builder):
        return builder.build()


@pytest.mark.parametrize(
    ("policy", "error", "said"),
    [("Raises", PolicyError, "Raises.*no idea"), ("Sleeps", Stalled, "the policy waits")],
)
def test_policy_that_fails_ends_the_run_and_the_next_one_is_whole(model, policy, error, said):
    engine = {"trial_requests": 0}
    with pytest.raises(error, match=said):
        run(spec_of(model, policy=f"tests.vllm.test_backend:{policy}", engine=engine))
    assert_same(run(spec_of(model)), run(spec_of(model, "sim")))


def test_checkpoint_in_a_folder_is_what_vllm_computes_with(model, tmp_path):
    from safetensors.torch import save_file

    tensors = {name: t.clone() for name, t in random_tensors(decoder_config(model)).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    real = {"clock": "modelled", "weights": str(tmp_path)}
    assert_same(run(spec_of(model, real=real)), run(spec_of(model, "sim")))
    (core,) = opening._opened
    loaded = core.engine.model_executor.driver_worker.worker.get_model().state_dict()
    # Weights of matrix products are packed on a CPU.
    for name in ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"):
        torch.testing.assert_close(loaded[name], tensors[name], rtol=0, atol=0)


class Tells(FirstComeFirstServed):
    def plan(self, view, builder):
        print("planned", flush=True)
        return super().plan(view, builder)


def test_interrupt_ends_the_run_and_leaves_no_process_behind(model, tmp_path):
    spec = spec_of(
        model, policy="tests.vllm.test_backend:Tells", clock="wall", engine={"trial_requests": 0},
        workload={"request_rate": 0.01},
    ).to_data()  # fmt: skip
    (tmp_path / "spec.yaml").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "schedlab", "run", str(tmp_path / "spec.yaml"), "-q"]
    process = subprocess.Popen(
        [*command, "-o", str(tmp_path / "run")], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
        # Whatever runs in the background of a shell ignores SIGINT, and so do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "planned\n"
        process.send_signal(signal.SIGINT)  # it waits for the second request, for a minute or more
        assert process.wait(60) == 130
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
        assert not (tmp_path / "run").exists()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engine": {"profile": None}}, "preempt_in_order is True in vLLM, False in the experim"),
        ({"engine": {"async_scheduling": True}}, "async_scheduling: vLLM does not do that on a C"),
        ({"engine": {"tensor_parallel_size": 2}}, "one engine on one device"),
        ({"engine": {"max_model_len": 512, "num_gpu_blocks_override": 40}}, "vLLM does not open"),
        (
            {
                "policy": {"name": "static", "max_batch_size": 4},
                "engine": {"enable_prefix_caching": False},
            },
            "policy 'static' seals batches",
        ),
    ],
)
def test_what_vllm_does_not_do_is_refused(model, changes, said):
    with pytest.raises(SpecError, match=said):
        run(spec_of(model, **changes))


def test_model_that_does_not_fit_is_refused_before_it_is_opened(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 1 << 32}))
    with pytest.raises(SpecError, match="GiB"):
        run(spec_of(str(tmp_path)))
