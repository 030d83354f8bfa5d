"""What of the backend `vllm` needs no vLLM."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab import core
from schedlab.experiments.comparing import calibrated_engine
from schedlab.experiments.running import vllm_backend
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.config import EngineConfig
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.models import model
from schedlab.sim.request import Request
from tests import laws

if core.running() != "python":
    pytest.skip("policies run in vLLM with the Python core only", allow_module_level=True)

from schedlab.gpu_backend.vllm.clock import ModelledStepClock
from schedlab.gpu_backend.vllm.model_folder import config_of, model_folder
from schedlab.gpu_backend.vllm.prompts import prompt_ids


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is here")
def test_backend_without_vllm_says_how_to_get_it():
    spec = make_spec(
        {
            "name": "x",
            "backend": "vllm",
            "model": "schedlab-small",
            "hardware": "cpu",
            "engine": {"dtype": "fp32", "num_gpu_blocks_override": 40},
            "workload": {"trace": "azure-conv", "num_requests": 1, "request_rate": 1},
        }
    )
    with pytest.raises(SpecError, match=r"vLLM, which is not installed: pip install 'schedlab\["):
        run(spec)


def test_prompts_share_the_blocks_that_have_equal_names_and_nothing_else():
    one, other = (
        prompt_ids(Request(i, 0, 70, 5, prefix_hash_ids=(7, i)), 1000, seed=0, block_size=32)
        for i in (1, 2)
    )
    assert len(one) == len(other) == 70
    assert one[:32] == other[:32]
    assert np.not_equal(one[32:], other[32:]).mean() > 0.9
    assert one == prompt_ids(Request(1, 0, 70, 5, prefix_hash_ids=(7, 1)), 1000, 0, 32)


def test_model_of_the_table_gets_a_config_that_reads_back_to_it(tmp_path):
    folder = model_folder("schedlab-small", tmp_path)
    read, known = model(str(folder)), model("schedlab-small")
    for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim"):
        assert getattr(read, name) == getattr(known, name)
    assert read.num_parameters == known.num_parameters


def test_model_known_by_its_dimensions_only_is_refused():
    with pytest.raises(SpecError, match=r"give its config\.json"):
        config_of(model("opt-13b"))


def test_modelled_clock_starts_each_step_when_the_one_planned_before_it_ends():
    pricing = Pricing(laws.LinearCost(base_ns=100, token_ns=0, context_ns=0))
    clock = ModelledStepClock(pricing)
    clock.start()
    clock.idle_until(40)
    shape = BatchShape(1, 5, 5)
    first = clock.planned(clock.read_ns(), shape)
    second = clock.planned(clock.read_ns(), shape)  # planned ahead
    assert clock.now_ns == 40
    assert clock.ended(first, clock.read_ns())[:2] == (40, 140)
    assert clock.ended(second, clock.read_ns())[:2] == (140, 240)
    assert clock.now_ns == 240


@pytest.mark.parametrize("clock", ["modelled", "virtual"])
def test_engine_of_vllm_is_opened_as_the_experiment_says_and_serves_its_workload(
    monkeypatch, clock
):
    """Every key has a value of its own; what vLLM is given and what it tells are compared whole."""
    spec = make_spec(
        {
            "name": "x",
            "backend": "vllm",
            "seed": 11,
            "model": "schedlab-small",
            "hardware": "a100",
            "policy": {"name": "static", "max_batch_size": 3},
            "engine": {"dtype": "bf16", "num_gpu_blocks_override": 40,
                       "gpu_memory_utilization": 0.77},
            "workload": {"trace": "azure-conv", "num_requests": 1, "arrivals": "closed_loop",
                         "max_concurrency": 9},
            "real": {"device": "cpu", "weights": "/some/folder", "threads": 3, "clock": clock,
                     "temperature": 0.5, "attention_backend": "TRITON_ATTN"},
        }
    )  # fmt: skip
    asked = []
    core = SimpleNamespace(
        setup=SimpleNamespace(config="limits"), describe=lambda: {"version": 9, "device": "?"}
    )

    class Replay:
        first_s = 0.25
        scheduler = SimpleNamespace(num_estimates=5, num_plans=6)

        def __init__(self, *given, **more):
            asked.append((given, more))

        def run(self, arrivals, clients):
            asked.append((arrivals, clients))
            return SimpleNamespace(recorded=lambda: ["step"], seconds=lambda: {"model_s": 2.0})

    made = {
        "clock": {
            "ModelledStepClock": lambda pricing: SimpleNamespace(
                mode="modelled", read_ns=SimpleNamespace(describe=lambda: {"by": pricing})
            ),
            "MeasuredStepClock": lambda mode, stopwatch: SimpleNamespace(
                mode=mode, read_ns=SimpleNamespace(describe=lambda: {"by": stopwatch})
            ),
        },
        "engine": {"VllmSetup": lambda **given: given},
        "opening": {
            "open_core": lambda setup: asked.append(setup) or core,
            "first_requests": lambda config: f"first within {config}",
        },
        "replay": {"Replay": Replay},
    }
    for name, things in made.items():
        monkeypatch.setitem(
            sys.modules, f"schedlab.gpu_backend.vllm.{name}", SimpleNamespace(**things)
        )
    monkeypatch.setattr(vllm_backend, "require_vllm", lambda: None)
    monkeypatch.setattr(vllm_backend, "open_stopwatch", lambda spec: f"watch of {spec.name}")
    pricing = SimpleNamespace(estimate_ns="estimates")
    opened = vllm_backend.open_vllm(SimpleNamespace(spec=spec, config="own limits"), pricing)
    record, progress = [], object()
    served = opened.serve(SimpleNamespace(arrivals="those", record=record, progress=progress))
    setup, (given, more), run_of = asked
    assert setup == {
        "model": "schedlab-small", "config": "own limits", "device": "cpu", "dtype": "bf16",
        "weights": "/some/folder", "seed": 11, "threads": 3, "cuda_graphs": spec.real.cuda_graphs,
        "attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.77,
    }  # fmt: skip
    is_timed = clock == "virtual"
    assert given == (core, {"name": "static", "max_batch_size": 3}, opened._clock, "estimates")
    assert opened._clock.mode == clock
    assert more == {
        "temperature": 0.5, "progress": progress, "warm_up": "first within limits" if is_timed
        else (),
    }  # fmt: skip
    assert (run_of, record, served.num_plans) == (("those", 9), ["step"], 6)
    assert opened.describe() == {
        "engine": "vllm", "version": 9, "device": "cpu", "threads": 3, "clock": clock,
        "by": "watch of x" if is_timed else pricing, "weights": "/some/folder",
        "estimates": 5, "model_s": 2.0, **({"first_requests_s": 0.25} if is_timed else {}),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"cluster": 2}, "cluster: backend: vllm runs one engine"),
        ({"tensor_parallel_size": 2}, "engine.tensor_parallel_size: backend: vllm runs one engine"),
        ({"data_parallel_size": 2}, "engine.data_parallel_size: backend: vllm runs one engine"),
        ({"weight_dtype": "fp8"}, "engine.weight_dtype: backend: vllm stores weights"),
        ({"kv_cache_dtype": "fp8"}, "engine.kv_cache_dtype: backend: vllm caches what"),
        ({"dtype": "fp8"}, "engine.dtype: backend: vllm computes in fp32, bf16 or fp16"),
        ({"async_scheduling": True}, "engine.async_scheduling: vLLM does not do that on a CPU"),
        ({}, None),
        ({"weight_dtype": "bf16", "kv_cache_dtype": "bf16"}, None),
    ],
)
def test_experiment_that_vllm_here_cannot_do_is_refused_by_its_key(changed, said):
    engine = {
        "tensor_parallel_size": 1, "data_parallel_size": 1, "weight_dtype": "auto",
        "kv_cache_dtype": "auto", "dtype": "bf16", "async_scheduling": False, **changed,
    }  # fmt: skip
    spec = SimpleNamespace(
        cluster=engine.pop("cluster", None), engine=SimpleNamespace(**engine),
        real=SimpleNamespace(device="cpu"),
    )  # fmt: skip
    if said is None:
        vllm_backend._refuse(spec)
        spec.engine.async_scheduling, spec.real.device = True, "cuda"
        vllm_backend._refuse(spec)
        return
    with pytest.raises(SpecError, match=f"^{said}"):
        vllm_backend._refuse(spec)


@pytest.mark.parametrize(("seats", "asked"), [(2, 40), (1000, calibrated_engine._NUM_SHORT)])
def test_calibration_of_vllm_asks_twenty_short_requests_a_seat_up_to_a_number(
    monkeypatch, seats, asked
):
    class AskedError(Exception):
        pass

    def short(config, num_requests, seed):
        raise AskedError(num_requests, seed)

    for name, things in {
        "clock": ["MeasuredStepClock"], "engine": ["VllmSetup"], "replay": ["Replay"],
        "opening": ["open_core", "first_requests"], "step_timer": ["VllmStepTimer"],
        "release": ["with_switches"],
    }.items():  # fmt: skip
        made = SimpleNamespace(setup=SimpleNamespace(config=None))
        stand_in = SimpleNamespace(**{thing: lambda *_, made=made, **__: made for thing in things})
        monkeypatch.setitem(sys.modules, f"schedlab.gpu_backend.vllm.{name}", stand_in)
    monkeypatch.setattr(vllm_backend, "require_vllm", lambda: None)
    monkeypatch.setattr(calibrated_engine, "short", short)
    config = EngineConfig(num_blocks=100, max_model_len=100, max_num_seqs=seats)
    with pytest.raises(AskedError) as refused:
        calibrated_engine.open_vllm("m", config, "cpu", "fp32", 1, 7, lambda: 0)
    assert refused.value.args == (asked, 7)


def test_calibration_of_vllm_runs_fcfs_and_tells_what_steps_cost_beside_the_model(monkeypatch):
    pytest.importorskip("torch")
    asked, setups = [], []

    class Replay:
        def __init__(self, core, policy, clock, estimate, warm_up):
            assert (policy, clock, warm_up) == ({"name": "fcfs"}, ("clock", "watch"), "first")
            with pytest.raises(SpecError, match="asks for no estimates"):
                estimate(None, 1)

        def run(self, some, clients):
            asked.append((len(some), clients))
            n = len(asked)
            step = SimpleNamespace(shape=n, overhead_ns=10**7 * n, duration_ns=10**9)
            return SimpleNamespace(
                recorded=lambda: [step], seconds=lambda: {"model_s": 3.0, "update_s": n / 5}
            )

    core = SimpleNamespace(
        setup=SimpleNamespace(config="limits"), graph_buckets=(1, 2), describe=lambda: {"v": 1}
    )
    made = {
        "clock": {"MeasuredStepClock": lambda stopwatch: ("clock", stopwatch)},
        "engine": {"VllmSetup": lambda *given, **more: given},
        "replay": {"Replay": Replay},
        "release": {"with_switches": lambda config: ("switched", config)},
        "opening": {
            "open_core": lambda setup: setups.append(setup) or core,
            "first_requests": lambda config: "first",
        },
        "step_timer": {"VllmStepTimer": lambda *given: given},
    }
    for name, things in made.items():
        stand_in = SimpleNamespace(**things)
        monkeypatch.setitem(sys.modules, f"schedlab.gpu_backend.vllm.{name}", stand_in)
    monkeypatch.setattr(vllm_backend, "require_vllm", lambda: None)
    monkeypatch.setattr(calibrated_engine, "short", lambda config, n, seed: ["short"] * n)
    monkeypatch.setattr(calibrated_engine, "long", lambda config, seed: ["long"] * 7)
    monkeypatch.setattr(calibrated_engine, "overhead_of", lambda *given: given)
    monkeypatch.setattr(calibrated_engine, "kernels", lambda *given: given)
    config = EngineConfig(num_blocks=100, max_model_len=100, max_num_seqs=6)
    for device, repetitions in (("cpu", 1), ("cuda", 2)):
        found = calibrated_engine.open_vllm("m", config, device, "fp32", 1, 7, "watch")
        limits = replace(config, null_blocks=1, scheduler_reserve_full_isl=True)
        assert setups.pop() == ("m", ("switched", limits), device, "fp32")
        alone = 120 // calibrated_engine._SHARE_ALONE
        runs, asked[:] = list(asked), []
        assert runs == [(alone, 1), (120, None), (120, 1), (120, 3), (7, None)]
        assert found.timer == (core, "watch")
        assert (found.kernels, found.buckets) == (("vllm", device), (1, 2))
        assert found.overhead == ([1, 2, 3, 4, 5], [10**7 * n for n in (1, 2, 3, 4, 5)])
        assert found.about["v"] == 1
        shares = found.about["share_of_time"]
        assert shares == {"model": pytest.approx(15 / 18), "update": pytest.approx(3 / 18)}
        assert found.repetitions == repetitions
        measured = [(one.shape, one.seconds) for one in found.run_steps]
        assert measured == [(n, pytest.approx(1 - n / 100)) for n in (1, 2, 3, 4, 5)]


def test_config_in_a_file_of_another_name_is_copied_to_where_vllm_looks(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    theirs = model_folder("schedlab-small", tmp_path) / "config.json"
    ours = theirs.rename(tmp_path / "mine.json")
    assert model_folder(str(ours), scratch) == scratch
    assert [path.name for path in scratch.iterdir()] == ["config.json"]
    assert (scratch / "config.json").read_bytes() == ours.read_bytes()


def test_modelled_clock_prices_prompts_and_decodes_and_lets_nothing_take_no_time():
    pricing = Pricing(laws.LinearCost(base_ns=100, token_ns=1, context_ns=0))
    clock = ModelledStepClock(pricing)
    clock.start()
    took_ns = []
    for shape in (BatchShape(2, 5, 5), BatchShape(0, 0, 0, ((7, 0),)), BatchShape(0, 0, 0)):
        times = clock.ended(clock.planned(clock.read_ns(), shape), clock.read_ns())
        took_ns.append(times[1] - times[0])
    assert took_ns == [102, 107, 0]


@pytest.mark.parametrize(
    ("longest", "num_requests"),
    # Half of 4 seats fill 32 blocks of 16 with requests of 256 tokens each; six times over, 12.
    [(256, 12), (255, 0), (512, 12)],
)
def test_requests_that_fill_the_memory_are_as_long_as_half_of_the_seats_need(longest, num_requests):
    config = EngineConfig(
        num_blocks=32, block_size=16, max_num_seqs=4, max_model_len=longest,
        max_num_batched_tokens=1000,
    )  # fmt: skip
    found = calibrated_engine.long(config, 3)
    assert len(found) == num_requests
    assert all(one.request.arrival_ns == 0 for one in found)
    assert all(one.request.prompt_tokens + one.output_tokens <= longest for one in found)
    if longest == 512:
        lengths = [one.request.prompt_tokens for one in found]
        assert 150 < np.median(lengths) < 400
        assert lengths != [one.request.prompt_tokens for one in calibrated_engine.long(config, 4)]
