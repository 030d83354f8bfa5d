"""What single parts return for drawn inputs full of equals, thresholds met exactly, and odd ends.

A whole run seldom gets there: two engines as full as each other, a mean that is the threshold, the
second of several, the last token that a model may hold. Inputs are small integers and quarters, so
that such things happen all the time and no sum is rounded.
"""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from schedlab.policies.autoscalers import registry as autoscalers
from schedlab.policies.continuum import Continuum
from schedlab.policies.dynamic import Dynamic
from schedlab.policies.fastserve import FastServe
from schedlab.policies.feedback import Standing
from schedlab.policies.future_memory import FuturePeak, declared_blocks
from schedlab.policies.migrators import registry as migrators
from schedlab.policies.routers.consistent_hashing import ConsistentHashing
from schedlab.policies.routers.llumnix import freeness
from schedlab.policies.routers.prefix_tree import PrefixTree
from schedlab.policies.routers.slo_aware import SloAware
from schedlab.policies.speculation import registry as draft_lengths
from schedlab.sim.config import EngineConfig, KVTier
from schedlab.sim.core.intake import Intake
from schedlab.sim.core.kv_bytes import CopyTime
from schedlab.sim.core.session_table import SessionTable
from schedlab.sim.core.tiering import Tiering
from schedlab.sim.core.track import SpeculatingState, look_ahead, slots_ahead
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive.clock import COMES, Clock
from schedlab.sim.drive.engine_state import Candidate
from schedlab.sim.drive.links import Interconnect, Links
from schedlab.sim.drive.pool_state import Answer, PoolState
from schedlab.sim.drive.retries import Retries
from schedlab.sim.hardware.link import Link
from schedlab.sim.kv import tier as below
from schedlab.sim.kv.ledger import Hit
from schedlab.sim.record.copies import Copies
from schedlab.sim.request import Request, RequestState, Slo
from schedlab.sim.speculation.acceptance import DrawnAcceptance
from tests import laws
from tests.golden import combined

Draw = random.Random


def _quarters(draw: Draw, most: int) -> float:
    return draw.randrange(4 * most) / 4


# -- fleets: who is asked for, who is sent where -------------------------------------------------

AUTOSCALERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("hpa", {"metric": "num_waiting", "target": 2.0, "tolerance": 0.25, "stabilization_s": 3.0}),
    ("hpa", {"metric": "num_in_flight", "target": 4.0, "stabilization_s": 0.0}),
    ("hpa", {"metric": "kv_use", "target": 0.5, "tolerance": 0.5, "stabilization_s": 5.0}),
    ("hpa", {"metric": "num_in_flight", "target": 1.0, "max_added": 1, "external": True}),
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
            first = 100 * draw.randrange(3)
            ids = [first + i for i in range(draw.randrange(9))]
            seen.append([one.tokens(ids, engines, sizes)])
            if draw.random() < 0.06:
                one.forget(draw.choice((0, 2, 5)))
            else:
                one.add(draw.choice((0, 2, 5)), ids, draw.choice((6, 14)))
            seen.append(one.sizes(engines))
        found[str(number)] = combined.text_digest(seen)
    ring = ConsistentHashing("tenant", None, 1)
    names = [SimpleNamespace(id=i, tenant=f"tenant {i}") for i in range(60)]
    on_ring = [SimpleNamespace(index=i) for i in (0, 2, 5)]
    return found | {"ring": "".join(str(ring.route(name, on_ring)) for name in names)}


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
        limits = KVTier("cpu", draw.choice((3, 9)), 3e9, 1e9, draw.choice((0, 70)), 5)
        one = below.Tier(limits)
        load, store = below.Link(3e9, limits.load_latency_ns), below.Link(1e9, 5)
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
            told.append(draw.choice((load, store)).send(draw.randrange(400), now_ns))
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
        count = len(track.bursts)
        sums = (
            sum(track.bursts), len(track.openings), sum(track.cut_short(i) for i in range(count)),
            sum(track.drafted),
        )  # fmt: skip
        found[str(number)] = [
            [track.tokens_before(i) for i in range(count + 1)],
            [track.held(i) for i in range(count + 1)], list(track.drafted), list(sums),
            [slots_ahead(config, context + n) for context in (3, 35, 38) for n in range(3)],
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


# -- queues and sessions ----------------------------------------------------------------------


def queues(_: str) -> dict[str, Any]:
    """Let requests time out, starve and come in at the very instants that decide."""
    found: dict[str, Any] = {}
    for number in range(12):
        draw = Draw(f"queues {number}")
        states = [
            RequestState(Request(i, draw.randrange(8), 3, 9, priority=draw.randrange(2)))
            for i in range(5)
        ]
        config = SimpleNamespace(max_num_seqs=draw.choice((3, 9)))
        told = []
        for knobs in (
            {"timeout_action": "delay", "use_priorities": True, "queue_timeout_s": 4e-9},
            {"queue_timeout_s": 4e-9, "max_queue_delay_s": 6e-9},
            {"queue_timeout_s": 4e-9, "max_queue_delay_s": 3e-9, "preferred_batch_sizes": [2, 4]},
        ):
            policy = Dynamic(**knobs)
            for now_ns in range(4, 13):
                waiting = sorted(
                    states, key=lambda s: (policy.key(s, now_ns), s.request.arrival_ns, s.id)
                )
                view = SimpleNamespace(now_ns=now_ns, waiting=waiting, config=config)
                order = [s.id for s in policy._in_order(view)]
                told.append([order, policy._next_timeout_ns(view), policy.dispatch_at_ns(view)])
        serving = FastServe(2e-9, 5e-9, 3)
        serving._places = {
            i: Standing(draw.randrange(3), 2 << draw.randrange(3), i, draw.randrange(9))
            for i in range(6)
        }
        serving._promote_starving(10)
        left = {i: (p.level, p.position, p.left_ns) for i, p in serving._places.items()}
        intake = Intake(
            EngineConfig(
                num_blocks=9, max_model_len=9, async_scheduling=draw.random() < 0.5,
                arrivals_between_steps=draw.random() < 0.7, first_launch_ns=draw.choice((0, 2)),
            )
        )  # fmt: skip
        now_ns, taken, came = 0, [], 0
        for _i in range(12):
            for _j in range(draw.randrange(3)):
                state = RequestState(Request(came, now_ns, 3, 9))
                state.queued_ns = now_ns + draw.randrange(3)
                came += 1
                intake.add(state)
            now_ns += draw.choice((0, 2))
            known = intake.take(now_ns, draw.random() < 0.8)
            taken.append([[s.id, s.queued_ns] for s in known] + [intake.is_idle(now_ns)])
            intake.step_done(now_ns, now_ns + draw.choice((1, 2)))
            now_ns += draw.choice((1, 2))
        found[str(number)] = [combined.text_digest(told), left, taken]
    return found


def calls(_: str) -> dict[str, Any]:
    """Follow sessions whose requests overlap: gaps, service, waits, longest chains."""
    found = {}
    for number in range(8):
        draw, table = Draw(f"calls {number}"), SessionTable()
        policy = Continuum(min_calls=2)
        policy.on_start(SimpleNamespace(kept=[]))
        there: list[RequestState] = []
        now_ns, told = 0, []
        for i in range(30):
            now_ns += draw.randrange(4)
            if there and draw.random() < 0.5:
                state = there.pop(draw.randrange(len(there)))
                state.served_ns, state.tool = draw.randrange(9), draw.choice((None, "search"))
                state._generated = draw.randrange(5)
                if draw.random() < 0.2:
                    table.rejected(state)
                else:
                    table.answered(state, now_ns)
            else:
                state = RequestState(Request(i, now_ns, 3, 9, session=draw.choice(("a", "b"))))
                state.queued_ns = now_ns
                needs = [draw.randrange(i) for _ in range(draw.choice((0, 1, 1, 2)))] if i else []
                table.arrived(state, now_ns, tuple(needs))
                policy.on_arrival(state, now_ns)
                there.append(state)
            session = state.session
            assert session is not None
            told.append(
                [session.last_gap_ns, session.attained_ns, session.waited_ns, session.critical_ns,
                 session.num_in_flight, session.num_sent, session.generated_tokens,
                 state.critical_ns, state.awaited_call,
                 {k: list(v) for k, v in policy._past_ns.items()}]
            )  # fmt: skip
        found[str(number)] = combined.text_digest(told)
    return found


def copying(_: str) -> dict[str, Any]:
    """Copy blocks away and back while others wait for the memory that is still being read."""
    found = {}
    for number in range(20):
        draw = Draw(f"copying {number}")
        below = tuple(
            KVTier(name, 12, 1e9, 1e9, 3, 0, draw.choice(("through", "back")))
            for name in ("cpu", "disk")[: draw.choice((1, 2))]
        )
        config = EngineConfig(
            num_blocks=20, max_model_len=80, block_size=4, kv_tiers=below, swap_space_blocks=12,
            preemption_mode="swap", enable_prefix_caching=True, kv_block_bytes=5,
            kv_load=draw.choice(("when_faster", "always")), max_num_batched_tokens=8,
        )  # fmt: skip
        log = Copies()
        one = Tiering(config, lambda shape, k: laws.LinearCost(20, 1, 0).step_ns(shape)[0], log)
        states = [
            RequestState(Request(i, 0, 30, 9, prefix_hash_ids=tuple(range(10 * (i % 2), 10))))
            for i in range(4)
        ]
        told: list[Any] = []
        swapped: list[RequestState] = []
        for now_ns in range(0, 400, 9):
            told.append([state.id for state in one.settle(now_ns)[1]])
            state, free = draw.choice(states), draw.randrange(3, 9)
            names = list(state.request.prefix_hash_ids[: draw.randrange(1, 8)])
            kind = draw.random()
            if kind < 0.35:
                one.store(state, names)
            elif kind < 0.5:
                one.released(state)
            elif kind < 0.6:
                one.lost(range(30, 30 + draw.randrange(1, 4)))
            elif kind < 0.7 and state not in swapped and one.room_for_swapping >= 3:
                one.swap_out(state, 3)
                swapped.append(state)
            elif kind < 0.8 and swapped:
                state = swapped.pop()
                if draw.random() < 0.6:
                    one.swap_in(state, 3, free)
                else:
                    one.drop(state, 3)
            elif parts := one.find(state, Hit(0, 0, draw.randrange(2))):
                one.keep(parts)
                one.load(state, parts, free)
                told.append(parts)
            told.append([one.num_busy, one.next_done_ns, one.room_for_swapping])
            if draw.random() < 0.3:
                told.append(one.wait_ns(draw.choice((0, free))))
        tables = log.columns(), log.wait_columns()
        told.append([{k: v.tolist() for k, v in table.items()} for table in tables])
        found[str(number)] = combined.text_digest(told)
    return found


class _Bytes:
    """Who holds the bytes, and says when copies are done if `times_copies`."""

    def __init__(self, times_copies: bool, told: list[Any]) -> None:
        self.times_copies = times_copies
        self._told = told
        self._going: list[CopyTime] = []

    def copy(self, number: int, copy: Any, now_ns: int) -> None:
        if copy.evicted:
            self._told.append(["evict", *copy.evicted])
        who = -1 if copy.state is None else copy.state.id
        self._told.append([number, *copy[:3], who, copy.first_block, copy.is_swap])
        self._going.append(CopyTime(number, now_ns + 2, now_ns + 30 + 7 * (number % 5)))

    def finish(self, number: int) -> None:
        self._told.append(["finish", number])

    def done(self, now_ns: int) -> list[CopyTime]:
        found = [one for one in self._going if one.done_ns <= now_ns]
        self._going = [one for one in self._going if one.done_ns > now_ns]
        return found

    def wait_for_copy(self, now_ns: int) -> int:
        return min(one.done_ns for one in self._going)

    def take_wait_ns(self) -> int:
        return len(self._going)


def connecting(_: str) -> dict[str, Any]:
    """Store what steps filled as a connector does, and let who holds the bytes say when."""
    found = {}
    for number in range(24):
        draw = Draw(f"connecting {number}")
        below = tuple(
            KVTier(name, draw.choice((4, 9)), 1e9, 1e9, 3, 0, "through")
            for name in ("cpu", "disk")[: draw.choice((1, 2))]
        )
        config = EngineConfig(
            num_blocks=20, max_model_len=80, block_size=4, kv_tiers=below, kv_block_bytes=5,
            swap_space_blocks=below[0].num_blocks, preemption_mode="swap",
            enable_prefix_caching=True, kv_load=draw.choice(("when_faster", "always")),
            max_num_batched_tokens=8, offloading_connector=number % 4 > 0,
        )  # fmt: skip
        log, told = Copies(), []
        bytes_ = (None, None, _Bytes(False, told), _Bytes(True, told))[number // 3 % 4]
        price = laws.LinearCost(20, 1, 0)
        one = Tiering(config, lambda shape, k, price=price: price.step_ns(shape)[0], log, bytes_)
        states = [
            RequestState(Request(i, 0, 30, 9, prefix_hash_ids=tuple(range(10 * (i % 2), 7))))
            for i in range(6)
        ]
        for now_ns in range(0, 500, 11):
            told.append([state.id for state in one.settle(now_ns)[1]])
            state = draw.choice(states)
            state._computed = draw.randrange(30)
            kind = draw.random()
            if kind < 0.4:
                one.store_step(draw.sample(states, 2))
            elif kind < 0.55:
                one.finished(state)
            elif kind < 0.65:
                one.reuse(state, draw.randrange(28))
            elif kind < 0.75:
                one.handed_out(range(draw.randrange(5), 6))
            elif kind < 0.8:
                one.flush(state)
            elif kind < 0.85:
                one.close_finished()
            elif parts := one.find(state, Hit(0, 0, draw.randrange(2)), draw.random() < 0.3):
                one.keep(parts)
                one.load(state, parts, draw.randrange(3, 9))
                told.append(parts)
            told.append(
                [one.num_busy, one.next_done_ns, one.room_for_swapping, one.ready_ns,
                 one.found_awaited, sorted(one.behind), sorted(one.coming), one.wait_for_copy(),
                 one.changes_by_itself(1), list(one._tiers[0].names)]
            )  # fmt: skip
            one.note_wait()
            if draw.random() < 0.3:
                told.append(one.wait_ns(draw.randrange(4)))
        tables = log.columns(), log.wait_columns()
        told.append([{k: v.tolist() for k, v in table.items()} for table in tables])
        found[str(number)] = [combined.text_digest(told), len(tables[0]["id"])]
    return found


def too_late(_: str) -> dict[str, Any]:
    """Park requests at, before and after their deadline; who is taken, given up, told why."""
    found = {}
    for now_ns in (4, 5, 6):
        for takes in (True, False):
            told: list[Any] = []
            clock = Clock()
            clock.now_ns = now_ns

            def reject(state: Any, tokens: int, why: str, told: list = told) -> None:
                told.append((state.id, why))

            def resume(state: Any, takes: bool = takes, told: list = told) -> bool:
                told.append(("asked", state.id))
                return takes

            fleet: Any = SimpleNamespace(
                clock=clock, now_ns=now_ns, logs=[(0, SimpleNamespace(reject=reject))],
                sessions=SessionTable(), arrivals={7: SimpleNamespace(output_tokens=3)},
                resume=resume, expects=lambda *_: True, request_is_gone=lambda *_: None,
            )  # fmt: skip
            retries = Retries(fleet)
            retries.deadline_ns, retries.most = 5, 2
            for _i in range(3):
                retries.lost(RequestState(Request(7, 0, 3, 9)), SimpleNamespace(index=0))
            retries.send_parked()
            clock.run()
            found[f"{now_ns} {takes}"] = [told, len(retries.losses), retries.num_parked]
    return found


CASES: dict[str, tuple[Callable[[str], dict[str, Any]], str]] = {
    f"parts {of.__name__}": (of, "")
    for of in (
        scalers, moves, tree, links, tiers, peaks, drafts, draft_choices, queues, calls, copying,
        connecting, too_late,
    )
}  # fmt: skip
