"""The parts of the self-check: what is measured and checked on a device, case by case."""

from __future__ import annotations

import gc
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import triton

from schedlab.gpu_backend import ceilings, kernel_bench, kernel_check, step_bench
from schedlab.gpu_backend.ceilings import Ceiling
from schedlab.gpu_backend.decoder_config import decoder_config
from schedlab.gpu_backend.device_timer import Timer
from schedlab.gpu_backend.kernel_bench import BenchResult
from schedlab.gpu_backend.kernel_check import Check
from schedlab.gpu_backend.kernel_hash import kernel_hash
from schedlab.gpu_backend.runner import ModelRunner, open_runner
from schedlab.gpu_backend.tile_search import DECODE_TILES, PREFILL_TILES, TileTime, search_tiles
from schedlab.sim.config import EngineConfig


class Sizes(NamedTuple):
    """How much each part measures."""

    model: str
    dtypes: tuple[torch.dtype, ...]
    """To check; the first is measured."""
    copy_bytes: int
    matrix_size: int
    product_rows: tuple[int, ...]
    repetitions: int
    """Of one input whose bits must not move."""
    decode_batches: tuple[tuple[str, tuple[int, ...]], ...]
    single_context: int
    prompts: tuple[int, ...]
    elementwise_rows: int
    step_cases: tuple[tuple[int, int], ...]
    step_prompts: tuple[int, ...]
    gap_batch: int
    searched_batches: tuple[tuple[int, int], ...]
    searched_prompts: tuple[int, ...]
    num_searched: int
    """Tiles of either kind."""
    num_shapes: int
    """Of attention, to check."""
    large_batches: tuple[int, ...]
    rotated_bytes: int
    """Weights that a measurement of products goes round."""
    rotation: int | None
    """Copies of a cache that a measurement of attention goes round; None: enough."""


FULL = Sizes(
    model="llama-3-8b", dtypes=(torch.bfloat16, torch.float16), copy_bytes=2**31,
    matrix_size=8192, product_rows=(1, 16, 64, 128, 256), repetitions=50,
    decode_batches=kernel_bench.DECODE_BATCHES, single_context=8192,
    prompts=(2048, 4096, 8192, 16384), elementwise_rows=8192, step_cases=step_bench.CASES,
    step_prompts=step_bench.PROMPTS, gap_batch=64,
    searched_batches=((1, 8192), (8, 2048), (64, 2048), (128, 2048)),
    searched_prompts=(2048, 8192), num_searched=99, num_shapes=99, large_batches=(130, 256),
    rotated_bytes=2**29, rotation=None,
)  # fmt: skip
REHEARSAL = Sizes(
    # The interpreter gets products in bfloat16 wrong.
    model="schedlab-tiny", dtypes=(torch.float16,), copy_bytes=2**20, matrix_size=64,
    product_rows=(1, 4), repetitions=2, decode_batches=(("B=2", (20, 4)),), single_context=16,
    prompts=(20,), elementwise_rows=2, step_cases=((1, 64), (4, 32)), step_prompts=(48,),
    gap_batch=4, searched_batches=((1, 16),), searched_prompts=(16,), num_searched=0,
    num_shapes=1, large_batches=(9,), rotated_bytes=1, rotation=1,
)  # fmt: skip


