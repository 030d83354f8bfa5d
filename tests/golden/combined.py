"""Engines and fleets with everything at once, drawn by chance, but always the same ones.

`tests/property` draws such runs anew and asks for laws; here a digest of each is kept, so that a
rule that breaks no law and changes what comes out is seen, too.
"""

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from schedlab.policies import registry
from schedlab.policies.autoscalers import registry as autoscalers
from schedlab.policies.migrators import registry as migrators
from schedlab.policies.routers import registry as routers
from schedlab.policies.static import Static
from schedlab.sim.config import EngineConfig, KVTier
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.speculative_executor import SpeculativeExecutor
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.drive.failures import Failures, Outage, Slowdown
from schedlab.sim.hardware.link import Link
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import Arrival, Slo
from schedlab.sim.speculation.acceptance import DrawnAcceptance
from schedlab.sim.speculation.drafters import NgramDrafter
from tests import laws, sessions
from tests.golden.every_field import EveryField
from tests.golden.fleets import ROUTERS
from tests.policy_cases import CASES as POLICIES
from tests.policy_cases import PARAMS, make
from tests.property.test_combinations import DRAFT_LENGTHS
from tests.property.test_fleet_combinations import ROLES, FleetCombination
from tests.property.test_fleet_failures import Restless, UpAndDown
from tests.workloads import EDGES, refined

LONGEST = 100
RUNS_OF_A_POLICY = 9
FLEETS = 96
KINDS = ("plain", "plain", "prefixes", "prefixes", "sessions", "tiers", "tiers", "drafts", "drafts")
"""What the runs of a policy have, one after the other."""
KNOBS: dict[str, dict[str, Any]] = {
    "atlas/short": {"first_quantum_s": 2e-5, "starvation": 6.0},
    "continuum/preview": {"ttl": "preview", "fixed_ttl_s": 3e-5},
    "continuum/short": {"min_calls": 3},
    "fastserve/ahead": {**PARAMS["fastserve"], "reserve_blocks": 3, "host_reserve": 0.4},
    "plas/short": {"first_quantum_s": 5e-6, "starvation": 4.0},
}
"""Of cases that only some limits or workloads suit, and that no law is asked of."""


