"""What arithmetic gives for drawn numbers: distributions, predictors, kernels, metrics.

As in `parts`, inputs meet thresholds and each other; metrics are those of `combined` runs, whole
and in a window that cuts through their requests and steps.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from schedlab.policies.continuum import SessionsOver, best_ttl_ns
from schedlab.policies.gittins import gittins_rank, kaplan_meier
from schedlab.policies.nested_wait import NestedWait
from schedlab.policies.past_future import PastFuture
from schedlab.policies.predictors import bert_errors, text_features
from schedlab.policies.predictors.forest import Forest
from schedlab.policies.predictors.serving_time import ServingTime
from schedlab.policies.predictors.text_model import TextModel
from schedlab.policies.queued_batches import QueuedBatch, QueuedBatches
from schedlab.policies.segments import Segment
from schedlab.policies.step_load import _most
from schedlab.policies.wait import Wait
from schedlab.sim.cost.efficiency import efficiency_of
from schedlab.sim.cost.learning import predict
from schedlab.sim.cost.limits import least_step_s
from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.errors import SchedlabError
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.metrics.registry import metric_named
from schedlab.sim.metrics.window import Window, measured_window
from schedlab.sim.record.copies import TierFacts
from schedlab.sim.record.fleet import EngineFacts
from schedlab.sim.request import Request, RequestState, Status
from schedlab.sim.result import RunResult
from tests.golden import combined
from tests.golden.prices import DEPLOYMENTS, MEASURED, SHAPES
from tests.traced import wasted_tokens

Draw = random.Random


def _quarters(draw: Draw, most: int) -> float:
    return draw.randrange(4 * most) / 4


# -- policies' own arithmetic --------------------------------------------------------------------


def lengths(_: str) -> dict[str, Any]:
    """Estimate distributions of lengths, ranks, times to live and remaining answers."""
    found: dict[str, Any] = {}
    for number in range(12):
        draw = Draw(f"answers {number}")
        ended = [float(draw.randrange(1, 9)) for _ in range(draw.randrange(1, 12))]
        under_way = [float(draw.randrange(0, 10)) for _ in range(draw.randrange(6))]
        known = kaplan_meier(ended, under_way)
        stops = np.arange(2.0, 12.0, 2.0)
        ranks = [gittins_rank(known.lengths, known.chances, s, stops) for s in (0.0, 3.0, 8.0)]
        past_ns = sorted(draw.choice((0, 4, 4, 9, 30)) for _ in range(6))
        ttls = [best_ttl_ns(past_ns, saved_ns) for saved_ns in (0, 3, 8, 9, 40)]
        over = SessionsOver()
        for _ in range(number):
            over.add(draw.choice((1, 2, 2, 9)))
        found[str(number)] = [
            known.lengths.tolist(), known.chances.tolist(), [str(rank) for rank in ranks], ttls,
            over.memoryfulness(),
        ]  # fmt: skip
    policy = PastFuture()
    view = SimpleNamespace(config=SimpleNamespace(max_model_len=50, block_size=4))
    states = []
    for i, (done, most) in enumerate(((0, 9), (3, 9), (5, 40), (9, 40), (12, 12), (20, 30))):
        state = RequestState(Request(i, 0, 20, most))
        state._generated = done
        states.append(state)
    at = np.array([[0.0, 0.25, 0.5, 0.75, 0.99, 0.3], [0.99, 0.5, 0.0, 0.6, 0.2, 0.9]])
    for past in ([], [4.0], [3.0, 5.0, 5.0, 9.0, 30.0]):
        left = policy._draw_remaining(states, view, np.array(past), at)
        found[f"remaining {past}"] = left.tolist()
    for limit in range(7):
        found[f"most {limit}"] = [_most(limit, lambda n: n, k) for k in range(-1, 8)]
    return found


def batches(_: str) -> dict[str, Any]:
    """Queue batches, more of them than there are rows at first; waste and response ratios."""
    draw, queued, found = Draw("batches"), QueuedBatches(), {}
    states = []
    for number in range(150):
        prompt, predicted = draw.choice((4, 4, 9, 20)), float(draw.choice((1, 5, 5, 12)))
        state = RequestState(
            Request(number, draw.randrange(40), prompt, 99, predicted_tokens=predicted)
        )
        states.append(state)
        limit = draw.choice((10.0, 40.0, 300.0))
        batch = queued.least_waste(state, draw.choice((2, 4)), 130, limit)
        if batch is None:
            batch = QueuedBatch(state)
            queued.open(batch)
        queued.add(batch, state)
        if number % 5 == 4:
            ratio = queued.highest_response_ratio(
                100 + number, lambda size, longest, last: size + longest + 2.0 * last
            )
            assert ratio is not None
            found[str(number)] = [ratio[0], [s.id for s in ratio[1].waiting()], len(batch.members)]
        if number % 17 == 16:
            gone = draw.choice(states)
            if gone.status is Status.WAITING and gone.first_scheduled_ns < 0:
                gone.status, gone.first_scheduled_ns = Status.RUNNING, 1
                for one in list(queued._batches):
                    queued.note_started(one)
    waste = wasted_tokens(queued, states[0])
    return found | {"waste": waste[:20], "rows": len(waste)}


def bookings(_: str) -> dict[str, Any]:
    """Share out places by kinds of answers; who goes on at a stage where too many stand."""
    found: dict[str, Any] = {}
    for number in range(10):
        draw = Draw(f"bookings {number}")
        edges = sorted(draw.sample(range(2, 40, 3), 3))
        rates = draw.choice((None, [1.0, 0.5, 2.0]))
        limit = draw.choice((1, 5, 12, 40))
        nested = NestedWait(edges, rates, limit)
        for length in (1, edges[0], edges[0] + 1, edges[-1], edges[-1] + 5):
            state = RequestState(Request(0, 0, 1, 1))
            state._generated, state.last_token_ns = length, 0
            nested.on_finish(state, 0)
        plain = Wait(edges, rates, limit)
        plain._arrived = [draw.randrange(4) for _ in edges]
        running = [draw.randrange(3) for _ in edges]
        segment, stages = Segment(), [draw.randrange(3) for _ in range(9)]
        for stage in (2, 1, 0):
            there: list[Any] = [i for i, one in enumerate(stages) if one == stage]
            segment.put(there, stage)
        ended = [count - after for count, after in pairwise((*nested._num_came, 0))]
        found[str(number)] = [
            nested._limits, ended, plain._places(running),
            sorted({*segment.inside()} - {*segment.beyond(draw.choice((1, 2, 3)))}, key=int),  # type: ignore[call-overload]
        ]  # fmt: skip
    return found


# -- predictors ----------------------------------------------------------------------------------

TEXTS = (
    "", "Hi", "What is 2+2?\nAnd $x$?", "Écrivez UN poème, s'il vous plaît...", "word " * 9,
    "a1b22 C_d\\frac{1}{2}\n\n", "extraordinary extraordinarily EXTRA",
)  # fmt: skip


def texts(_: str) -> dict[str, Any]:
    """Count what texts hold; sum bags of their words; walk trees; read scores as lengths."""
    grams = [text_features.hashed_ngrams(text, 61) for text in TEXTS]
    rarity = text_features.rarities(grams, 61)
    rarity3 = text_features.rarities(grams, 61, least=3)
    bags = text_features.bags(grams, rarity)
    table = (np.arange(61 * 3).reshape(61, 3) % 11).astype(np.float32)
    rows = np.array([5, 0, 2, 2])
    forest = Forest([], {
        "roots": np.array([0, 3]), "feature": np.array([0, -1, -1, 1, -1, -1]),
        "threshold": np.array([2.0, 0, 0, 5.0, 0, 0]), "left": np.array([1, 0, 0, 4, 0, 0]),
        "right": np.array([2, 0, 0, 5, 0, 0]), "value": np.array([0, 10.0, 20, 0, 4.0, 8.0]),
    })  # fmt: skip
    columns = np.array([[2.0, 5.0], [2.5, 5.0], [1.0, 5.5], [3.0, 9.0]], dtype=np.float32)
    scores = np.array([[-2.0, 1], [0.0, 3], [0.5, 0.5], [3.0, 2]])
    arrays = {
        "score_quantiles": np.array([-1.0, 0, 1]), "length_quantiles": np.array([5.0, 9, 40]),
        "bucket_tokens": np.array([7, 70]),
    }  # fmt: skip
    seen = np.array([[1.0, 2, 3], [2, 2, 3], [4, 1, 0], [0, 0, 0]])
    times = ServingTime(seen, np.array([1.0, 0.5, 2]), np.array([1.0, 2, 5, 9]), 2)
    return {
        **{f"counts {i}": text_features.counts(text) for i, text in enumerate(TEXTS)},
        **{f"grams {i}": one.tolist() for i, one in enumerate(grams)},
        "rarity": [float(rarity.sum()), float(rarity3.sum()), int((rarity3 > 0).sum())],
        "sums": [_floats(bags.sums(table)), _floats(bags.take(rows).sums(table))],
        "trees": forest.trees(columns).tolist(),
        **{
            kind: TextModel(kind, "hashed", arrays)._lengths(scores).tolist()
            for kind in ("pointwise", "buckets", "listmle")
        },
        "serving": [times.estimate_s(2, 9, 15.0), times.estimate_s(1, 0, 0.0),
                    ServingTime(seen, np.ones(3), np.arange(4.0), 9).estimate_s(1, 5, 5.0)],
        "medians": _floats(bert_errors._class_medians(
            np.array(bert_errors.PREDICTIONS), np.arange(1.0, 31.0)
        )),
    }  # fmt: skip


def _floats(values: Any) -> list[str]:
    """Return numbers to five digits: single precision has seven."""
    return [f"{value:.5g}" for value in np.asarray(values, dtype=np.float64).ravel().tolist()]


# -- costs ---------------------------------------------------------------------------------------

_TABLE = {
    "m": (1, 64, 65, 128, 300), "n": (1024, 1500, 4096, 129, 6144), "k": (1024, 64, 512, 900, 77),
    "rows": (1, 3, 16, 64, 200), "context": (0, 1, 100, 900, 5000), "new": (1, 64, 65, 128, 500),
    "cached": (0, 10, 64, 0, 3000), "heads": (4, 8, 32, 32, 64), "kv_heads": (1, 8, 8, 4, 8),
    "bytes": (10, 8192, 1e6, 1e8, 3e9), "logits": (1000, 32000, 1e6, 5e6, 1e7),
    "tokens": (1, 2, 8, 64, 900), "top": (1, 2, 2, 8, 4), "experts": (8, 8, 8, 128, 60),
    "even": (0, 1, 0, 1, 0), "width": (64, 1024, 777, 768, 14336), "slices": (1, 2, 1, 4, 8),
    "shares": (1, 1, 2, 4, 8), "hidden": (512, 1024, 4096, 2048, 100), "devices": (2, 3, 4, 8, 8),
    "us": (1, 2, 3, 4, 5),
}  # fmt: skip


def kernels(_: str) -> dict[str, Any]:
    """Predict kernels' times on rows at the edges of tiles, ramps and devices."""
    table = {key: np.array(values, dtype=np.float64) for key, values in _TABLE.items()}
    found = {}
    for device in (gpu("h100"), gpu("a100-80gb")):
        learnt = efficiency_of(device)
        shares = learnt.with_shares(0.5, 0.25)
        for section in ("elementwise", "sampler", "experts", "all_reduce"):
            told = predict.PREDICT[section](getattr(learnt, section), table, device)
            found[f"{device.name} {section}"] = told.tolist()
        for kind in ("decode", "prefill", "mixed"):
            told = predict.PREDICT[kind](learnt.attention, table, device)
            found[f"{device.name} {kind}"] = told.tolist()
        found[f"{device.name} launch"] = predict.launch_us(learnt.host, table, device).tolist()
        for formats in ("bf16", "fp8" if device.name == "h100-80gb" else "int8", "bf16/int4"):
            told = predict.gemm_us(learnt.gemm_of(*_formats(formats)), table, device, formats)
            found[f"{device.name} gemm {formats}"] = told.tolist()
        found[f"{device.name} shares"] = repr((shares.attention, shares.experts, shares.all_reduce))
    return found


