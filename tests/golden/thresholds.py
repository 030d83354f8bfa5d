"""Where single functions change their mind: each asked on both sides of its edge, and at it.

Runs seldom meet an edge exactly: memory that is just enough, a budget that is just spent, a row of
a table that is just large enough to be learnt from.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np

from schedlab.policies.past_future import PastFuture
from schedlab.policies.step_load import StepLoad
from schedlab.sim.cost.learning.fit import taught
from schedlab.sim.cost.learning.tables import Table
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.cost.table import TableCostModel
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.gpus import L2_BYTES, Gpu, gpu
from schedlab.sim.hardware.memory import MemoryBudget
from schedlab.sim.request import Request, RequestState
from schedlab.sim.speculation.drafters import NgramDrafter, blocks_beside
from tests.golden.combined import text_digest
from tests.golden.prices import MEASURED


def _around(*edges: float) -> list[int]:
    return sorted({max(int(edge) + by, 0) for edge in edges for by in (-1, 0, 1)})


def _grid(**axes: Any) -> dict[str, Any]:
    rows = np.array(list(product(*axes.values())), dtype=np.float64)
    return {**dict(zip(axes, rows.T, strict=True)), "us": np.arange(len(rows), dtype=np.float64)}


# -- which rows of a table kernels are learnt from -----------------------------------------------


def _tables(device: Gpu) -> dict[str, dict[str, Any]]:
    cold, quick = 1.2 * L2_BYTES[device.name], 3e-6 * device.memory_bytes_per_s
    busy = 20 * device.peak_flops_per_s("bf16") / 2e6
    return {
        "gemm bf16": _grid(m=(1, 8192, 8193), n=_around(1024, cold / 2048), k=_around(1024, 32768)),
        "gemm fp8": _grid(m=_around(busy / 2048**2), n=(2048,), k=(2048,)),
        "decode": _grid(
            rows=(1, 8, 1024, 1025), kv_heads=(8,), heads=(8, 128, 129),
            context=_around(cold / 4096, cold / (4096 * 8), quick / 4096, quick / (4096 * 8)),
        ),
        "decode of few heads": _grid(rows=(1,), kv_heads=(1, 2), heads=(3, 4, 16, 17, 33),
                                     context=(0,)),
        "prefill": _grid(new=(1, 2, 4096, 4097), rows=(1, 4), heads=(3, 4, 64, 65, 128),
                         kv_heads=(1, 4)),
        "mixed": _grid(rows=(1, 2), context=_around(100_000, 200_000), cached=(0, 8192, 8193)),
        "experts": _grid(tokens=(8192, 8193), slices=(8, 9), shares=(8, 9)),
        "all_reduce": _grid(bytes=_around(8192, 2**27)),
        "elementwise": _grid(bytes=_around(quick, cold)),
        "sampler": _grid(logits=(0, 1)),
    }  # fmt: skip


def learnt_from(_: str) -> dict[str, Any]:
    """List the rows that are learnt from, of tables whose rows are at the edges."""
    found = {}
    for device in (gpu("h100"), gpu("a100-80gb")):
        for name, columns in _tables(device).items():
            kind = name.partition(" of ")[0]
            for source in ("AIConfigurator", "LLMServingSim v2")[: 2 if "gemm" in kind else 1]:
                kept = taught(Table(device.name, kind, source, columns), device)
                found[f"{device.name} {name} {source}"] = " ".join(
                    str(int(row)) for row in kept["us"]
                )
    return found


# -- how much a step may compute in a time --------------------------------------------------------


def _state(number: int, computed: int, is_decoding: bool) -> Any:
    return SimpleNamespace(id=number, num_computed_tokens=computed, is_decoding=is_decoding)


def loads(_: str) -> dict[str, Any]:
    """Form batches by and by; what is asked of the cost model, and what fits each budget."""
    asked: list[str] = []

    def estimate_step_ns(shape: BatchShape, num_steps: int = 1) -> int:
        asked.append(f"{num_steps} {shape!r}")
        tokens = sum(q for q, _ in shape.chunks)
        contexts = shape.decode_context_max_tokens - shape.decode_context_min_tokens
        return 10 * tokens + 7 * shape.num_decodes + contexts + 5 * (num_steps - 1)

    view = SimpleNamespace(
        estimate_step_ns=estimate_step_ns, num_decodes=4, decode_contexts=lambda: (44, 30, 3)
    )
    decodes = [_state(i, computed, True) for i, computed in enumerate((8, 3, 30, 3))]
    prompts = [_state(9, 0, False), _state(10, 16, False)]
    found: dict[str, Any] = {}

    def tell(name: str, load: StepLoad) -> None:
        answers = [
            (
                load.is_empty, load.is_within(ns), load.decodes_within(decodes, ns),
                load.chunk_within(prompts[1], 9, ns), load.steps_within(ns),
            )
            for ns in (0, 27, 28, 29, 61, 62, 90, 210, 2**63)
        ]  # fmt: skip
        found[name] = [*map(repr, answers), len(asked), text_digest(asked)]
        asked.clear()

    one = StepLoad(view)  # type: ignore[arg-type]
    tell("empty", one)
    for number, state in enumerate((decodes[0], prompts[0], decodes[1], decodes[2])):
        one.add(state, 1 + number)
        tell(f"{number + 1} added", one)
    tell("some decodes", StepLoad(view).with_decodes(decodes[:3]))  # type: ignore[arg-type]
    tell("all decodes", StepLoad(view).with_decodes(decodes))  # type: ignore[arg-type]
    tell("more decodes", one.with_decodes(decodes[3:]))
    tell("no more", one.with_decodes([]))
    return found


# -- what just fits -----------------------------------------------------------------------------


def futures(_: str) -> dict[str, Any]:
    """Count whom `past_future` lets in, by how much memory there is."""
    found = {}
    for name, past, lengths in (
        ("short past", [4.0, 4.0], ((9, 0), (5, 2))),
        ("long past", [20.0, 20.0], ((9, 3), (5, 4))),
        ("nobody runs", [4.0], ()),
    ):
        policy = PastFuture(reserved=0.0, samples=2)
        policy._sorted_past = np.array(past)
        running = []
        for number, (prompt, done) in enumerate(lengths):
            state = RequestState(Request(number, 0, prompt, 10))
            state._generated = done
            running.append(state)
        waiting = [RequestState(Request(9 + i, i, 6 + i, 10)) for i in range(4)]
        for reserved in (0.0, 0.25):
            policy.reserved = reserved
            counts = []
            for capacity in range(20, 110):
                view = SimpleNamespace(
                    running=running, waiting=waiting, capacity_tokens=capacity,
                    config=SimpleNamespace(max_model_len=30, block_size=4),
                )  # fmt: skip
                counts.append(len(list(policy.candidates(view, None))))  # type: ignore[arg-type]
            steps = [
                f"{20 + at}:{n}" for at, n in enumerate(counts) if not at or n != counts[at - 1]
            ]
            found[f"{name}, {reserved}"] = " ".join(steps)
    return found


def rooms(_: str) -> dict[str, Any]:
    """Count the blocks beside a draft model, down to none."""
    found = {}
    for per_token, weights in ((0, 0), (3, 0), (3, 100)):
        drafter: Any = replace(NgramDrafter(0.0))
        drafter = SimpleNamespace(kv_bytes_per_token=per_token, weight_bytes=weights)
        rooms = []
        for kv_bytes in (111, 112, 113, 211, 212, 223, 224):
            budget = MemoryBudget(0, 0, 0, kv_bytes, 4 + 3 * (per_token == 0), 16)
            try:
                rooms.append(str(blocks_beside(drafter, budget)))
            except SpecError as error:
                rooms.append(str(error))
        found[f"{per_token} {weights}"] = " ".join(rooms)
    return found


def padded(_: str) -> dict[str, Any]:
    """Price steps of tables that decode little or nothing, padding among them."""
    model = MEASURED["table"]
    assert isinstance(model, TableCostModel)
    shapes = {
        "padding": BatchShape(0, 0, 0, padding_tokens=5, rows_sampled=1),
        "padding of a context": BatchShape(0, 0, 0, padding_tokens=5, padding_context_tokens=9),
        "one token of a prompt": BatchShape(0, 0, 0, ((1, 7),)),
        "three of them": BatchShape(0, 0, 0, ((1, 7), (1, 90), (1, 3))),
        "beside a prompt": BatchShape(0, 0, 0, ((1, 7), (30, 2), (1, 90))),
        "beside decodes": BatchShape(2, 100, 60, ((1, 7), (1, 90)), decode_context_min_tokens=40),
        "beside both": BatchShape(2, 100, 60, ((1, 70), (16, 0)), decode_context_min_tokens=40),
    }
    return {
        name: [model.step_ns(shape), model.step_ns(shape, 3) if not shape.chunks else None,
               {key: list(span) for key, span in model.outside(shape).items()}]
        for name, shape in shapes.items()
    }  # fmt: skip


CASES: dict[str, tuple[Callable[[str], dict[str, Any]], str]] = {
    f"edges {of.__name__}": (of, "") for of in (learnt_from, loads, futures, rooms, padded)
}