class _Draw:
    """Draws by a seed, the same with every version of Python."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def __call__(self, *choices: Any) -> Any:
        """Return one of the choices."""
        return choices[int(self._random.random() * len(choices))]

    def length(self, longest: int) -> int:
        """Return a length: any, or one at an edge of blocks or bins."""
        return self(*EDGES, 1, 1 + int(self._random.random() * longest))


def _workload(draw: _Draw, block_size: int, count: int) -> list[Arrival]:
    """Draw requests of tenants, documents, priorities, targets and predictions that are off."""
    now_ns, found = 0, []
    for number in range(count):
        now_ns += draw(0, 0, 0, 1, 400, 1_010, 2_500, 9_000, 30_000)
        prompt, output, document = draw.length(60), draw.length(40), draw(0, 1, 2)
        shared, error = draw(0, 4, 16, 60), draw(0.5, 1.0, 1.0, 1.3)
        found.append(
            laws.arrival(
                number, now_ns, prompt, output,
                tenant=draw("a", "b", "c"),
                application=draw("x", "y", None),
                priority=draw(-1, 0, 0, 1, 2),
                predicted_tokens=output * error,
                refinement=refined(output, error) if number % 2 else None,
                max_tokens=draw(1 << 20, output, output + 5, max(output - 2, 1)),
                slo=Slo(
                    draw(None, 0.004, 0.02), draw(None, 0.0015, 0.004), draw(None, 0.05, 0.2)
                ),
                prefix_hash_ids=_names(number, prompt, block_size, document, shared),
            )
        )  # fmt: skip
    return found


def _names(number: int, tokens: int, block_size: int, document: int, shared: int) -> tuple:
    """Name the blocks of a prompt whose first `shared` tokens are those of a document."""
    return tuple(
        document * 1000 + i if (i + 1) * block_size <= shared else (number + 10) * 1000 + i
        for i in range(tokens // block_size)
    )


def _in_sessions(draw: _Draw, seed: int, block_size: int, count: int) -> list[Arrival]:
    """Draw sessions whose turns go on from the text before, some of them by way of a tool."""
    found, known = [], {}
    for one in sessions.drawn(seed, count, LONGEST):
        request, turn = one.request, one.turn
        assert turn is not None
        number, prompt = request.id, request.prompt_tokens
        before = known[turn.parents[0]] if turn.parents else ()
        full, total = (tokens // block_size for tokens in (prompt, prompt + one.output_tokens))
        ids = (before[:full] + tuple((number + 10) * 1000 + i for i in range(total)))[:total]
        known[number] = ids
        request = replace(
            request, prefix_hash_ids=ids[:full], priority=number % 3, tenant="abc"[number % 3],
            predicted_tokens=float(one.output_tokens), slo=Slo(tpot_ms=draw(0.0015, 0.003)),
            predicted_session_tokens=draw(None, 20.0, 60.0),
        )  # fmt: skip
        tool = draw(None, "search", "search", "shell")
        turn = turn._replace(answer_hash_ids=ids[full:], tool=tool)
        found.append(replace(one, request=request, turn=turn))
    return found


def _limits(draw: _Draw, kind: str) -> EngineConfig:
    """Draw limits of an engine, with every switch that goes with its kind."""
    block_size = draw(1, 2, 4, 4, 16)
    speculates, tiered = "drafts" in kind, "tiers" in kind
    budget = draw(3, 17, 24, 64, 260)
    paged = kind != "plain" or draw(True, True, False)
    swap_blocks = draw(0, 3, 30)
    below = tuple(
        KVTier(
            name, draw(7, 30, 90), draw(1e8, 1e9, 1e12), draw(1e8, 1e9, 1e12),
            draw(0, 300), draw(0, 300), draw("through", "back"),
        )
        for name in ("cpu", "disk", "net")[: draw(1, 2, 2, 3)]
    )  # fmt: skip
    config = EngineConfig(
        num_blocks=-(-LONGEST // block_size) + draw(0, 1, 3, 20),
        max_model_len=LONGEST,
        block_size=block_size,
        max_num_seqs=draw(1, 3, 5, 16),
        max_num_resident=draw(None, None, 3, 30),
        max_num_batched_tokens=budget,
        enable_chunked_prefill=budget < LONGEST or draw(True, False),
        long_prefill_token_threshold=draw(0, 0, 8),
        threshold_spares_lone_request=draw(True, False),
        watermark=draw(0.0, 0.01, 0.05),
        null_blocks=draw(0, 1),
        scheduler_reserve_full_isl=draw(True, False),
        kv_allocator="paged"
        if paged
        else draw("contiguous_max", "contiguous_pow2", "contiguous_exact"),
        preempt_in_order=draw(True, False),
        preemption_mode=draw("recompute", "swap") if swap_blocks else "recompute",
        swap_space_blocks=swap_blocks,
        kv_block_bytes=draw(0, 100) if not tiered else 100,
        enable_prefix_caching=paged and (kind != "plain" or draw(True, False)),
        free_uncached_first=draw(True, False),
        async_scheduling="ahead" in kind or (not speculates and draw(True, False)),
        arrivals_between_steps=draw(True, False),
        cudagraph_capture_sizes=draw((), (1, 2, 4, 8, 16)),
        num_speculative_tokens=draw(1, 3, 5) if speculates else 0,
        num_lookahead_tokens=draw(0, 5) if speculates else 0,
        first_launch_ns=draw(0, 0, 2500),
    )
    if "ahead" in kind:
        config = replace(config, overrun_at_stop=draw(True, False))
    if not tiered:
        return config
    return replace(
        config, kv_tiers=below, swap_space_blocks=below[0].num_blocks,
        preemption_mode=draw("recompute", "swap"), kv_load=draw("when_faster", "always"),
    )  # fmt: skip


# -- one engine ------------------------------------------------------------------------------


class _Run(NamedTuple):
    log: RunLog
    workload: list[Arrival]
    num_plans: int


def drawn_run(policy: str, number: int) -> tuple[RunLog, list[Arrival]]:
    """Run one policy under what is drawn for it; return what came of it, and the work."""
    log, work, _ = _run(policy, number)
    return log, work


def _run(policy: str, number: int, kind: str = "", priced_by: CostModel | None = None) -> _Run:
    draw, kind = _Draw(f"{kind}{policy} {number}"), kind or KINDS[number % len(KINDS)]
    knobs = KNOBS.get(policy)
    chosen = make(policy) if knobs is None else registry.make(policy.partition("/")[0], **knobs)
    if knobs is not None:
        kind = "tiers" if "reserve_blocks" in knobs else "sessions"
    config = _limits(draw, kind)
    if isinstance(chosen, Static):  # which sets memory aside
        mode = "swap" if config.kv_tiers else config.preemption_mode
        config = replace(config, enable_prefix_caching=False, preemption_mode=mode)
    if kind == "sessions":
        work = _in_sessions(draw, number + 100 * len(policy), config.block_size, 4)
    else:
        work = _workload(draw, config.block_size, 14)
    options: dict[str, Any] = {}
    if (clients := draw(None, None, 1, 4)) is not None:
        options["max_concurrency"] = clients
    if config.num_speculative_tokens:
        acceptance = DrawnAcceptance(draw([0.0], [0.6], [1.0], [0.9, 0.5, 0.1]), 0.0, seed=3)
        drafter = NgramDrafter(1e-8)
        options |= {
            "draft_length": DRAFT_LENGTHS[draw(*sorted(DRAFT_LENGTHS))](),
            "make_executor": lambda p: SpeculativeExecutor(p, config, acceptance, drafter),
        }
    engines: list[Engine] = []
    slower = draw(1, 1, 10)
    cost = priced_by or laws.LinearCost(1000 * slower, 10, draw(0, 1))
    log = laws.run(chosen, work, config, cost, observer=engines.append, prove=False, **options)
    return _Run(log, work, engines[-1].num_plans if engines else 0)


def runs(policy: str, kind: str = "") -> dict[str, Any]:
    """Run a policy under several drawn limits; a digest of each, and how often it planned."""
    found = {}
    for number in range(RUNS_OF_A_POLICY):
        log, _, num_plans = _run(policy, number, kind)
        found[str(number)] = [digest(log), num_plans]
    return found


def runs_by_every_field(policy: str) -> dict[str, Any]:
    """Run a policy under other drawn limits, priced by all that a step has; a digest of each."""
    found = {}
    for number in range(RUNS_OF_A_POLICY, 2 * RUNS_OF_A_POLICY):
        log, _, num_plans = _run(policy, number, priced_by=EveryField(unit_ns=1))
        found[str(number)] = digest(log, num_plans)[:6]
    return found


def runs_with_drafts_and_tiers(policy: str) -> dict[str, Any]:
    """Run a policy under limits with both; a digest of each, how often it planned, and copies."""
    found = {}
    for number in range(RUNS_OF_A_POLICY):
        log, _, num_plans = _run(policy, number, "drafts with tiers")
        found[str(number)] = [digest(log), num_plans, len(log.copies.columns()["id"])]
    return found


def text_digest(value: Any) -> str:
    """Return a digest of how a value is written."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def digest(log: Any, *more: Any) -> str:
    """Return a digest of all that a log of one engine or of several tells."""
    text = hashlib.sha256(repr(more).encode())
    requests = log.requests()
    tables = [requests, log.steps(), log.preemptions(), log.token_gaps(), log.token_counts()]
    logs = getattr(log, "of_engines", [log])
    tables += [one.copies.columns() for one in logs] + [one.copies.wait_columns() for one in logs]
    for table in tables:
        for name in table:
            if np.issubdtype(table[name].dtype, np.integer):
                text.update(name.encode() + np.asarray(table[name], dtype=np.int64).tobytes())
    for number in requests["id"].tolist():
        text.update(np.asarray(log.token_times(number), dtype=np.int64).tobytes())
    text.update(repr(sorted(log.reject_reasons.items())).encode())
    return text.hexdigest()[:12]


