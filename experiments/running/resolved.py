"""One point of an experiment with every name in it looked up, once."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from schedlab.experiments.running.kv_offload import offload_limits
from schedlab.experiments.running.speculation import (
    Speculation,
    resolve_speculation,
    simulated_gpu,
)
from schedlab.experiments.specification.deployment import deployment
from schedlab.experiments.specification.engine import EngineSpec
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.policies.registry import policy_class
from schedlab.sim.config import EngineConfig, vllm_capture_sizes
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.cost import registry
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.step_spread import Scatter
from schedlab.sim.drive.frontend import Frontend
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.memory import MemoryBudget, memory_budget

_SAME_NAME = [f.name for f in fields(EngineConfig) if f.name in EngineSpec.model_fields]


@dataclass(frozen=True)
class Resolved:
    """What a specification comes to, before anything runs.

    Attributes
    ----------
    spec : ExperimentSpec
        One point.
    deployment : Deployment
        Model, devices, formats and limits.
    memory : MemoryBudget
        Where the memory of a device goes.
    config : EngineConfig
        The limits of the engine.
    cost_model : CostModel
        What a step takes.
    overhead : SchedulingOverhead
        What the CPU adds: as the specification says, else as the profile does, else nothing.
    frontend : Frontend or None
        What stands between clients and engine.
    speculation : Speculation or None
        Who drafts tokens.
    """

    spec: ExperimentSpec
    deployment: Deployment
    memory: MemoryBudget
    config: EngineConfig
    cost_model: CostModel
    overhead: SchedulingOverhead
    frontend: Frontend | None = None
    speculation: Speculation | None = None

    def simulated_gpu(self, pricing: Pricing, engine: int = 0) -> SimExecutor:
        """Return a simulated GPU for an engine of this point, each engine with its number."""
        gpu = simulated_gpu(pricing, self.config, self.speculation, self.spec.seed)
        model = pricing.cost_model
        if model.step_spread is not None:
            gpu.scatter = Scatter(model.step_spread, self.spec.seed, model.draw, engine)
        return gpu


def resolve(spec: ExperimentSpec, cost_model: CostModel | None = None) -> Resolved:
    """Look up model, device and cost model of one point, and what follows from them.

    Parameters
    ----------
    spec : ExperimentSpec
        One point; see `schedlab.experiments.specification.sweep.points`.
    cost_model : CostModel, optional
        Prices steps instead of the specification's.

    Raises
    ------
    SpecError
        If a name is unknown, limits contradict each other, the model does not fit the device, or
        a profile is unreadable or of something else.
    """
    stated = spec.engine.scheduling_overhead
    overhead = None if stated is None else SchedulingOverhead(**stated.model_dump())
    where = deployment(spec)
    memory = _memory(spec, where)
    speculation = resolve_speculation(spec, where)
    config = _config(spec, where, memory, overhead or SchedulingOverhead(), speculation)
    where = replace(where, config=config)
    cost_model = cost_model or make_cost_model(spec, where)
    if overhead is None:
        overhead = cost_model.scheduling_overhead or SchedulingOverhead()
    frontend = None if spec.frontend is None else spec.frontend.frontend()
    return Resolved(spec, where, memory, config, cost_model, overhead, frontend, speculation)


def make_cost_model(spec: ExperimentSpec, where: Deployment | None = None) -> CostModel:
    """Return the cost model that a specification names.

    Parameters
    ----------
    spec : ExperimentSpec
        One point.
    where : Deployment, optional
        What it prices; that of the specification, without an engine's limits, if not given.

    Raises
    ------
    SpecError
        If it refuses a knob, or a profile is unreadable or of another model or device.
    """
    chosen = spec.cost_model
    name = chosen.name or registry.kind_of(str(chosen.profile))
    where = where or deployment(spec)
    made = registry.make(name, where, **chosen.given)
    if made.num_stages != where.pipeline_parallel_size:
        raise SpecError(
            f"engine.pipeline_parallel_size: cost_model {name} does not divide its steps among "
            "stages; cost_model: roofline does"
        )
    return made


def _memory(spec: ExperimentSpec, where: Deployment) -> MemoryBudget:
    engine = spec.engine
    return memory_budget(
        where.model,
        where.gpu,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        dtype=where.dtype,
        weight_dtype=where.stored_dtype,
        kv_dtype=where.kv_dtype,
        tensor_parallel_size=where.tensor_parallel_size,
        data_parallel_size=where.data_parallel_size,
        pipeline_parallel_size=where.pipeline_parallel_size,
        block_size=engine.block_size,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
    )


def _config(
    spec: ExperimentSpec,
    where: Deployment,
    memory: MemoryBudget,
    overhead: SchedulingOverhead,
    speculation: Speculation | None,
) -> EngineConfig:
    """Return the engine's limits: those of the same name, and those that follow from memory."""
    engine = spec.engine
    beside = memory.num_blocks if speculation is None else speculation.num_blocks(memory)
    num_blocks = engine.num_gpu_blocks_override or beside
    num_blocks -= engine.reserve_null_block
    block_bytes = memory.kv_bytes_per_token * engine.block_size
    longest = min(where.model.max_model_len, num_blocks * engine.block_size)
    limits = {name: getattr(engine, name) for name in _SAME_NAME}
    limits |= {
        "num_blocks": num_blocks,
        "null_blocks": int(engine.reserve_null_block),
        "max_model_len": engine.max_model_len or longest,
        "swap_space_blocks": int(engine.swap_space * 2**30 / block_bytes),
        "kv_block_bytes": block_bytes,
        "first_launch_ns": int(overhead.first_step_s * 1e9 + 0.5),
    }
    limits |= offload_limits(spec, block_bytes)
    if speculation is not None:
        limits["num_speculative_tokens"] = speculation.spec.num_speculative_tokens
        limits["num_lookahead_tokens"] = speculation.num_lookahead_tokens
    if engine.cuda_graph_padding:
        limits["cudagraph_capture_sizes"] = vllm_capture_sizes(engine.max_num_seqs)
    try:
        config = EngineConfig(**limits)
    except ValueError as error:
        raise SpecError(f"engine: {error}") from error
    policy = policy_class(spec.policy.name)
    if config.enable_prefix_caching and policy.sets_memory_aside:
        raise SpecError(
            f"policy {spec.policy.name} sets memory aside, which prefix caching does not allow: "
            "set engine.enable_prefix_caching=false (profiles of vLLM switch it on)"
        )
    return config.for_policy(policy.pauses, policy.seats_loaded)
