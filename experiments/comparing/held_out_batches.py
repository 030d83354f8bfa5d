"""Batches on which a calibration is judged: those that occur when requests are served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from schedlab.experiments.comparing.calibrated_engine import chat
from schedlab.experiments.comparing.fitted_profile import HELD_OUT
from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor, Steps, Work
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.roofline import RooflineCostModel
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.models import model
from schedlab.sim.rng import stream

if TYPE_CHECKING:
    from schedlab.gpu_backend.calibration_design import BatchPoint

HELD_OUT_POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fcfs", {}),
    ("prefill_first", {}),
    ("static", {"max_batch_size": 8, "pad_prompts": False, "pad_decodes": False}),
)
"""Whose batches a profile is judged on. Padding rows are not measured, so they are left out."""


def replayed_points(
    config: EngineConfig, model_name: str, hardware: str, dtype: str, count: int, seed: int
) -> list[BatchPoint]:
    """Return batches that occur when a chat workload is served under these limits.

    They are drawn from simulated runs of `HELD_OUT_POLICIES` and serve to judge a fit, never to
    make one: a third each of decode, mixed and prefill batches, or all there are of a kind. Drawn
    from all steps alike they would nearly all be decode batches.
    """
    from schedlab.gpu_backend.calibration_design import BatchPoint, batch_kind

    seen: list[BatchPoint] = []

    class Watching(SimExecutor):
        """Notes the batch of every step."""

        def execute(self, work: Work, max_steps: int, horizon_ns: int) -> Steps:
            decodes: tuple[int, ...] = ()
            if work.shape.num_decodes:
                decodes = tuple(s.num_computed_tokens for s in work.decodes.members.values())
            seen.append(BatchPoint(HELD_OUT, decodes, work.shape.chunks))
            return super().execute(work, 1, horizon_ns)

    pricing = Pricing(RooflineCostModel(Deployment(model(model_name), gpu(hardware), dtype=dtype)))
    for name, knobs in HELD_OUT_POLICIES:
        executor = Watching(pricing)
        simulate(
            Engine(config, registry.make(name, **knobs), executor),
            chat(config, 4 * config.max_num_seqs, seed),
        )
    rng = stream(seed, "held_out")
    drawn: list[BatchPoint] = []
    for kind in ("decode", "mixed", "prefill"):
        some = [p for p in seen if batch_kind(p.shape) == kind and p.fits(config)]
        picks = rng.choice(len(some), size=min(count // 3, len(some)), replace=False)
        drawn += [some[i] for i in sorted(picks.tolist())]
    return drawn