class Subject:
    """A device under test.

    Parameters
    ----------
    device : torch.device
    timer : Timer
        How to measure on it.
    sizes : Sizes
    """

    def __init__(self, device: torch.device, timer: Timer, sizes: Sizes) -> None:
        self.device = device
        self.timer = timer
        self.sizes = sizes

    @property
    def dtype(self) -> torch.dtype:
        """Format of what is measured."""
        return self.sizes.dtypes[0]

    @cached_property
    def copy(self) -> Ceiling:
        """Copying within the device's memory, measured once in this process."""
        return ceilings.device_copy(self.device, self.timer, self.sizes.copy_bytes)

    @cached_property
    def product(self) -> Ceiling:
        """A large matrix product, measured once in this process."""
        # A CPU multiplies halves slowly and in few builds of torch.
        dtype = self.dtype if self.device.type == "cuda" else torch.float32
        return ceilings.matrix_product(self.device, self.timer, dtype, self.sizes.matrix_size)

    def release(self) -> None:
        """Give memory back. A runner is part of reference cycles: collected first, or it stays."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class ResultLine(NamedTuple):
    """One result: what a person reads, what a program reads, and whether it is a failure."""

    cells: tuple[str, ...]
    data: Mapping[str, Any]
    failed: bool = False


class CheckCase(NamedTuple):
    """What is run as one; if it raises, the cases after it are run all the same."""

    name: str
    rows: Callable[[], Iterable[ResultLine]]


def versions(subject: Subject) -> Iterator[CheckCase]:
    """Tell what a measurement depends on besides this project."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "kernels": kernel_hash(),
        "processor": platform.processor() or platform.machine(),
        "device": str(subject.device),
    }
    if subject.device.type == "cuda":
        properties = torch.cuda.get_device_properties(subject.device)
        found |= {
            "device": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    yield CheckCase(
        "versions",
        lambda: [ResultLine((k, str(v)), {"name": k, "value": v}) for k, v in found.items()],
    )


def limits(subject: Subject) -> Iterator[CheckCase]:
    """Measure the device's ceilings: memory, matrix products, both ways to the host."""
    device, timer, sizes = subject.device, subject.timer, subject.sizes
    yield CheckCase("device copy", lambda: [_ceiling_row(subject.copy)])
    yield CheckCase("matrix product", lambda: [_ceiling_row(subject.product)])
    yield CheckCase(
        "host copies",
        lambda: map(_ceiling_row, ceilings.host_copies(device, timer, sizes.copy_bytes // 8)),
    )
    shape = decoder_config(sizes.model).shape
    yield CheckCase(
        "products of a decode step",
        lambda: map(
            _ceiling_row,
            ceilings.layer_products(
                device, timer, shape, sizes.product_rows, subject.dtype, sizes.rotated_bytes
            ),
        ),
    )


def correctness(subject: Subject) -> Iterator[CheckCase]:
    """Compare every kernel with float64, beyond 31-bit offsets too, and with itself."""
    device, sizes = subject.device, subject.sizes
    for dtype in sizes.dtypes:
        name = str(dtype).removeprefix("torch.")
        for title, checks in kernel_check.kernel_checks(
            device, dtype, sizes.num_shapes, sizes.large_batches
        ):
            yield CheckCase(f"{name} {title}", partial(_check_rows, name, checks))
    dtype = subject.dtype
    name = str(dtype).removeprefix("torch.")
    repeated: dict[str, Any] = {"repetitions": sizes.repetitions}
    if device.type != "cuda":
        repeated |= {"prompt_tokens": 20, "decode_contexts": (20, 5)}
    yield CheckCase(
        "repeated",
        partial(
            _check_rows, name, lambda: kernel_check.check_repeatable(device, dtype, **repeated)
        ),
    )
    if device.type == "cuda":
        yield CheckCase("block ids beyond 31-bit offsets", lambda: [_high_ids_row(subject)])


def bench(subject: Subject) -> Iterator[CheckCase]:
    """Measure the kernels against a device copy and torch's attention, all in this run."""
    where, sizes = (subject.timer, subject.device, subject.dtype), subject.sizes
    yield CheckCase("device copy", lambda: [_ceiling_row(subject.copy)])
    for batch in sizes.decode_batches:
        yield CheckCase(
            f"decode {batch[0]}",
            lambda batch=batch: map(  # type: ignore[misc]
                _figure_row, kernel_bench.decode_figures(*where, subject.copy.rate, (batch,))
            ),
        )
    yield CheckCase(
        "decode of one",
        lambda: [
            _figure_row(
                kernel_bench.single_decode_figure(
                    *where, subject.copy.rate, sizes.single_context, sizes.rotation
                )
            )
        ],
    )
    yield CheckCase(
        "decode, paged against contiguous",
        lambda: [_figure_row(kernel_bench.paged_decode_figure(*where, sizes.decode_batches[0]))],
    )
    for length in sizes.prompts:
        yield CheckCase(
            f"prefill S={length}",
            lambda length=length: map(  # type: ignore[misc]
                _figure_row, kernel_bench.prefill_figures(*where, (length,))
            ),
        )
    yield CheckCase(
        "small kernels",
        lambda: map(
            _figure_row,
            kernel_bench.elementwise_figures(*where, subject.copy.rate, sizes.elementwise_rows),
        ),
    )


def steps(subject: Subject) -> Iterator[CheckCase]:
    """Time whole steps against the bytes they read or their arithmetic, and the host's share."""
    sizes = subject.sizes
    config = step_bench.bench_config(sizes.step_cases, sizes.step_prompts)
    opened: list[ModelRunner] = []

    def open_model() -> Iterator[ResultLine]:
        begun_s = time.perf_counter()
        runner = open_runner(sizes.model, config, device=str(subject.device))
        eager = runner
        if runner.graph_buckets:
            eager = ModelRunner(runner.decoder, config, use_graphs=False)
        opened.extend((runner, eager))
        took = f"{time.perf_counter() - begun_s:.1f} s"
        yield ResultLine((f"open {sizes.model}", took), {"name": "open", "value": took})

    yield CheckCase("open the model", open_model)
    if not opened:
        return
    yield from _step_cases(subject, config, *opened)


def _step_cases(
    subject: Subject, config: EngineConfig, runner: ModelRunner, eager: ModelRunner
) -> Iterator[CheckCase]:
    sizes = subject.sizes
    other = eager if eager is not runner else None
    yield CheckCase(
        "host gap",
        lambda: [_figure_row(step_bench.host_gap_figure(runner, config, sizes.gap_batch))],
    )
    if eager.is_cuda:
        context = min(context for _, context in sizes.step_cases)
        yield CheckCase(
            "launching eagerly",
            lambda: map(
                _figure_row, step_bench.launch_figures(eager, config, sizes.gap_batch, context)
            ),
        )
    for case in sizes.step_cases:
        yield CheckCase(
            "decode step B={} ctx={}".format(*case),
            lambda case=case: map(  # type: ignore[misc]
                _figure_row,
                step_bench.decode_step_figures(runner, other, config, subject.copy.rate, (case,)),
            ),
        )
    yield CheckCase(
        "prefill steps",
        lambda: map(
            _figure_row,
            step_bench.prefill_step_figures(
                runner, config, subject.product.rate, sizes.step_prompts
            ),
        ),
    )


def tiles(subject: Subject) -> Iterator[CheckCase]:
    """Time other tiles than the table's."""
    sizes, many = subject.sizes, subject.sizes.num_searched
    search = partial(
        search_tiles, subject.timer, subject.device, subject.dtype,
        decode_tiles=DECODE_TILES[:many], prefill_tiles=PREFILL_TILES[:many],
        rotation=sizes.rotation,
    )  # fmt: skip
    for batch in sizes.searched_batches:
        yield CheckCase(
            "decode B={} ctx={}".format(*batch),
            lambda batch=batch: map(  # type: ignore[misc]
                _tile_row, search(decode_batches=(batch,), prefill_lengths=())
            ),
        )
    for length in sizes.searched_prompts:
        yield CheckCase(
            f"prefill S={length}",
            lambda length=length: map(  # type: ignore[misc]
                _tile_row, search(decode_batches=(), prefill_lengths=(length,))
            ),
        )


PARTS: dict[str, Callable[[Subject], Iterator[CheckCase]]] = {
    "versions": versions,
    "ceilings": limits,
    "correctness": correctness,
    "bench": bench,
    "steps": steps,
    "tiles": tiles,
}


def _ceiling_row(ceiling: Ceiling) -> ResultLine:
    timing = ceiling.timing
    cells = (
        ceiling.name, f"{ceiling.rate / 1e12:.3f} T{ceiling.unit}",
        f"{timing.median_s * 1e6:.1f} us, IQR {timing.iqr_s * 1e6:.1f}, n={timing.repetitions}, "
        f"{timing.mode}",
    )  # fmt: skip
    return ResultLine(cells, {**ceiling._asdict(), "timing": timing._asdict()})


def _check_rows(dtype: str, checks: Callable[[], Iterable[Check]]) -> Iterator[ResultLine]:
    for check in checks():
        cells = (
            dtype, check.name, f"error {check.error:.2e}", f"allowed {check.tolerance:.0e}",
            "ok" if check.passed else "FAILED",
        )  # fmt: skip
        yield ResultLine(cells, {"dtype": dtype, **check._asdict()}, failed=not check.passed)


def _high_ids_row(subject: Subject) -> ResultLine:
    try:
        (row,) = _check_rows(
            str(subject.dtype).removeprefix("torch."),
            lambda: [kernel_check.check_high_block_ids(subject.device, subject.dtype)],
        )
    except MemoryError as error:
        name = "block ids beyond 31-bit offsets"
        return ResultLine((name, f"not run: {error}"), {"name": name, "not_run": str(error)})
    return row


def _figure_row(figure: BenchResult) -> ResultLine:
    cells = (
        figure.name, f"{figure.value:.3g} {figure.unit}".strip(),
        _goal("required", figure, figure.required), _goal("stretch", figure, figure.stretch),
        figure.detail,
    )  # fmt: skip
    data = {
        **figure._asdict(),
        "meets_required": figure.meets(figure.required),
        "meets_stretch": figure.meets(figure.stretch),
    }
    return ResultLine(cells, data)


def _goal(kind: str, figure: BenchResult, goal: float | None) -> str:
    if goal is None:
        return ""
    said = f"{kind} {'<=' if figure.smaller_is_better else '>='} {goal:.3g}"
    if math.isnan(figure.value):
        return f"{said}: ?"
    return f"{said}: {'yes' if figure.meets(goal) else 'NO'}"


def _tile_row(time: TileTime) -> ResultLine:
    told = "does not fit" if time.median_us is None else f"{time.median_us:.1f} us"
    cells = (time.case, time.tile, "in the table" if time.in_table else "", told)
    return ResultLine(cells, time._asdict())
