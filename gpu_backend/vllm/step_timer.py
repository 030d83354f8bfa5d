"""Times single steps of vLLM's loop: batches of a given shape that nobody asked for."""

from __future__ import annotations

from itertools import count
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus

from schedlab.gpu_backend.calibration_design import BatchPoint
from schedlab.gpu_backend.stopwatch import ElapsedTime, Stopwatch
from schedlab.gpu_backend.vllm.engine import Core
from schedlab.gpu_backend.vllm.step_output import step_output
from schedlab.sim.rng import stream

WARM_UPS = 2
_MOST_TOKENS = 1 << 20


class DesignedScheduler(AsyncScheduler):  # type: ignore[misc]
    """Schedules what it is told to, over a cache whose content means nothing."""

    def __init__(
        self,
        stopwatch: Stopwatch,
        **options: Any,  # noqa: ANN401 - vLLM's
    ) -> None:
        super().__init__(**options)
        self._stopwatch = stopwatch
        self.batch: list[tuple[Any, int, int]] = []
        """vLLM's request, tokens to compute and tokens that count as cached."""
        self.launched_ns = self.ready_ns = 0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule the batch."""
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        new: list[Any] = []
        running: list[Any] = []
        tokens: dict[str, int] = {}
        blocks: dict[str, Any] = {}
        for request, num_tokens, num_cached in self.batch:
            is_new = request.status == RequestStatus.WAITING
            external = num_cached if is_new else 0
            given = self.kv_cache_manager.allocate_slots(
                request, num_tokens, num_external_computed_tokens=external
            )
            assert given is not None, "the design says that the batch fits"
            blocks[request.request_id] = given
            tokens[request.request_id] = num_tokens
            if is_new:
                self.waiting.remove_request(request)
                self.running.append(request)
                request.status = RequestStatus.RUNNING
                request.num_computed_tokens = num_cached
                new.append(request)
            else:
                running.append(request)
        output = step_output(self, new, [], running, tokens, blocks, preempted=set())
        self.launched_ns = self._stopwatch()
        return output

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: Any,  # noqa: ANN401 - vLLM's
    ) -> dict[int, EngineCoreOutputs]:
        """Account for the batch."""
        self.ready_ns = self._stopwatch()
        outputs: dict[int, EngineCoreOutputs]
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        return outputs


class VllmStepTimer:
    """Runs batches in vLLM's own loop.

    Rows of a decode batch are requests that have decoded before, so that workers only get what
    changes; prompts are new to them.

    Parameters
    ----------
    core : Core
        The engine; without async scheduling.
    stopwatch : Stopwatch, optional
        Reads the time; time as it passes by default.
    """

    def __init__(self, core: Core, stopwatch: Stopwatch | None = None) -> None:
        self._core = core
        self._stopwatch = stopwatch or ElapsedTime()
        self._scheduler: DesignedScheduler = core.new_plain_scheduler(
            DesignedScheduler, self._stopwatch
        )
        self._ids = count()
        self._warm: set[BatchPoint] = set()
        self.forward_ns = 0
        self._time_forward()

    def time(
        self, point: BatchPoint, repetitions: int
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return seconds of each repetition, on a GPU after warm-ups of a new point.

        The first are from the launch to the sampled tokens, laying the batch out included; the
        second are those of them inside the model's forward pass.
        """
        self._stopwatch.between_steps()
        is_warm = point in self._warm or self._core.setup.device == "cpu"  # see `open_core`
        warm_ups = 0 if is_warm else WARM_UPS
        self._warm.add(point)
        taken = self._repeat(point, warm_ups + repetitions)
        host, forward = zip(*taken[warm_ups:], strict=True)
        return host, forward

    def run(self, point: BatchPoint) -> None:
        """Run a batch once, without timing it."""
        self._repeat(point, 1)

    def _repeat(self, point: BatchPoint, num_steps: int) -> list[tuple[float, float]]:
        # A decode reads one token more in each repetition, and vLLM ends it at the longest length.
        decodes = [self._add(1, max(cached - num_steps - 1, 0)) for cached in point.decodes]
        if decodes:
            self._step(decodes)
        taken: list[tuple[float, float]] = []
        for _ in range(num_steps):
            chunks = [self._add(n, cached) for n, cached in point.chunks]
            taken.append(self._step([*decodes, *chunks]))
            self._finish(chunks)
        self._finish(decodes)
        self._step([])  # workers forget them
        return taken

    def _add(self, num_tokens: int, num_cached: int) -> tuple[Any, int, int]:
        """Add a request whose prompt is computed but for `num_tokens`."""
        number = next(self._ids)
        size = num_tokens + num_cached
        prompt = stream(0, f"prompt/{number}").integers(0, self._core.vocab_size, size).tolist()
        params = SamplingParams(
            max_tokens=_MOST_TOKENS, ignore_eos=True, temperature=0.0, detokenize=False
        )
        hasher = self._core.engine.request_block_hasher
        request = VllmRequest(f"design-{number}", prompt, params, None, block_hasher=hasher)
        self._scheduler.add_request(request)
        return request, num_tokens, num_cached

    def _finish(self, rows: list[tuple[Any, int, int]]) -> None:
        ids = [row.request_id for row, _, _ in rows]
        self._scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)

    def _step(self, batch: list[tuple[Any, int, int]]) -> tuple[float, float]:
        scheduler = self._scheduler
        scheduler.batch = batch
        self.forward_ns = 0
        self._core.engine.step()
        return (scheduler.ready_ns - scheduler.launched_ns) / 1e9, self.forward_ns / 1e9

    def _time_forward(self) -> None:
        begun_ns = 0

        def begin(*_: object) -> None:
            nonlocal begun_ns
            begun_ns = self._stopwatch()

        def end(*_: object) -> None:
            self.forward_ns += self._stopwatch() - begun_ns

        model = self._core.engine.model_executor.driver_worker.worker.get_model()
        model.register_forward_pre_hook(begin)
        model.register_forward_hook(end)
