"""What single parts return for drawn inputs full of equals, thresholds met exactly, and odd ends.

A whole run seldom gets there: two engines as full as each other, a mean that is the threshold, the
second of several, the last token that a model may hold. Inputs are small integers and quarters, so
that such things happen all the time and no sum is rounded.
"""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from schedlab.policies.autoscalers import registry as autoscalers
from schedlab.policies.continuum import Continuum
from schedlab.policies.future_memory import FuturePeak, declared_blocks
from schedlab.policies.gittins import gittins_rank, kaplan_meier
from schedlab.policies.migrators import registry as migrators
from schedlab.policies.nested_wait import NestedWait, _at_most
from schedlab.policies.past_future import PastFuture
from schedlab.policies.predictors import bert_errors, text_features
from schedlab.policies.predictors.forest import Forest
from schedlab.policies.predictors.serving_time import ServingTime
from schedlab.policies.predictors.text_model import TextModel
from schedlab.policies.queued_batches import QueuedBatch, QueuedBatches
from schedlab.policies.routers.llumnix import freeness
from schedlab.policies.routers.prefix_tree import PrefixTree
from schedlab.policies.routers.slo_aware import SloAware
from schedlab.policies.speculation import registry as draft_lengths
from schedlab.policies.step_load import _most
from schedlab.policies.wait import Wait
from schedlab.sim.config import EngineConfig, KVTier
from schedlab.sim.core.track import SpeculatingState, look_ahead, slots
from schedlab.sim.cost.efficiency import efficiency_of
from schedlab.sim.cost.learning import predict
from schedlab.sim.cost.limits import least_step_s
from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive.clock import COMES, Clock
from schedlab.sim.drive.engine_state import Candidate
from schedlab.sim.drive.links import Interconnect, Link, Links
from schedlab.sim.drive.pool_state import Answer, PoolState
from schedlab.sim.errors import SchedlabError
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.kv.tier import Tier
from schedlab.sim.metrics.registry import metric_named
from schedlab.sim.metrics.window import Window, measured_window
from schedlab.sim.record.copies import TierFacts
from schedlab.sim.record.fleet import EngineFacts
from schedlab.sim.request import Request, RequestState, Slo, Status
from schedlab.sim.result import RunResult
from schedlab.sim.speculation.acceptance import DrawnAcceptance
from tests import laws
from tests.golden import combined
from tests.golden.prices import DEPLOYMENTS, MEASURED, SHAPES

Draw = random.Random


def _quarters(draw: Draw, most: int) -> float:
    return draw.randrange(4 * most) / 4


# -- fleets: who is asked for, who is sent where -------------------------------------------------

AUTOSCALERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("hpa", {"metric": "num_waiting", "target": 2.0, "tolerance": 0.25, "stabilization_s": 3.0}),
    ("hpa", {"metric": "num_in_flight", "target": 4.0, "stabilization_s": 0.0}),
    ("hpa", {"metric": "kv_use", "target": 0.5, "tolerance": 0.5, "stabilization_s": 5.0}),
    ("kv_thresholds", {"up": 0.75, "down": 0.5}),
    ("slo_attainment", {"target": 0.75, "patience": 3}),
    ("schedule", {"times": [[0, 2], [3, 5], [3, 6], [8, 1]], "period_s": 10.0}),
    ("schedule", {"times": [[3, 5], [8, 1]]}),
    ("dynamo_planner", {"ttft_ms": 9.0, "itl_ms": 2.0}),
)


def _engine(draw: Draw, index: int) -> Any:
    def estimate_step_ns(shape: BatchShape) -> int:
        return laws.LinearCost(900_000, 90_000, 40).step_ns(shape)[0]

    return SimpleNamespace(
        index=index, num_blocks=8, block_size=4, used_blocks=draw.choice((2, 4, 5, 6, 7, 8)),
        num_running=draw.randrange(4), num_waiting=draw.randrange(4),
        num_in_flight=draw.randrange(7), num_urgent=draw.choice((0, 0, 1)),
        first_waiting_blocks=draw.choice((0, 0, 2)), backlog_tokens=draw.randrange(60),
        estimate_step_ns=estimate_step_ns,
    )  # fmt: skip


