"""Where single functions change their mind: each asked on both sides of its edge, and at it.

Runs seldom meet an edge exactly: memory that is just enough, a budget that is just spent, a row of
a table that is just large enough to be learnt from.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from inspect import signature
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import numpy as np

from schedlab.policies import registry as policies
from schedlab.policies.autoscalers import registry as autoscalers
from schedlab.policies.migrators import registry as migrators
from schedlab.policies.past_future import PastFuture
from schedlab.policies.predictors import registry as predictors
from schedlab.policies.routers import registry as routers
from schedlab.policies.speculation import registry as draft_lengths
from schedlab.sim.cost.efficiency import efficiency_of
from schedlab.sim.cost.learning.fit import MOST_ROWS, taught
from schedlab.sim.cost.learning.predict import PREDICT
from schedlab.sim.cost.learning.tables import Table
from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.cost.roofline import RooflineCostModel
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.cost.step_spread import StepSpread
from schedlab.sim.cost.table import TableCostModel, TableReading
from schedlab.sim.drive.frontend import Frontend
from schedlab.sim.errors import SchedlabError, SpecError
from schedlab.sim.hardware.gpus import L2_BYTES, Gpu, gpu
from schedlab.sim.hardware.memory import MemoryBudget
from schedlab.sim.hardware.models import model
from schedlab.sim.request import Request, RequestState
from schedlab.sim.speculation.drafters import ModelDrafter, NgramDrafter, blocks_beside
from schedlab.traces.arrivals import PROCESSES, process
from schedlab.traces.durations import DURATIONS
from schedlab.traces.lengths import LENGTHS, MOST_TOKENS
from schedlab.traces.prefix_hashes import PrefixHashes
from tests.golden import combined, prices, told
from tests.golden.combined import text_digest
from tests.golden.prices import DEPLOYMENTS, MEASURED
from tests.policy_cases import PARAMS


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


def read_bound(_: str) -> dict[str, Any]:
    """Predict kernels that wait for memory alone, and say which rows of many are learnt from."""
    long = _grid(new=(1, 2), cached=(90_000, 200_001), rows=(1, 3), heads=(32,), kv_heads=(8, 32))
    many = _grid(logits=range(MOST_ROWS + 3))
    found: dict[str, Any] = {}
    for device in (gpu("h100"), gpu("a100-80gb")):
        attention = efficiency_of(device).attention
        found[f"{device.name} prefill"] = PREDICT["prefill"](attention, long, device).tolist()
        columns = {**long, "context": long["cached"]}
        found[f"{device.name} decode"] = PREDICT["decode"](attention, columns, device).tolist()
        kept = taught(Table(device.name, "all_reduce", "", {**many, "bytes": many["us"] + 8192}),
                      device)["us"]  # fmt: skip
        found[f"{device.name} learnt"] = [len(kept), float(kept.sum()), kept[:3].tolist()]
    return found


# -- what just fits -----------------------------------------------------------------------------


def futures(_: str) -> dict[str, Any]:
    """Count whom `past_future` lets in, by how much memory there is."""
    found = {}
    builder = SimpleNamespace(undeferred=list)
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
                    residents=running, waiting=waiting, capacity_tokens=capacity,
                    config=SimpleNamespace(max_model_len=30, block_size=4),
                )  # fmt: skip
                counts.append(len(list(policy.candidates(view, builder))))  # type: ignore[arg-type]
            steps = [
                f"{20 + at}:{n}" for at, n in enumerate(counts) if not at or n != counts[at - 1]
            ]
            found[f"{name}, {reserved}"] = " ".join(steps)
    return found


def rooms(_: str) -> dict[str, Any]:
    """Count the blocks beside a draft model, down to none."""
    found = {}
    cost = RooflineCostModel(DEPLOYMENTS["dense"])
    for drafter, per_token in (
        (NgramDrafter(0.0), 7), (ModelDrafter(cost, 0, 3, 3), 4),
        (ModelDrafter(cost, 100, 3, 3), 4),
    ):  # fmt: skip
        counts = []
        for kv_bytes in (111, 112, 113, 211, 212, 223, 224):
            budget = MemoryBudget(0, 0, 0, kv_bytes, per_token, 16)
            try:
                counts.append(blocks_beside(drafter, budget))
            except SpecError:
                counts.append(0)
        found[f"{type(drafter).__name__} of {drafter.weight_bytes}"] = counts
    return found


def padded(_: str) -> dict[str, Any]:
    """Price steps of tables that decode little or nothing, padding among them."""
    table = MEASURED["table"]
    assert isinstance(table, TableCostModel)
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
        name: [table.step_ns(shape), table.step_ns(shape, 3) if not shape.chunks else None,
               {key: list(span) for key, span in table.outside(shape).items()}]
        for name, shape in shapes.items()
    }  # fmt: skip


# -- which values of a knob are refused ---------------------------------------------------------

_TRIED = (-1, 0, 1, 2, -0.5, 0.0, 1e-9, 0.5, 1.0, 1.5, 1e12, float("inf"), float("nan"), None)
_LISTS = ([], [0], [1], [1, 1], [1, 2], [2, 1], [1.0, 0.0], [-1, 2], [[1, 1], [2, 0]],
          [[2, 1], [1, 1]])  # fmt: skip
_REGISTRIES: dict[str, tuple[Any, dict[str, dict[str, Any]]]] = {
    "policies": (policies, PARAMS),
    "routers": (routers, {}),
    "autoscalers": (autoscalers, dict(combined.AUTOSCALERS)),
    "migrators": (migrators, {}),
    "draft lengths": (draft_lengths, {"by_batch_size": {"schedule": [[2, 2], [4, 1]]}}),
    "predictors": (predictors, {}),
}


def knobs(kind: str) -> dict[str, Any]:
    """Set every knob to numbers and lists, then every two to one; which values are refused.

    And whether what is accepted is what is stored.
    """
    registry, given = _REGISTRIES[kind]
    found: dict[str, Any] = {}

    def answer(name: str, **tried: Any) -> str:
        knobs = {**given.get(name, {}), **tried}
        try:
            made = registry.make(name, **knobs)
        except (SchedlabError, ValueError):
            return "x"
        except (TypeError, AttributeError):
            return "T"
        stored = getattr(made, "get_params", dict)()
        kept = all(repr(stored.get(key, value)) == repr(value) for key, value in knobs.items())
        return "." if kept else "o"

    for name in registry.names():
        if name == "trained":  # reads a folder
            continue
        cls = getattr(registry, f"{kind.replace(' ', '_')[:-1].replace('policie', 'policy')}_class")
        names = [key for key in cls(name).knobs() if key not in ("inner", "predictor")]
        for knob in names:
            marks = [
                "".join(answer(name, **{knob: value}) for value in values)
                for values in (_TRIED, _LISTS)
            ]
            found[f"{name} {knob}"] = " ".join(marks)
        pairs = [answer(name, **{a: 1, b: 1}) for a, b in combinations(names, 2)]
        found[f"{name} two"] = "".join(pairs)
    return found


_TIERED = told.LIMITS["tiers"]
_SIMPLE: dict[str, Any] = {
    "limits": told.LIMITS["mixed"],
    "limits of whole prompts": told.LIMITS["whole prompts"],
    "limits of ranges": told.LIMITS["contiguous"],
    "limits with tiers": _TIERED,
    "limits with a connector": told.LIMITS["connector"],
    "limits ahead": told.LIMITS["overrun"],
    "limits with drafts": told.LIMITS["drafts"],
    "limits of a pipeline": told.LIMITS["pipeline"],
    "tier": _TIERED.kv_tiers[0],
    "overhead": SchedulingOverhead(),
    "reading": TableReading(),
    "fit": prices._FIT,
    "fit, eager": prices._FIT.eager,
    "fit, graph": prices._FIT.graph,
    "fit, error": prices._FIT.train,
    "fit, level": prices._FIT.run_level,
    "spread": StepSpread((1.0,), (0.5, 1.5)),
    "curve": prices._TABLE.by_tokens[0],
    "ring": prices._TABLE.all_reduce,
    "table": prices._TABLE,
    "front end": Frontend(),
    "model": model("llama-3-8b"),
    "model with experts": model("glm-4.5-air"),
    "device": gpu("h100"),
    "hashes": PrefixHashes.from_rows([(1, 2), (), (3,)], 16),
}
_CPU, _DISK = _TIERED.kv_tiers
_OF_TYPE: dict[type, tuple[Any, ...]] = {
    bool: (True, False),
    int: (-1, 0, 1, 2, 4, 13, 14, 15, 33, 34, 60, 99, 100, 101, 136, 254, 255, 10**12),
    float: (-0.5, 0.0, 1e-9, 0.5, 1.0, 1.5, 2.0, 1e12, float("inf"), float("nan")),
    str: ("recompute", "swap", "paged", "contiguous_max", "bf16", "int4"),
    tuple: (
        (), (1.0,), (1, 2), (2, 1), (1, 1), (0, 1), (1.0, float("inf")), (-1.0, 3.0),
        (0.9995, 1.0), (0.997, 1.0), (1, 2, 3), (1, 1, 2), (0, 1, 2), (1.0, 2.0, float("nan")),
    ),
    dict: (
        {}, {"new_tokens": (1, 2)}, {"new_tokens": (2, 1)}, {"new_tokens": (2, 2)},
        {"num_decodes": (1, 2)}, {"new_tokens": (1, 2), "no_feature": (1, 2)},
        {"num_decodes": 0.0}, {"num_decodes": -1.0}, {"no_feature": 1.0},
    ),
}  # fmt: skip
_OF_NAME: dict[str, tuple[Any, ...]] = {
    "cudagraph_capture_sizes": ((), (1,), (0,), (0, 1), (1, 2), (1, 1), (2, 1), (1, 2, 2)),
    "kv_tiers": (
        (), (_CPU,), (_DISK,), (_CPU, _CPU), (replace(_CPU, is_shared=True),),
        (_CPU, replace(_DISK, is_shared=True)), (_CPU, replace(_DISK, is_shared=True), _DISK),
        (replace(_CPU, num_blocks=13),),
    ),
}  # fmt: skip


def fields_of(_: str) -> dict[str, Any]:
    """Set every field of what is given to other values of its type; which are refused."""
    found = {}
    for name, given in _SIMPLE.items():
        for field in fields(given):
            now = getattr(given, field.name)
            kind = int if now is None else type(now)
            tried = _OF_NAME.get(field.name, _OF_TYPE.get(kind, ()))
            if not field.init or not tried:
                continue
            marks = ""
            for value in tried:
                try:
                    replace(given, **{field.name: value})
                    marks += "."
                except (SchedlabError, ValueError):
                    marks += "x"
                except TypeError:
                    marks += "T"
            if marks.strip("."):
                found[f"{name}: {field.name}"] = marks
    return found


# -- distributions, at the ends of what they take and give --------------------------------------

_DRAWN: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "lengths": (
        LENGTHS,
        {
            "fixed": {"tokens": 9},
            "uniform": {"low": 3, "high": 9},
            "exponential": {"mean": 7.5, "cap": 20},
            "lognormal": {"mu": 2.0, "sigma": 0.5, "cap": 20},
            "gamma": {"shape": 2.0, "scale": 3.0},
            "quantile_table": {"probabilities": [0.0, 0.5, 1.0], "tokens": [1.0, 4.0, 9.0]},
        },
    ),
    "durations": (
        DURATIONS,
        {
            "fixed": {"seconds": 1.5},
            "uniform": {"low_s": 0.5, "high_s": 1.5},
            "exponential": {"mean_s": 2.0, "cap_s": 3.0},
            "lognormal": {"median_s": 2.0, "sigma": 0.5, "cap_s": 3.0},
        },
    ),
    "arrivals": (
        PROCESSES,
        {
            "gamma": {"rate": 3.0, "burstiness": 0.5},
            "linear_ramp": {"start_rate": 1.0, "end_rate": 9.0, "num_requests": 4},
            "on_off": {"rate": 5.0, "mean_on_s": 0.5, "mean_off_s": 0.3},
            "varying": {"rate": 4.0, "sigma": 0.3, "timescale_s": 0.5},
            "constant": {"rate": 4.0},
            "all_at_once": {},
            "poisson": {"rate": 4.0},
        },
    ),
}
_CHANGING = ("on_off", "varying")
_VALUES: tuple[float, ...] = (
    -1, 0, 1, 2, 9, 10, 0.5, 1.5, 1e9, 1.1e9, MOST_TOKENS, MOST_TOKENS + 1, 1e12, 1.1e12,
    float("inf"), float("nan"),
)  # fmt: skip
_PLACES = np.array([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999, 1.0])


def distributions(kind: str) -> dict[str, Any]:
    """Draw from each, with every parameter at the ends of its range; which are refused."""
    made, given = _DRAWN[kind]
    found: dict[str, Any] = {}

    def drawn(name: str, **parameters: Any) -> str:
        try:
            if kind == "arrivals":
                one = process(name, seed=3, **parameters)
                values = np.concatenate([one(n) for n in (3, 0, 1, 4)]) / 1e9
            else:
                values = made[name](**parameters)(_PLACES)
        except SchedlabError:
            return "x"
        # What comes of huge numbers hangs on the last digits of special functions.
        huge = any(isinstance(v, int | float) and v > 100 for v in parameters.values())
        return "." if huge else text_digest([f"{value:.6g}" for value in values.tolist()])[:6]

    for name in made:
        if kind == "arrivals":
            parameters = [key for key in signature(made[name]).parameters if key != "seed"]
        else:
            parameters = list(signature(made[name]).parameters)
        base = given[name]
        found[name] = drawn(name, **base)
        for key in parameters:
            if not isinstance(base.get(key), list):
                # Rates that change too often or too seldom take long to be refused.
                values = (
                    [*_VALUES[:4], *_VALUES[6:8], *_VALUES[-2:]] if name in _CHANGING else _VALUES
                )
                tried = [drawn(name, **{**base, key: value}) for value in values]
                found[f"{name} {key}"] = " ".join(tried)
    return found


CASES: dict[str, tuple[Callable[[str], dict[str, Any]], str]] = {
    **{
        f"edges {of.__name__}": (of, "")
        for of in (learnt_from, read_bound, futures, rooms, padded, fields_of)
    },
    **{f"edges of {kind}": (distributions, kind) for kind in _DRAWN},
    **{f"edges knobs of {kind}": (knobs, kind) for kind in _REGISTRIES},
}
