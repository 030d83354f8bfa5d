"""What a policy inside vLLM is told of the time of a step."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from schedlab import core

if core.running() != "python":
    pytest.skip("policies run in vLLM with the Python core only", allow_module_level=True)

from schedlab.gpu_backend.vllm.step_estimates import pricing
from schedlab.sim.config import EngineConfig
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.roofline import RooflineCostModel
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.models import model

PROFILE = Path(__file__).parents[2] / "profiles" / "cpu" / "schedlab-small" / "fp32-tp1"
CONFIG = EngineConfig(num_blocks=100, max_model_len=1600)
SHAPE = BatchShape(8, 800, 100, num_running=8, rows_sampled=8)


def server(name="llama-3-8b", dtype="torch.float16", tensor_parallel_size=2):
    return SimpleNamespace(
        model_config=SimpleNamespace(model=name, dtype=dtype),
        parallel_config=SimpleNamespace(tensor_parallel_size=tensor_parallel_size),
    )


@pytest.mark.parametrize("chosen", ["roofline", {"name": "roofline"}])
def test_server_prices_its_own_model_on_the_gpu_that_it_is_told(chosen):
    given = {"cost_model": chosen, "hardware": "h100-80gb"}
    where = Deployment(model("llama-3-8b"), gpu("h100-80gb"), 2, "fp16", config=CONFIG)
    expected = Pricing(RooflineCostModel(where)).estimate_ns(SHAPE)
    assert pricing(given, server(), CONFIG).estimate_ns(SHAPE) == expected
    other = pricing(given | {"model": "llama-3-8b"}, server("a/path"), CONFIG)
    assert other.estimate_ns(SHAPE) == expected
    assert pricing(given, server(tensor_parallel_size=1), CONFIG).estimate_ns(SHAPE) > expected


def test_profile_brings_the_overhead_that_was_measured_with_it():
    given = {"cost_model": str(PROFILE), "hardware": "cpu", "model": "schedlab-small"}
    served = server("x", "torch.float32", 1)
    found = pricing(given, served, CONFIG)
    assert found.overhead_ns(SHAPE) > 0
    other = pricing(given | {"cost_model": {"profile": str(PROFILE)}}, served, CONFIG)
    assert other.estimate_ns(SHAPE) == found.estimate_ns(SHAPE)


def test_server_without_a_cost_model_prices_nothing():
    assert pricing({"policy": "fcfs"}, server(), CONFIG) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cost_model": "roofline"}, "schedlab.cost_model needs schedlab.hardware"),
        ({"cost_model": {"flops": 3}, "hardware": "h100-80gb"}, "must be a name, a profile's fol"),
        ({"cost_model": 3, "hardware": "h100-80gb"}, "must be a name, a profile's folder or a map"),
        ({"cost_model": "rooflin", "hardware": "h100-80gb"}, "no profile"),
        ({"cost_model": "roofline", "hardware": "h100-8gb"}, "h100-80gb"),
    ],
)
def test_cost_model_that_cannot_price_the_server_is_refused(given, said):
    with pytest.raises(SpecError, match=said):
        pricing(given, server(), CONFIG)