def scalers(_: str) -> dict[str, Any]:
    """Ask every autoscaler for engines, time and again."""
    found = {}
    for number, (name, knobs) in enumerate(AUTOSCALERS):
        draw, scaler = Draw(f"scaler {number}"), autoscalers.make(name, **knobs)
        asked, now = [], 3
        for times in range(60):
            now = draw.randrange(1, 7)
            came = [SimpleNamespace(prompt_tokens=draw.randrange(1, 90)) for _ in range(2 * now)]
            answers = [
                Answer(9, draw.choice((1, 5, 9)), _quarters(draw, 20), _quarters(draw, 5),
                       draw.random() < 0.75)
                for _ in range(draw.choice((0, 1, 4, 4, 8)))
            ]  # fmt: skip
            up = [_engine(draw, i) for i in range(draw.choice((0, 1, now, now)))]
            pool = PoolState(
                float(times), 1.0, draw.choice(("mixed", "prefill", "decode")), now, up,
                came[: draw.choice((0, now, 99))], answers,
            )  # fmt: skip
            asked.append(scaler.num_engines(pool))
        found[f"{number} {name}"] = "".join(f"{n} " for n in asked)
    return found


def moves(_: str) -> dict[str, Any]:
    """Ask who should move: pairs of engines, victims, and how free engines are."""
    found: dict[str, Any] = {}
    for number in range(20):
        draw = Draw(f"moves {number}")
        engines = [_engine(draw, i) for i in range(6)]
        candidates = [Candidate(one, draw.random() < 0.15) for one in engines]
        llumnix = migrators.make("llumnix", leave_below=1.0, enter_above=draw.choice((1.0, 1.5)))
        decoding = [
            SimpleNamespace(
                id=i, num_computed_tokens=draw.randrange(4),
                request=SimpleNamespace(priority=draw.randrange(-1, 2)),
            )
            for i in draw.sample(range(9), 6)
        ]  # fmt: skip
        router = SloAware(margin=1.0)
        router.turn = 0
        request = SimpleNamespace(
            prompt_tokens=draw.randrange(1, 40),
            slo=Slo(draw.choice((None, 4.0, 5.0)), draw.choice((None, 1.2, 1.4))),
        )
        found[str(number)] = [
            llumnix.pairs(candidates),
            llumnix.victim(decoding),
            [freeness(one, 0.5) for one in engines],
            router.route(request, engines),
        ]
    return found


def tree(_: str) -> dict[str, Any]:
    """Send prompts of few documents to engines that forget; who has how much of which."""
    found = {}
    for number in range(4):
        draw, one = Draw(f"tree {number}"), PrefixTree()
        engines, sizes = (0, 2, 5), (4, 4, 4)
        seen = []
        for _ in range(60):
            ids = [100 * draw.randrange(3) + i for i in range(draw.randrange(9))]
            seen.append([one.tokens(ids, engines, sizes)])
            if draw.random() < 0.06:
                one.forget(draw.choice((0, 2, 5)))
            else:
                one.add(draw.choice((0, 2, 5)), ids, draw.choice((6, 14)))
            seen.append(one.sizes(engines))
        found[str(number)] = combined.text_digest(seen)
    return found


