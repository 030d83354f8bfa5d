"""Fleets with everything at once: failures, scaling, migration, handovers, caches, sessions."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlab.policies.routers import registry as routers
from schedlab.policies.static import Static
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.audit import check_conservation
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.pipeline_executor import PipelineExecutor
from schedlab.sim.core.pipelined_engine import PipelinedEngine
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.cluster import Changes, simulate_cluster
from schedlab.sim.drive.disaggregation import Disaggregation
from schedlab.sim.drive.failures import Failures, Outage
from schedlab.sim.drive.links import Interconnect
from schedlab.sim.drive.members import Supply
from schedlab.sim.drive.migration import MigrationPlan
from schedlab.sim.drive.scaling import PoolScaling
from schedlab.sim.hardware.link import Link
from schedlab.sim.record.columns import FINISHED, REJECTED
from schedlab.sim.request import Arrival, Request, Slo
from tests import laws, sessions
from tests.policy_cases import CASES, make
from tests.property.test_combinations import (
    DRAFT_LENGTHS,
    LONGEST,
    RATES,
    executor,
    in_sessions,
    limits,
    named,
    without_caching,
)
from tests.property.test_fleet_failures import Restless, UpAndDown, failures
from tests.staged_cost import StagedCost
from tests.workloads import share, workloads

ROLES = (
    ("mixed",), ("mixed",) * 3, ("prefill", "decode"), ("prefill", "decode", "decode"),
    ("prefill", "prefill", "mixed", "decode"),
)  # fmt: skip


@dataclass(frozen=True)
class FleetCombination:
    """A fleet and all that happens to it; names are those of `simulate_cluster`."""

    policy: str
    workload: list[Arrival]
    config: EngineConfig
    roles: tuple[str, ...]
    router: str
    failures: Failures
    start_up_ns: int
    staleness_ns: int
    clients: int | None
    scaling: tuple[int, int] | None
    moves_every_ns: int | None
    stages: tuple[int, int]
    local: tuple[Any, ...]
    """What follows the router in a `Disaggregation`."""
    link: Link
    num_layers: int = 1
    rates: tuple[float, ...] = ()
    draft_length: str = "fixed"
    drafting: str | None = None
    """The role whose engines draft; all do if there is none."""
    shares: tuple[tuple[int, ...], ...] = ()
    """What each stage takes of a step, in tenths, of the engines of each role; one is no pipeline.
    None is, if there are none."""
    decode_caches: bool = False
    """Whether engines of role `decode` have the prefix caches that others have."""
    make_router: Callable[[str], Any] = routers.make
    make_migrator: Callable[[], Any] = Restless
    make_autoscaler: Callable[[int], Any] = UpAndDown

    def run(self, fast=True):
        config = self.config if fast else laws.slow(self.config)

        def new_engine(pool):
            # Blocks of a prompt that comes from elsewhere have no names.
            keeps = self.roles[pool] == "prefill" or (
                self.roles[pool] == "mixed" and self.moves_every_ns is None
            )
            limits = config if keeps else looking_nothing_up(config)
            if self.decode_caches and self.roles[pool] == "decode" and not limits.kv_tiers:
                limits = replace(limits, enable_prefix_caching=config.enable_prefix_caching)
            rates = self.rates if self.drafting in (None, self.roles[pool]) else ()
            if not rates:
                limits = replace(limits, num_speculative_tokens=0, num_lookahead_tokens=0)
            shares = self.shares[pool] if self.shares else (10,)
            if len(shares) > 1:
                limits = replace(limits, pipeline_parallel_size=len(shares))
                stages = PipelineExecutor(Pricing(StagedCost(shares, 70, 3)))
                return PipelinedEngine(limits, make(self.policy), stages, check_conservation)
            runs = executor(limits, rates, Pricing(laws.LinearCost(1000, 10, 1)))
            length = DRAFT_LENGTHS[self.draft_length]() if rates else None
            return Engine(limits, make(self.policy), runs, check_conservation, length)

        size = len(self.roles)
        disaggregation = migration = None
        if "decode" in self.roles:
            disaggregation = Disaggregation(self.roles, routers.make("least_kv"), *self.local)
        if self.moves_every_ns is not None:
            migration = MigrationPlan(self.make_migrator(), self.moves_every_ns, *self.stages)
        scaling = [
            PoolScaling(pool, self.make_autoscaler(self.scaling[1]), self.scaling[0], 1, 4)
            for pool in range(size if self.scaling else 0)
            if pool != 1
        ]
        supply = Supply(new_engine, self.roles, [self.start_up_ns] * size)
        return simulate_cluster(
            [new_engine(pool) for pool in range(size)],
            self.make_router(self.router),
            self.workload,
            self.clients,
            staleness_ns=self.staleness_ns,
            disaggregation=disaggregation,
            interconnect=Interconnect(
                self.link,
                1000,
                [len(shares) for shares in self.shares] or [1] * size,
                self.num_layers,
            ),
            changes=Changes(supply, self.failures, scaling, migration),
        )


def looking_nothing_up(config):
    """Return the limits of engines whose prompts come from elsewhere: tiers serve to swap there."""
    own = [tier for tier in config.kv_tiers if not tier.is_shared]
    if not own or config.preemption_mode != "swap":
        config = (
            replace(config, kv_tiers=(), preemption_mode="recompute") if config.kv_tiers else config
        )
        return replace(config, enable_prefix_caching=False, load_takes_seat=True)
    return replace(config, enable_prefix_caching=False, kv_tiers=tuple(own))


@st.composite
def fleet_combinations(draw):
    """Draw a fleet and all that happens to it."""
    roles = draw(st.sampled_from(ROLES))
    policy = draw(st.sampled_from(CASES))
    rates = draw(st.sampled_from(RATES))
    moves_every_ns = draw(st.sampled_from((None, 400, 3_000)))
    hands_over = "decode" in roles or moves_every_ns is not None
    config = draw(limits(bool(rates)))
    if hands_over and config.offloading_connector:
        config = replace(config, offloading_connector=False, load_takes_seat=True)
    if isinstance(make(policy), Static):
        config = without_caching(config)
    if hands_over:  # what the specification asks for
        config = replace(
            config,
            kv_allocator="paged",
            async_scheduling=False,
            overrun_at_stop=False,
            arrivals_between_steps=False,
        )
    if draw(st.integers(0, 3)) == 0:
        seed = draw(st.integers(0, 10_000))
        work = in_sessions(sessions.drawn(seed, draw(st.integers(1, 4)), LONGEST))
    else:
        work = list(named(draw, draw(workloads(max_requests=10)), config.block_size))
    return FleetCombination(
        policy=policy,
        workload=work,
        config=config,
        roles=roles,
        router=draw(st.sampled_from(routers.names())),
        failures=draw(failures(len(roles))),
        start_up_ns=draw(st.sampled_from((0, 900))),
        staleness_ns=draw(st.sampled_from((0, 0, 1_500))),
        clients=draw(st.sampled_from((None, None, 3))),
        scaling=draw(st.sampled_from((None, None, (3_000, 6), (900, 3)))),
        moves_every_ns=moves_every_ns,
        stages=(draw(st.sampled_from((1, 3))), draw(st.sampled_from((1, 2, 5)))),
        local=(
            draw(st.sampled_from((0, 0, 15))),
            draw(st.sampled_from((None, None, 20))),
            *draw(
                st.sampled_from(
                    ((False, "prefill"), (True, "prefill"), (False, "transfer"), (False, "decode"))
                )
            ),
            draw(st.sampled_from((None, None, 10))),
            draw(st.sampled_from((None, None, 1))),
            draw(st.sampled_from((0, 0, 2_500))),
        ),
        link=Link(draw(st.sampled_from((1e10, 1e12))), draw(st.sampled_from((0.0, 3e-6))), ""),
        rates=rates,
        draft_length=draw(st.sampled_from(sorted(DRAFT_LENGTHS))),
        drafting=draw(st.sampled_from((None, None, *sorted(set(roles))))),
        decode_caches=moves_every_ns is None and draw(st.booleans()),
    )


def check_fleet(one):
    """Require that nobody is lost, and that skipping ahead changes no bit."""
    log = one.run()
    requests = log.requests()
    status = requests["status"]
    assert requests["id"].tolist() == sorted(a.request.id for a in one.workload)
    assert ((status == FINISHED) | (status == REJECTED)).all()
    assert set(log.reject_reasons) == set(requests["id"][status == REJECTED].tolist())
    for row, a in enumerate(sorted(one.workload, key=lambda a: a.request.id)):
        times = log.token_times(a.request.id)
        assert len(times) == requests["generated_tokens"][row]
        assert (np.diff(times) >= (0 if one.rates else 1)).all()  # drafts come together
        if status[row] == FINISHED:
            assert len(times) == min(a.output_tokens, a.request.max_tokens)
    assert log.token_counts()["count"].sum() == requests["generated_tokens"].sum()
    for other in (one.run(), one.run(fast=False)):
        for name in ("losses", "transfers", "moves", "places", "reject_reasons"):
            assert getattr(log, name) == getattr(other, name), name
        for mine, its in zip(log.of_engines, other.of_engines, strict=True):
            assert laws.difference(its, mine, ("otherwise", "ahead")) is None
            assert laws.signature(mine) == laws.signature(its)


class OnlyFirst(Restless):
    """Moves the first request, once, and leaves the others."""

    def pairs(self, candidates):
        return super().pairs(candidates)[:1]

    def victim(self, decoding):
        return 0 if decoding[0].id == 0 else None


@pytest.mark.slow
@given(combination=fleet_combinations())
@settings(max_examples=share(0.8))
def test_any_fleet_loses_nobody_and_skips_ahead_exactly(combination):
    check_fleet(combination)


def small_fleet(policy, roles, outages=(), moves_every_ns=None):
    return FleetCombination(
        policy=policy,
        workload=[laws.arrival(i, 0, 2, 29, predicted_tokens=29.0) for i in range(2)],
        config=EngineConfig(num_blocks=50, max_model_len=100, block_size=4, max_num_seqs=4),
        roles=roles,
        router="round_robin",
        failures=Failures(outages=outages),
        start_up_ns=0,
        staleness_ns=0,
        clients=None,
        scaling=None,
        moves_every_ns=moves_every_ns,
        stages=(1, 1),
        local=(0, None),
        link=Link(1e10, 0.0, ""),
    )


@pytest.mark.parametrize("policy", CASES)
def test_request_that_lost_its_engine_after_some_tokens_is_served_by_any_policy(policy):
    check_fleet(small_fleet(policy, ("mixed",), outages=[Outage(0, 5_000, 700)]))


@pytest.mark.slow
@pytest.mark.parametrize("policy", CASES)
def test_request_that_moves_is_served_by_any_policy(policy):
    # Less often than the 5,000 ns that nested_wait waits for others: who moves waits anew.
    check_fleet(small_fleet(policy, ("mixed", "mixed"), moves_every_ns=7_000))


def test_request_whose_tightest_companion_moved_away_still_runs_under_scorpio():
    # Three a pair of engines: who is left alone on its engine must not wait for others' pace.
    tight, loose = Slo(1.0, 0.0012), Slo(1.0, 0.0048)
    work = [
        laws.arrival(i, 0, 2, 29, predicted_tokens=29.0, slo=tight if i == 0 else loose)
        for i in range(3)
    ]
    fleet = small_fleet("scorpio", ("mixed", "mixed"), moves_every_ns=7_000)
    check_fleet(replace(fleet, workload=work, make_migrator=OnlyFirst))


@pytest.mark.parametrize("policy", ["static", "magnus"])
def test_prompts_whose_memory_went_to_who_arrived_meanwhile_are_computed_by_sealed_batches(policy):
    # The second is computed where the first goes on, and that takes the memory it was to have.
    fleet = small_fleet(policy, ("prefill", "decode"))
    work = [
        laws.arrival(0, 0, 60, 10, predicted_tokens=10.0),
        laws.arrival(1, 15_000, 50, 10, predicted_tokens=10.0),
    ]
    config = replace(fleet.config, num_blocks=25, max_num_batched_tokens=4)
    check_fleet(replace(fleet, workload=work, config=config, local=(50, None)))


def test_swap_when_nobody_could_run_is_charged_to_one_step():
    # What arrives holds the memory in the meantime, so that the engine waits.
    config = EngineConfig(
        num_blocks=7, max_model_len=100, block_size=16, max_num_seqs=2, max_num_batched_tokens=3,
        preemption_mode="swap", swap_space_blocks=3, kv_block_bytes=100,
    )  # fmt: skip
    work = in_sessions(sessions.drawn(0, 2, LONGEST))
    check_fleet(replace(small_fleet("aged", ("prefill", "decode")), config=config, workload=work))


def test_engine_that_is_kept_after_all_takes_over_who_waits_for_one():
    def arrival(number, prompt_tokens, output_tokens):
        request = Request(
            id=number, arrival_ns=0, prompt_tokens=prompt_tokens, max_tokens=1 << 20,
            predicted_tokens=float(output_tokens),
        )  # fmt: skip
        return Arrival(request, output_tokens, 0)

    work = [arrival(0, 1, 2), arrival(1, 4, 14), *(arrival(i, 1, 1) for i in range(2, 10))]
    # The autoscaler drains the only engine that decodes, and keeps it after all.
    check_fleet(
        FleetCombination(
            policy="aged",
            workload=work,
            config=EngineConfig(
                num_blocks=100, max_model_len=100, block_size=1, max_num_seqs=1,
                max_num_batched_tokens=1,
            ),
            roles=("prefill", "prefill", "mixed", "decode"), router="jsq",
            failures=Failures(
                outages=[Outage(2, 0, 1), Outage(3, 12_000, 20_000)],
                link_outages=[Outage(0, 0, 20_000)], max_retries=0,
            ),
            start_up_ns=0, staleness_ns=0, clients=None, scaling=(3000, 6), moves_every_ns=None,
            stages=(1, 1), local=(0, None), link=Link(1e10, 0.0, ""), num_layers=1,
            rates=(), draft_length="by_batch_size",
        )
    )  # fmt: skip