# -- fleets ------------------------------------------------------------------------------------

AUTOSCALERS: Sequence[tuple[str, dict[str, Any]]] = (
    ("hpa", {"metric": "num_in_flight", "target": 2.0, "stabilization_s": 4e-6}),
    ("hpa", {"metric": "num_waiting", "target": 1.0, "tolerance": 0.0, "stabilization_s": 0.0}),
    ("hpa", {"metric": "kv_use", "target": 0.5, "stabilization_s": 1e-5}),
    ("kv_thresholds", {"up": 0.6, "down": 0.2}),
    ("slo_attainment", {"target": 0.75, "patience": 2}),
    ("schedule", {"times": [[0, 1], [4e-6, 3], [8e-6, 2]], "period_s": 1.2e-5}),
    ("dynamo_planner", {"ttft_ms": 0.004, "itl_ms": 0.0014}),
)


def _outages(draw: _Draw, size: int, ends: Sequence[int]) -> list[Outage]:
    return [
        Outage(draw(*range(size)), draw(0, 500, 2_210, 7_000, 19_000, 44_000), draw(*ends))
        for _ in range(draw(0, 0, 1, 2))
    ]


def _failures(draw: _Draw, size: int) -> Failures:
    spans = (1, 700, 20_000)
    return Failures(
        outages=_outages(draw, size, (*spans, FOREVER)),
        mtbf_ns=draw(float("inf"), float("inf"), 8e3, 5e4),
        mttr_ns=draw(10.0, 5e3),
        slowdowns=[
            Slowdown(o.engine, o.at_ns, o.at_ns + o.for_ns, draw(1.5, 4.0))
            for o in _outages(draw, size, spans)
        ],
        link_outages=_outages(draw, size, spans),
        max_retries=draw(0, 1, 6),
        deadline_ns=draw(FOREVER, FOREVER, 5_000),
        seed=draw(0, 1, 2),
    )