def links(_: str) -> dict[str, Any]:
    """Send, cancel and lose on links that fail; when everything arrived."""
    found = {}
    for number in range(12):
        draw, clock = Draw(f"links {number}"), Clock()
        joins = Interconnect(Link(2e9, draw.choice((0.0, 3e-7)), ""), 10, [1, 2, 4], 2)
        one, arrived, sent = Links(clock, joins), [], []
        members = [SimpleNamespace(index=i, pool=draw.randrange(3)) for i in range(4)]

        def act(
            step: int,
            draw: Draw = draw,
            one: Links = one,
            sent: list = sent,
            arrived: list = arrived,
            clock: Any = clock,
            members: list = members,
        ) -> None:
            kind = draw.random()
            if kind < 0.6:
                a, b = draw.sample(members, 2)
                done = lambda: arrived.append((step, clock.now_ns))  # noqa: E731
                sent.append(
                    one.send_kv(a, b, draw.choice((1, 40, 40, 333)), done, draw.choice((0, 0, 70)))
                )
            elif kind < 0.75 and sent:
                one.cancel(draw.choice(sent))
            elif kind < 0.9:
                down = draw.randrange(4)
                one.fail(down)
                clock.at(draw.choice((1, 200, 900)), COMES, lambda _: one.repair(down))

        for step in range(25):
            clock.at(draw.randrange(0, 3000, 100), COMES, lambda _, s=step: act(s))
        clock.run()
        found[str(number)] = [
            " ".join(f"{step}@{at}" for step, at in arrived),
            one.kv_alone_ns(members[0], members[1], 37.5),
        ]
    return found  # fmt: skip


# -- memory --------------------------------------------------------------------------------------


def tiers(_: str) -> dict[str, Any]:
    """Fill, read, pin and evict tiers of few blocks."""
    found = {}
    for number in range(8):
        draw = Draw(f"tiers {number}")
        one = Tier(KVTier("cpu", draw.choice((3, 9)), 3e9, 1e9, draw.choice((0, 70)), 5))
        writing: list[list[int]] = []
        reading: list[list[int]] = []
        told: list[Any] = []
        for now_ns in range(0, 12_000, 100):
            first = draw.randrange(12)
            names = list(range(first, first + draw.randrange(1, 6)))
            kind = draw.random()
            if kind < 0.45:
                new, evicted = one.add(names)
                told.append([new, evicted])
                writing.append(new)
            elif kind < 0.6 and writing:
                one.written(writing.pop(0))
            elif kind < 0.7 and (there := [name for name in names if one.has(name)]):
                one.lock(there)
                reading.append(there)
            elif kind < 0.8 and reading:
                one.unlock(reading.pop())
            elif kind < 0.9 and one.room_for_pins >= 2:
                told.append(one.pin(2))
            elif one.num_pinned:
                one.unpin(2)
            told.append([one.used_blocks, one.room_for_pins, [one.has(n) for n in range(17)]])
            told.append(draw.choice((one.load, one.store)).send(draw.randrange(400), now_ns))
            one.check()
        found[str(number)] = combined.text_digest(told)
    return found


def peaks(_: str) -> dict[str, Any]:
    """Guess how much memory a few requests will need, and whether one more fits exactly."""
    draw, found = Draw("peaks"), {}
    for number in range(15):
        peak = FuturePeak()
        for _i in range(draw.randrange(5)):
            peak.add(draw.randrange(9), _quarters(draw, 4))
        more = draw.randrange(9), _quarters(draw, 4)
        top = peak.tokens_with(*more)
        fits = [peak.stays_within(*more, top + by) for by in (-0.25, 0.0, 0.25)]
        found[str(number)] = [peak.tokens(), top, fits]
    view = SimpleNamespace(config=SimpleNamespace(max_model_len=40, block_size=4))
    for prompt, most in ((1, 3), (1, 4), (36, 4), (36, 5), (39, 99)):
        state = RequestState(Request(0, 0, prompt, most))
        found[f"declared {prompt} {most}"] = declared_blocks(state, view)
    return found


