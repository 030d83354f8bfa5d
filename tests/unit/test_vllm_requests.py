"""vLLM's requests stand in for an engine's own, without vLLM."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from schedlab import core
from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core import plan_builder, step_ledger

if core.running() != "python":
    pytest.skip("policies run in vLLM with the Python core only", allow_module_level=True)

from schedlab.gpu_backend.vllm.requests import Requests


def test_requests_inside_vllm_have_all_that_plans_ask_of_a_population():
    source = "".join(Path(module.__file__).read_text() for module in (step_ledger, plan_builder))
    asked = set(re.findall(r"\b_?requests\.([a-z_]+)", source))
    scheduler = SimpleNamespace(
        running=[], kv_cache_manager=None, num_waiting_for_streaming_input=0,
        get_request_counts=lambda: (0, 0),
    )  # fmt: skip
    requests = Requests(
        scheduler, EngineConfig(num_blocks=8, max_model_len=64), registry.make("fcfs"), print
    )
    assert {"running", "kv", "fetching"} <= asked
    assert {name for name in asked if not hasattr(requests, name)} == set()