def drawn_fleet(number: int) -> FleetCombination:
    """Draw a fleet and all that happens to it."""
    draw = _Draw(f"fleet {number}")
    roles = draw(*ROLES)
    policy = draw("fcfs", "fcfs", *POLICIES)
    config = replace(_limits(draw, draw("plain", "prefixes")), max_num_seqs=draw(2, 3, 5))
    if isinstance(make(policy), Static):
        config = replace(config, enable_prefix_caching=False)
    moves_every_ns = draw(None, 400, 3_000)
    if "decode" in roles or moves_every_ns is not None:  # what the specification asks for
        config = replace(
            config, kv_allocator="paged", async_scheduling=False, arrivals_between_steps=False
        )
    if draw(0, 0, 0, 1):
        work = _in_sessions(draw, number, config.block_size, 3)
    else:
        work = _workload(draw, config.block_size, 12)
    scaler, knobs = draw(*AUTOSCALERS)
    router = draw(*ROUTERS)
    return FleetCombination(
        policy=policy,
        workload=work,
        config=config,
        roles=roles,
        router=router,
        failures=_failures(draw, len(roles)) if draw(0, 1) else Failures(),
        start_up_ns=draw(0, 900),
        staleness_ns=draw(0, 0, 1_500),
        clients=draw(None, None, 3),
        scaling=draw(None, (3_000, 6), (900, 3)),
        moves_every_ns=moves_every_ns,
        stages=(draw(1, 3), draw(1, 2, 5)),
        local=(draw(0, 0, 15), draw(None, None, 20)),
        link=Link(draw(1e10, 1e12), draw(0.0, 3e-6), ""),
        num_layers=draw(1, 3),
        make_router=_router,
        make_migrator=draw(
            Restless, lambda: migrators.make("llumnix", leave_below=9.0, enter_above=9.0)
        ),
        make_autoscaler=draw(UpAndDown, *[lambda _: autoscalers.make(scaler, **knobs)] * 3),
    )