def drafts(_: str) -> dict[str, Any]:
    """Look ahead at verifications up to the end of answers and of what the model holds."""
    found = {}
    for number in range(30):
        draw = Draw(f"drafts {number}")
        most = draw.choice((1, 3, 5))
        config = EngineConfig(
            num_blocks=20, max_model_len=40, block_size=4, num_speculative_tokens=most,
            num_lookahead_tokens=draw.choice((0, 2)),
        )  # fmt: skip
        total = draw.choice((40, 40, 39, 38, 30))
        prompt = draw.randrange(20, total)
        state = SpeculatingState(Request(number, 0, prompt, 100), draw.choice((most, 1, 0)))
        state._generated = draw.randrange(1, total - prompt + 1)
        state._computed = prompt + state._generated - 1
        state._spare = draw.choice((0, 0, 2))
        state.draft_once = draw.choice((-1, -1, 0, most))
        outcome = DrawnAcceptance(draw.choice(([0.6], [1.0], [0.9, 0.2]))).outcome(
            state.request, total - prompt
        )
        track = look_ahead(config, state, outcome, total - prompt)
        found[str(number)] = [
            track.came, track.held, track.drafted, track.ahead.sum(axis=1).tolist(),
            [slots(config, context, n) for context in (3, 35, 39) for n in range(3)],
        ]  # fmt: skip
    return found


def draft_choices(_: str) -> dict[str, Any]:
    """Choose how many tokens to draft, for requests with equal needs among them."""
    found = {}
    for number in range(24):
        draw = Draw(f"lengths {number}")
        states = [
            SimpleNamespace(
                request=SimpleNamespace(slo=draw.choice((None, Slo(), Slo(tpot_ms=1.0)))),
                first_token_ns=draw.choice((-1, 0, 4_000_000, 6_000_000)),
                num_output_tokens=draw.randrange(1, 7),
            )
            for _ in range(draw.randrange(1, 7))
        ]
        slope = draw.choice((1, 3, 9))
        decoding = SimpleNamespace(
            now_ns=8_000_000, requests=states, most=draw.choice((1, 3, 5)),
            num_accepted=draw.choice((0, 3, 30)), num_cut_short=draw.choice((0, 3, 10)),
            step_ns=lambda k, slope=slope: 1_000_000 + 100_000 * slope * k,
        )  # fmt: skip
        budget, prior = draw.choice((1, 4, 6, 9, 64)), draw.choice((0.0, 0.7, 1.0))
        chosen = (
            draft_lengths.make("fixed"),
            draft_lengths.make("by_batch_size", schedule=[[2, 2], [4, 1], [6, 0]]),
            draft_lengths.make("goodput", prior_rate=prior, prior_tokens=2.0),
            draft_lengths.make("slo", budget_tokens=budget, prior_rate=prior, prior_tokens=2.0),
        )
        found[str(number)] = [list(one.choose(decoding)) for one in chosen]
    return found


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
        price = Continuum(memory_price=draw.choice((0.0, 0.5, 1.0)))
        past_ns = sorted(draw.choice((0, 4, 4, 9, 30)) for _ in range(6))
        ttls = [price._best_ttl_ns(past_ns, saved_ns) for saved_ns in (0, 3, 8, 9, 40)]
        found[str(number)] = [
            known.lengths.tolist(), known.chances.tolist(), [str(rank) for rank in ranks], ttls,
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
        found[f"most {limit}"] = [_most(limit, lambda n, k=k: n <= k) for k in range(-1, 8)]
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
    waste = queued.wasted_tokens(states[0])
    return found | {"waste": waste.tolist()[:20], "rows": len(waste)}


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
            state = SimpleNamespace(num_output_tokens=length, id=0)
            nested.on_finish(state, 0)
        plain = Wait(edges, rates, limit)
        plain._arrived = [draw.randrange(4) for _ in edges]
        running = [draw.randrange(3) for _ in edges]
        stages = [draw.randrange(3) for _ in range(9)]
        found[str(number)] = [
            nested._limits, nested._ended, plain._places(running),
            _at_most(draw.choice((1, 2, 3)), list(range(9)), stages),
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
                pricing.meet(shape, 500)
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
        for of in (scalers, moves, tree, links, tiers, peaks, drafts, draft_choices, lengths,
                   batches, bookings, texts, kernels, counted, windows)
    },
    **{f"parts measured {name}": (measured, f"run {name}") for name in RUNS},
    **{f"parts measured fleet {number}": (measured, f"fleet {number}") for number in FLEETS},
}  # fmt: skip
