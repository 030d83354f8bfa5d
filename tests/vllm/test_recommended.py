"""What is recommended to an operator, against vLLM itself: the line, and the limits it has."""

import shlex
from types import SimpleNamespace

import pytest

from schedlab.experiments.search.recommend import Candidate, serve_line
from schedlab.experiments.search.vllm_defaults import RELEASES, default_limits
from schedlab.sim.hardware.gpus import gpu
from tests.vllm.test_decisions import RELEASE


@pytest.fixture
def vllm_parser(monkeypatch):
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    monkeypatch.setattr(vllm.platforms, "current_platform", CpuPlatform())
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


@pytest.mark.parametrize("policy", ["edf", "priority", "fcfs"])
def test_serve_line_with_every_option_is_one_that_vllm_takes(policy, vllm_parser):
    found = SimpleNamespace(
        question=SimpleNamespace(served="meta-llama/Llama-3.1-70B", dtype="fp16"),
        best=SimpleNamespace(candidate=Candidate(2, 4, 512, 4096, policy)),
        limits=RELEASES["0.32"].large,
        is_cut=True,
        max_model_len=70_000,
    )
    program, command, *words = shlex.split(serve_line(found).replace("\\\n", ""))
    assert (program, command) == ("vllm", "serve")
    taken = vllm_parser.parse_args(words)
    assert taken.model_tag == "meta-llama/Llama-3.1-70B"
    assert (taken.tensor_parallel_size, taken.data_parallel_size) == (2, 4)
    assert (taken.max_num_seqs, taken.max_num_batched_tokens) == (512, 4096)
    assert (taken.dtype, taken.max_model_len) == ("float16", 69_632)
    assert taken.scheduling_policy == ("priority" if policy == "priority" else "fcfs")
    if policy == "edf":
        assert taken.additional_config == {"schedlab": {"policy": {"name": "edf"}}}


@pytest.mark.parametrize("name", ["b200", "h100-80gb", "h200", "a100-80gb", "l40s", "rtx-4090"])
def test_limits_of_a_server_on_a_gpu_are_those_of_vllm(name, monkeypatch):
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    device = gpu(name)
    platform = SimpleNamespace(
        get_device_total_memory=lambda: device.memory_bytes,
        get_device_name=lambda: device.name,
        is_tpu=lambda: False,
        is_cpu=lambda: False,
        is_device_capability=lambda capability: False,
    )
    monkeypatch.setattr(arg_utils, "current_platform", platform)
    tokens, seqs = arg_utils.EngineArgs.get_batch_defaults(world_size=1)
    server = UsageContext.OPENAI_API_SERVER
    assert default_limits(device, RELEASES[RELEASE])[:2] == (seqs[server], tokens[server])