def _formats(formats: str) -> tuple[str, str]:
    dtype, _, stored = formats.partition("/")
    return dtype, stored or dtype


def counted(_: str) -> dict[str, Any]:
    """Count steps outside of what was measured; overheads; the least time a device needs."""
    found: dict[str, Any] = {}
    for name in ("fitted", "table"):
        pricing = Pricing(MEASURED[name], SchedulingOverhead(1e-6, 2e-7, 3e-8, 4e-6, 5e-5))
        for label, shape in SHAPES.items():
            if shape.swapped_bytes:
                continue
            many = 1 if shape.chunks else 30
            pricing._has_warned = True
            pricing.carried_out(shape, many)
            pricing.cut(shape, many, many // 2)
            if many == 1:
                pricing.meet(shape, replace(shape, gathered_tokens=500))
            elif label != "many":
                pricing.take_back(shape)
            found[f"{name} {label}"] = [
                pricing.extrapolated_steps, dict(sorted(pricing.extrapolated_by_feature.items())),
                pricing.overhead_ns(shape), pricing.estimate_ns(shape, many),
            ]  # fmt: skip
    steps = {
        "num_decodes": np.array([0, 1, 64, 3]), "prefill_tokens": np.array([0, 0, 5000, 1]),
        "decode_context_sum_tokens": np.array([0, 900, 70_000, 3]),
    }  # fmt: skip
    for name, deployment in DEPLOYMENTS.items():
        found[f"least {name}"] = least_step_s(steps, deployment).tolist()
    return found


# -- metrics: every one of them, of windows and classes -------------------------------------------

_OTHERS = (
    "jain_fairness(column=tenant)", "service_gap",
    "stall_free_goodput(ttft_ms=0.01, stall_ms=0.002)", "deadline_misses",
    "queue_growth", "longest_wait", "mean_max_waiting", "kv_waste",
    "slot_utilization(slots=4)", "preempted_share", "preemption_loss_at_tail",
    "preemption_loss_at_tail(latency=e2el)", "finished_within(seconds=0.00002)",
    "tokens_within(seconds=0.00002)", "time_to_finish(num_requests=5)",
    "explained_by_lengths(latency=e2el)", "largest(latency=itl)", "worst_ratio(latency=ttft)",
    "tail_ratio(latency=tpot)", "mean_tokens_per_step", "mean_acceptance_length",
    "draft_acceptance_share", "wasted_draft_tokens",
    "of_class(metric=mean_ttft_ms, column=prompt_tokens, low=4, high=16)",
    "of_class(metric=p99_itl_ms, column=tenant, value=a)",
    "of_class(metric=output_throughput, column=tenant, value=b)",
)  # fmt: skip
RUNS = {"fcfs": 2, "srtf": 5, "sarathi": 7, "vtc": 0}
FLEETS = (3, 17, 28, 60)


def measured(case: str) -> dict[str, Any]:
    """Measure a combined run as a whole, and in a window that cuts through requests and steps."""
    kind, _, which = case.partition(" ")
    engines: tuple[EngineFacts, ...] = ()
    facts: tuple[TierFacts, ...] = ()
    copies: dict[str, Any] = {}
    if kind == "fleet":
        fleet = combined.drawn_fleet(int(which))
        log, work = fleet.run(), fleet.workload
        engines = tuple(
            EngineFacts(f"pool {place.pool}", "h100", "fcfs", "mixed", 1 + i, 80 + 20 * (i % 2),
                        2.0 + i, place.paid, place.served)
            for i, place in enumerate(log.places)
        )  # fmt: skip
    else:
        log, work = combined.drawn_run(which, RUNS[which])
        table = log.copies.columns()
        if len(table["id"]):
            facts = (TierFacts("cpu", 7, 100, 4), TierFacts("disk", 30, 100, 4),
                     TierFacts("net", 30, 100, 4))  # fmt: skip
            copies = {"copies": table, "copy_waits": log.copies.wait_columns()}
    requests = dict(log.requests())
    tenants = {a.request.id: a.request.tenant or "none" for a in work}
    names = np.array([tenants[i] for i in requests["id"].tolist()])
    requests["tenant"] = np.where(names == "c", "b", names)
    result = RunResult(
        case, "fcfs", requests, log, 100, num_engines=max(len(engines), 1), engines=engines,
        tiers=facts, **copies,
    )  # fmt: skip
    found: dict[str, Any] = {}
    for label in ("whole", "window"):
        values = found[label] = {}
        for name in (*result.metrics(), *_OTHERS):
            try:
                values[name] = metric_named(name).of(result.observation())
            except SchedlabError as error:  # which of them are refused is kept as well
                values[name] = type(error).__name__
        arrivals = np.sort(requests["arrival_ns"])
        result.window = Window(int(arrivals[2]), int(arrivals[-3]))
        result._metrics = None
    return found


def windows(_: str) -> dict[str, Any]:
    """Cut the ends off runs, some of which end before what is left would begin."""
    found = {}
    for number in range(12):
        draw = Draw(f"windows {number}")
        arrival_ns = np.sort([draw.randrange(0, 9_000, 1_000) for _ in range(6)])
        took_ns = [draw.choice((1_000, 2_500, -1)) for _ in range(6)]
        finish_ns = [a + t if t > 0 else -1 for a, t in zip(arrival_ns, took_ns, strict=True)]
        requests = {"arrival_ns": arrival_ns, "finish_ns": np.array(finish_ns)}
        cuts: list[Any] = []
        for knobs in (
            {}, {"warm_up_requests": 2}, {"warm_up_s": 2e-6}, {"cool_down_s": 1e-6},
            {"warm_up_requests": 5}, {"warm_up_s": 1e-6, "cool_down_s": 2e-6},
        ):  # fmt: skip
            try:
                window = measured_window(requests, **knobs)
                held = window.holds(requests["arrival_ns"])
                cuts.append([*window, window.duration_s, int(held.sum())])
            except SchedlabError as error:
                cuts.append(str(error))
        found[str(number)] = cuts
    return found


CASES: dict[str, tuple[Callable[[str], dict[str, Any]], str]] = {
    **{
        f"parts {of.__name__}": (of, "")
        for of in (lengths, batches, bookings, texts, kernels, counted, windows)
    },
    **{f"parts measured {name}": (measured, f"run {name}") for name in RUNS},
    **{f"parts measured fleet {number}": (measured, f"fleet {number}") for number in FLEETS},
}