def _router(name: str) -> Any:
    return routers.make(name.partition("/")[0], 3, **ROUTERS[name])


def drawn_fleet_of_pipelines(number: int) -> FleetCombination:
    """Draw a fleet some of whose engines have stages, and all that happens to it."""
    draw = _Draw(f"fleet of pipelines {number}")
    one = drawn_fleet(number)
    able = [name for name in POLICIES if make(name).can_pipeline]
    return replace(
        one,
        policy=one.policy if one.policy in able else draw(*able),
        config=replace(
            one.config, async_scheduling=False, chunked_pipeline_parallelism=draw(True, False)
        ),
        num_layers=1,
        shares=tuple(draw((10,), (10, 10), (25, 1, 5), (5, 10)) for _ in one.roles),
    )


_WAYS = ("moves", "hands over", "fails")


def fleets_of(policy: str) -> dict[str, Any]:
    """Run a policy in fleets from which requests move, are handed over, or lose their engine.

    What a policy notes of a request has to go with it, or come back with it, in each of these ways;
    the fleets of `drawn_fleet` have few policies each.
    """
    found = {}
    for number, way in enumerate(_WAYS):
        draw = _Draw(f"fleet of {policy} {number}")
        one = drawn_fleet(draw(*range(10_000)))
        config = one.config
        if isinstance(make(policy), Static):
            config = replace(config, enable_prefix_caching=False)
        if way != "fails":
            config = replace(
                config, kv_allocator="paged", async_scheduling=False, arrivals_between_steps=False
            )
        roles = draw(*ROLES[2:]) if way == "hands over" else ("mixed",) * 3
        moved = replace(
            one,
            policy=policy,
            config=config,
            roles=roles,
            failures=_failures(draw, len(roles)) if way == "fails" else Failures(),
            moves_every_ns=draw(400, 3_000) if way == "moves" else None,
        )
        found[f"{number} {way}"] = _told_of_fleet(moved)
    return found


def _told_of_fleet(one: FleetCombination) -> list[Any]:
    """Run a fleet; a digest of all that it tells, and how many of its requests were answered."""
    log = one.run()
    told = [tuple(log.losses), tuple(log.transfers), tuple(log.moves), tuple(log.places)]
    return [digest(log, told), int((log.requests()["status"] == 0).sum())]


def fleet(
    numbers: Iterable[int], drawn: Callable[[int], FleetCombination] = drawn_fleet
) -> dict[str, Any]:
    """Run some drawn fleets; a digest of each, and how many of its requests were answered."""
    found = {}
    for number in numbers:
        one = drawn(number)
        found[f"{number} {one.policy}, {' '.join(one.roles)}"] = _told_of_fleet(one)
    return found


_AT_ONCE = 12
CASES = {
    **{f"combined {policy}": (runs, policy) for policy in (*POLICIES, *KNOBS)},
    **{f"combined every field {policy}": (runs_by_every_field, policy) for policy in POLICIES},
    **{
        f"combined drafts with tiers {policy}": (runs_with_drafts_and_tiers, policy)
        for policy in ("fcfs", "fastserve", "sarathi", "srtf", "vtc")
    },
    **{
        f"combined drafts ahead {policy}": (partial(runs, kind="drafts ahead"), policy)
        for policy in ("fcfs", "priority", "fastserve", "sarathi", "srtf")
    },
    **{
        f"combined fleets {first}": (fleet, range(first, first + _AT_ONCE))
        for first in range(0, FLEETS, _AT_ONCE)
    },
    **{f"combined moves of {policy}": (fleets_of, policy) for policy in POLICIES},
    **{
        f"combined fleets of pipelines {first}": (
            partial(fleet, drawn=drawn_fleet_of_pipelines),
            range(first, first + _AT_ONCE),
        )
        for first in range(0, 4 * _AT_ONCE, _AT_ONCE)
    },
}
