"""What every cost model must keep, checked over random batches."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import replace

from schedlab.sim.construct import construct
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.models import model as model_named
from schedlab.testing.check import FAULTS, LawBroken
from schedlab.testing.laws import require

ShapeLaw = Callable[[CostModel, BatchShape, int], None]


def check_cost_model(
    model: CostModel | type[CostModel],
    *,
    only: str | Iterable[str] | None = None,
    seed: int = 0,
    num_shapes: int = 200,
) -> None:
    """Check that a cost model keeps every law of `COST_MODEL_LAWS`.

    Parameters
    ----------
    model : CostModel or its class
        The model; it is asked, never changed. Of a class, one is made for llama-3-8b on an
        a100-80gb, with its knobs as they are by default.
    only : str or iterable of str, optional
        Names of the laws to check; all by default.
    seed, num_shapes : int
        Which batches are drawn, and how many.

    Raises
    ------
    LawBroken
        With the law and the batch that shows it.
    SpecError
        If the class cannot be made so.
    """
    if isinstance(model, type):
        model = _made(model)
    chosen = list(COST_MODEL_LAWS) if only is None else [only] if isinstance(only, str) else only
    for name in chosen:
        law = COST_MODEL_LAWS[name]
        meaning = (law.__doc__ or "").partition("\n")[0].rstrip(".")
        draw = random.Random(seed)
        for _ in range(num_shapes):
            shape, k = random_shape(draw), draw.choice((1, 2, 17, 120))
            try:
                law(model, shape, k)
            except FAULTS as error:
                reason = f"{error}" if isinstance(error, AssertionError) else repr(error)
                subject = f"cost model {type(model).__name__}"
                raise LawBroken(
                    subject, name, meaning, f"{reason}\n  for {shape}, k = {k}", None
                ) from error


def _made(cls: type[CostModel]) -> CostModel:
    needed = [p for p in inspect.signature(cls).parameters.values() if p.default is p.empty]
    where = (Deployment(model_named("llama-3-8b"), gpu("a100-80gb")),) if needed else ()
    return construct(f"cost model {cls.__name__}", cls, (), {}, *where)


def random_shape(draw: random.Random) -> BatchShape:
    """Draw a batch: decodes only, prompts only, both; sometimes with padding or swapping."""
    kind = draw.choice(("decodes", "decodes", "prompts", "both"))
    num_decodes = 0 if kind == "prompts" else draw.choice((1, 2, 64, draw.randint(1, 300)))
    contexts = [draw.choice((1, 16, draw.randint(1, 8_000))) for _ in range(num_decodes)]
    chunks: tuple[tuple[int, int], ...] = ()
    if kind != "decodes":
        chunks = tuple(
            (draw.choice((1, 16, draw.randint(1, 2048))), draw.choice((0, draw.randint(0, 4000))))
            for _ in range(draw.randint(1, 4))
        )
    padding_rows = draw.choice((0, 0, 3)) if num_decodes else 0
    return BatchShape(
        num_decodes,
        sum(contexts),
        max(contexts, default=0),
        chunks,
        padding_tokens=padding_rows,
        padding_context_tokens=padding_rows * 50,
        rows_sampled=num_decodes + len(chunks) + padding_rows,
        swapped_bytes=draw.choice((0, 0, 1 << 24)),
        num_running=num_decodes + len(chunks),
        num_waiting=draw.choice((0, 5)),
        decode_context_min_tokens=min(contexts, default=0),
        padding_rows=padding_rows,
    )


def _after(shape: BatchShape, steps: int) -> BatchShape:
    if not shape.num_decodes:
        return shape
    return replace(
        shape,
        decode_context_sum_tokens=shape.decode_context_sum_tokens + shape.num_decodes * steps,
        decode_context_max_tokens=shape.decode_context_max_tokens + steps,
        decode_context_min_tokens=shape.decode_context_min_tokens + steps,
    )


def takes_time(model: CostModel, shape: BatchShape, k: int) -> None:
    """Return one positive whole number of nanoseconds, as a Python int, for each step asked."""
    k = 1 if shape.chunks or shape.swapped_bytes else k
    times = model.step_ns(shape, k)
    require(isinstance(times, list), f"step_ns gives {type(times).__name__}, not a list")
    require(len(times) == k, f"step_ns gives {len(times)} times, not {k}")
    for time_ns in times:
        require(type(time_ns) is int, f"{time_ns!r} is {type(time_ns).__name__}, not int")
        require(time_ns > 0, f"a step takes {time_ns} ns")


def prices_many_steps_as_single_ones(model: CostModel, shape: BatchShape, k: int) -> None:
    """Give k steps of a decode batch at once to the bit what k calls of one step give."""
    shape = replace(shape, chunks=(), swapped_bytes=0)
    if shape.num_decodes:
        singly = [model.step_ns(_after(shape, j))[0] for j in range(k)]
        together = model.step_ns(shape, k)
        for j, (one, other) in enumerate(zip(singly, together, strict=True)):
            require(one == other, f"step {j} takes {one} ns alone and {other} ns among {k}")


def answers_alike(model: CostModel, shape: BatchShape, k: int) -> None:
    """Answer the same question the same way, also when others were asked between."""
    first = list(model.step_ns(shape))
    model.step_ns(BatchShape(3, 700, 300, rows_sampled=3, decode_context_min_tokens=100))
    again = list(model.step_ns(shape))
    require(first == again, f"the same step takes {first[0]} ns, then {again[0]} ns")


def hands_out_fresh_lists(model: CostModel, shape: BatchShape, k: int) -> None:
    """Give lists that the caller may change."""
    times = model.step_ns(shape)
    first = times[0]
    times[0] = -1
    require(model.step_ns(shape)[0] == first, "a caller that changes the list changes the model")


def describes_itself(model: CostModel, shape: BatchShape, k: int) -> None:
    """Describe itself in plain data that has a name, for the provenance of a result."""
    told = model.describe()
    require("name" in told, f"describe() has no name: {told}")
    json.dumps(told)


COST_MODEL_LAWS: dict[str, ShapeLaw] = {
    law.__name__: law
    for law in (
        takes_time, prices_many_steps_as_single_ones, answers_alike, hands_out_fresh_lists,
        describes_itself,
    )
}  # fmt: skip
"""The laws of cost models by name, in the order in which they are checked."""
