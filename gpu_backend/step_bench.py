"""How fast whole decode steps are: against the bytes they must read, and without the host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from statistics import median

from schedlab.gpu_backend.calibration_design import BatchPoint
from schedlab.gpu_backend.clock import VirtualClock
from schedlab.gpu_backend.executor import TorchExecutor
from schedlab.gpu_backend.kernel_bench import BenchResult
from schedlab.gpu_backend.runner import ModelRunner
from schedlab.gpu_backend.step_timer import WARM_UPS, StepTimer
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.plan import BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.request import Arrival, Request, RequestState

CASES = ((1, 2048), (8, 2048), (32, 2048), (128, 2048), (32, 512), (128, 512))
"""Batch size and context of the decode steps that are timed."""

PROMPTS = (2048, 8192)
"""Lengths of the prompts whose prefill is timed."""

_REPETITIONS = 20
_PROMPT_TOKENS = 64
"""Of a prompt that is launched: so few that a GPU waits for the host."""


def bench_config(
    cases: Sequence[tuple[int, int]], prompts: Sequence[int] = (), block_size: int = 16
) -> EngineConfig:
    """Return limits within which all decode batches and prompts fit."""
    longest = max([context + 256 for _, context in cases] + list(prompts))
    blocks = max(batch * -(-(context + 256) // block_size) for batch, context in cases)
    return EngineConfig(
        num_blocks=blocks,
        max_model_len=longest,
        block_size=block_size,
        max_num_seqs=max(batch for batch, _ in cases),
        max_num_batched_tokens=max(2048, longest),
    )


def decode_step_figures(
    runner: ModelRunner,
    eager: ModelRunner | None,
    config: EngineConfig,
    copy_rate: float,
    cases: Sequence[tuple[int, int]] = CASES,
) -> Iterator[BenchResult]:
    """Yield how near decode steps come to the time that reading weights and KV must take.

    Parameters
    ----------
    runner : ModelRunner
        With CUDA graphs, if the device has them.
    eager : ModelRunner or None
        The same model without graphs, to say what they save.
    config : EngineConfig
        Limits of both.
    copy_rate : float
        Of `schedlab.gpu_backend.ceilings.device_copy` in the same run, B/s.
    cases : sequence of (int, int)
        Batch size and context.

    Notes
    -----
    ``floor = (weights without the embedding table + context tokens x KV bytes) / copy_rate``;
    the device's time runs from the copy of the batch to its sampled tokens.
    """
    shape = runner.decoder.config.shape
    weight = runner.decoder.weights.embedding
    read_bytes = shape.num_parameters * weight.itemsize
    if not shape.tied_embeddings:
        read_bytes -= shape.vocab_size * shape.hidden_size * weight.itemsize
    kv_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * weight.itemsize
    timer = StepTimer(runner, config, 0)
    eager_timer = None if eager is None else StepTimer(eager, config, 0)
    for batch, context in cases:
        point = BatchPoint("decode", (context - 1,) * batch, ())
        step_s = median(timer.time(point, _REPETITIONS)[1])
        floor_s = (read_bytes + batch * context * kv_bytes) / copy_rate
        goals = (0.70, 0.85) if batch >= 128 else (0.60, 0.72)
        yield BenchResult(
            f"decode step B={batch} ctx={context}, floor / measured", floor_s / step_s, "",
            *goals, detail=f"{step_s * 1e3:.2f} ms, floor {floor_s * 1e3:.2f} ms",
        )  # fmt: skip
        if eager_timer is not None:
            eager_s = median(eager_timer.time(point, _REPETITIONS)[1])
            yield BenchResult(
                f"decode step B={batch} ctx={context}, eager / graph", eager_s / step_s, "x",
                detail=f"eager {eager_s * 1e3:.2f} ms",
            )  # fmt: skip


def prefill_step_figures(
    runner: ModelRunner,
    config: EngineConfig,
    flop_rate: float,
    prompts: Sequence[int] = PROMPTS,
) -> Iterator[BenchResult]:
    """Yield how near the prefill of a whole prompt comes to the time its arithmetic must take.

    Parameters
    ----------
    runner : ModelRunner
    config : EngineConfig
        Its limits.
    flop_rate : float
        Of `schedlab.gpu_backend.ceilings.matrix_product` in the same run, FLOP/s.
    prompts : sequence of int
        Tokens of each prompt.

    Notes
    -----
    ``floor = (2 T x weights of the layers + 2 x weights of the head + 2 x layers x heads x
    head_dim x T (T + 1)) / flop_rate``: one row goes through the head, and half of the pairs of
    tokens are masked.
    """
    shape = runner.decoder.config.shape
    head = shape.vocab_size * shape.hidden_size
    layers = shape.num_parameters - head * (1 if shape.tied_embeddings else 2)
    timer = StepTimer(runner, config, 0)
    for length in prompts:
        step_s = median(timer.time(BatchPoint("prefill", (), ((length, 0),)), _REPETITIONS)[1])
        pairs = shape.num_layers * shape.num_heads * shape.head_dim * length * (length + 1)
        floor_s = (2 * length * layers + 2 * head + 2 * pairs) / flop_rate
        yield BenchResult(
            f"prefill step S={length}, floor / measured", floor_s / step_s, "",
            detail=f"{step_s * 1e3:.2f} ms, floor {floor_s * 1e3:.2f} ms",
        )  # fmt: skip


def launch_figures(
    eager: ModelRunner, config: EngineConfig, batch: int = 64, context: int = 512
) -> Iterator[BenchResult]:
    """Yield how long the host takes to launch a step kernel by kernel.

    Parameters
    ----------
    eager : ModelRunner
        On a GPU, without graphs; elsewhere launching a step is computing it.
    config : EngineConfig
        Its limits.
    batch, context : int
        Of the decode step; the host's work hardly depends on them.

    Notes
    -----
    Of decode steps, of one of `batch` and of one request; and of prompts, of one size again and
    again, as a calibration times them, and of sizes that were not met before, as most are in a run.
    """
    timer = StepTimer(eager, config, 0)

    def again(lengths: list[tuple[int, int]]) -> tuple[list[list[tuple[int, int]]], int]:
        return [lengths] * _REPETITIONS, WARM_UPS

    new = range(_PROMPT_TOKENS + 1, _PROMPT_TOKENS + 1 + _REPETITIONS)
    cases = {
        f"a step of B={batch} eagerly": again([(1, context - 1)] * batch),
        "a step of B=1 eagerly": again([(1, context - 1)]),
        f"a prompt of {_PROMPT_TOKENS} tokens": again([(_PROMPT_TOKENS, 0)]),
        "prompts of sizes not met before": ([[(n, 0)] for n in new], 0),
    }
    for name, (batches, warm_ups) in cases.items():
        times = timer.launch_times(batches, warm_ups)
        yield BenchResult(
            f"launching {name}, host ms", median(times) * 1e3, "",
            smaller_is_better=True, detail=f"{min(times) * 1e3:.2f} to {max(times) * 1e3:.2f} ms",
        )  # fmt: skip


def host_gap_figure(
    runner: ModelRunner, config: EngineConfig, batch: int = 64, prompt: int = 128, output: int = 128
) -> BenchResult:
    """Return the share of a decode step in which the device waits for the host.

    The whole engine runs: planning, accounting, block tables, sampling, tokens copied back. Where
    the device is a GPU, the next batch is laid out while it works.
    """
    executor = TorchExecutor(runner, config, VirtualClock())
    arrivals = [Arrival(Request(i, 0, prompt, max_tokens=output), output, 0) for i in range(batch)]
    simulate(Engine(config, _Everyone(), executor), arrivals)
    decodes = [s for s in executor.steps if s.shape.num_decodes == batch and not s.shape.chunks]
    gap = median(1 - step.device_ns / step.duration_ns for step in decodes)
    step_ms = median(step.duration_ns for step in decodes) / 1e6
    ahead = sum(step.was_prepared for step in decodes)
    return BenchResult(
        f"host gap of a decode step B={batch}", gap, "", 0.10, 0.03, smaller_is_better=True,
        detail=f"step {step_ms:.2f} ms, {ahead} of {len(decodes)} batches laid out ahead",
    )  # fmt: skip


class _Everyone:
    """Serves in the order of arrival; the device is measured, not the policy."""

    static_keys = True
    by_arrival = True
    pauses = False
    seats_loaded = False

    def __init__(self) -> None:
        self.rekeyed: Collection[RequestState] = ()
        self.on_start: Callable[[EngineView], None] | None = None
        self.on_arrival: Callable[[RequestState, int], None] | None = None
        self.on_tokens: Callable[[BatchPlan, int, int], None] | None = None
        self.on_finish: Callable[[RequestState, int], None] | None = None
        self.on_reject: Callable[[RequestState, int], None] | None = None
        self.keeps_until: Callable[[RequestState, int], int] | None = None
        self.keeps_longer: Callable[[RequestState, int, bool], int] | None = None

    def key(self, state: RequestState, now_ns: int) -> tuple[int, int]:
        return (state.request.arrival_ns, state.id)

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        builder.grant_running()
        for state in view.waiting:
            if not builder.grant(state):
                break
        return builder.build()
