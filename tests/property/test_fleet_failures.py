"""Laws of fleets whose engines die, are slow, cut off, added or drained, over what is drawn."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlab.policies import registry
from schedlab.policies.migrators.migrator import Migrator
from schedlab.policies.routers import registry as routers
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.audit import check_conservation
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.cluster import Changes, simulate_cluster
from schedlab.sim.drive.disaggregation import Disaggregation
from schedlab.sim.drive.failures import Failures, Outage, Slowdown
from schedlab.sim.drive.links import Interconnect
from schedlab.sim.drive.members import Supply
from schedlab.sim.drive.migration import MigrationPlan
from schedlab.sim.drive.scaling import PoolScaling
from schedlab.sim.hardware.link import Link
from schedlab.sim.record.columns import REJECTED
from tests import laws
from tests.laws import LinearCost
from tests.workloads import workloads

POLICIES = ("fcfs", "sjf", "srtf", "vtc", "fastserve", "static")
TIMES_NS = st.integers(0, 60_000)


class Restless(Migrator):
    """Moves requests from every engine to the next, whatever that is good for."""

    def pairs(self, candidates):
        to = [*range(1, len(candidates)), 0]
        return [(i, j) for i, j in enumerate(to) if not candidates[j].is_draining]


class UpAndDown:
    """Asks for one engine more each time, then for one less, over and over."""

    def __init__(self, period):
        self.period, self.times = period, 0

    def num_engines(self, pool):
        self.times += 1
        return max(pool.num_engines + (1 if self.times % self.period < self.period // 2 else -1), 0)


@st.composite
def failures(draw, size):
    def outages(at_most, ends):
        return [
            Outage(draw(st.integers(0, size - 1)), draw(TIMES_NS), draw(ends))
            for _ in range(draw(st.integers(0, at_most)))
        ]

    spans = st.sampled_from((1, 700, 20_000))
    return Failures(
        outages=outages(3, st.sampled_from((1, 700, 20_000, 2**62))),
        mtbf_ns=draw(st.sampled_from((float("inf"), 8e3, 5e4))),
        mttr_ns=draw(st.sampled_from((10.0, 5e3))),
        slowdowns=[
            Slowdown(o.engine, o.at_ns, o.at_ns + o.for_ns, draw(st.sampled_from((1.5, 4.0))))
            for o in outages(2, spans)
        ],
        link_outages=outages(2, spans),
        max_retries=draw(st.sampled_from((0, 1, 6))),
        deadline_ns=draw(st.sampled_from((2**62, 2**62, 5_000))),
        seed=draw(st.integers(0, 3)),
    )


@st.composite
def fleets(draw):
    roles = draw(
        st.sampled_from(
            [("mixed",), ("mixed",) * 3, ("prefill", "decode"), ("prefill", "decode", "decode"),
             ("prefill", "prefill", "mixed", "decode")]
        )
    )  # fmt: skip
    config = EngineConfig(
        num_blocks=25 + draw(st.sampled_from((0, 10, 200))),
        max_model_len=100,
        block_size=4,
        max_num_seqs=draw(st.sampled_from((1, 2, 8))),
        max_num_batched_tokens=draw(st.sampled_from((8, 30, 200))),
        enable_chunked_prefill=True,
    )
    policies = POLICIES if roles[0] == "mixed" else POLICIES[:4]
    return {
        "workload": draw(workloads(max_requests=10)),
        "roles": roles,
        "config": config,
        "policy": draw(st.sampled_from(policies)),
        "router": draw(st.sampled_from(routers.names())),
        "failures": draw(failures(len(roles))),
        "start_up_ns": draw(st.sampled_from((0, 900))),
        "staleness_ns": draw(st.sampled_from((0, 0, 1_500))),
        "max_concurrency": draw(st.sampled_from((None, None, 3))),
        "scaling": draw(st.sampled_from((None, None, (3_000, 6), (900, 3)))),
        "moves_every_ns": draw(st.sampled_from((None, 400, 3_000))),
        "stages": (draw(st.sampled_from((1, 3))), draw(st.sampled_from((1, 2, 5)))),
        "local": (
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
        "link": Link(draw(st.sampled_from((1e10, 1e12))), draw(st.sampled_from((0.0, 3e-6))), ""),
        "num_layers": draw(st.sampled_from((1, 1, 3))),
    }


def run(
    workload, roles, config, policy, router, failures, start_up_ns, staleness_ns, max_concurrency,
    scaling, moves_every_ns, stages, local, link, num_layers, fast=True,
):  # fmt: skip
    last = {}

    def new_engine(pool):
        last[pool] = Engine(
            config if fast else laws.slow(config),
            registry.make(policy),
            SimExecutor(Pricing(LinearCost(1000, 10, 1))),
            check_conservation,
        )
        return last[pool]

    size = len(roles)
    disaggregation = None
    if "decode" in roles:
        disaggregation = Disaggregation(roles, routers.make("least_kv"), *local)
    log = simulate_cluster(
        [new_engine(i) for i in range(size)],
        routers.make(router),
        workload,
        max_concurrency,
        staleness_ns=staleness_ns,
        disaggregation=disaggregation,
        interconnect=Interconnect(link, 1000, [1] * size, num_layers),
        changes=Changes(
            Supply(new_engine, roles, [start_up_ns] * size),
            failures,
            [
                # Up and down, so that engines are drained while they serve, and kept again.
                PoolScaling(pool, UpAndDown(scaling[1]), scaling[0], 1, 4)
                for pool in range(size)
                if scaling is not None and pool != 1
            ],
            None if moves_every_ns is None else MigrationPlan(Restless(), moves_every_ns, *stages),
        ),
    )
    return log, last


@pytest.mark.slow
@given(fleets())
@settings(max_examples=25)
def test_nobody_is_lost_or_answered_twice_when_engines_die(fleet):
    log, engines = run(**fleet)
    requests = log.requests()
    assert requests["id"].tolist() == [a.request.id for a in fleet["workload"]]
    losses = {}
    for loss in log.losses:
        losses.setdefault(loss.id, []).append(loss)
    for i, a in enumerate(fleet["workload"]):
        times = log.token_times(a.request.id)
        assert len(times) == requests["generated_tokens"][i]
        assert (np.diff(times) > 0).all()
        lost = losses.get(a.request.id, [])
        if requests["status"][i] == REJECTED:
            assert requests["finish_ns"][i] == -1
        else:
            assert len(times) == min(a.output_tokens, a.request.max_tokens)
            assert len(lost) <= fleet["failures"].max_retries
            assert not lost or lost[-1].at_ns <= requests["finish_ns"][i]
    for place, engine in engines.items():
        if fleet["scaling"] is None and log.places[place].served[-1].until_ns < 0:
            assert engine.kv.free_blocks == engine.kv.num_blocks


@pytest.mark.slow
@given(fleets())
@settings(max_examples=25)
def test_request_that_moves_has_no_token_until_its_kv_is_there(fleet):
    log, _ = run(**fleet)
    prompts = {a.request.id: a.request.prompt_tokens for a in fleet["workload"]}
    for move in log.moves:
        assert move.start_ns <= move.stop_ns <= move.end_ns
        assert move.from_engine != move.to_engine
        times = log.token_times(move.id)
        stopped = (times > move.stop_ns) & (times <= move.end_ns)
        assert not stopped.any()
        # All that was computed when it stopped was sent, once.
        computed = prompts[move.id] + np.count_nonzero(times <= move.stop_ns) - 1
        assert move.num_bytes == 1000 * computed
        least_ns = move.num_stages * fleet["link"].latency_s * 1e9
        least_ns += move.num_bytes / fleet["link"].bytes_per_s * 1e9
        assert move.end_ns - move.start_ns >= least_ns - 1


@pytest.mark.slow
@given(fleets())
@settings(max_examples=15)
def test_no_step_is_taken_by_a_dead_engine(fleet):
    log, _ = run(**fleet)
    steps = log.steps()
    for engine, place in enumerate(log.places):
        here = steps["engine"] == engine
        begin, end = steps["start_ns"][here], steps["end_ns"][here]
        up = np.zeros(len(begin), dtype=bool)
        for span in place.served:
            up |= (begin >= span.from_ns) & ((end <= span.until_ns) | (span.until_ns < 0))
        assert up.all()


@pytest.mark.slow
@given(fleets())
@settings(max_examples=25)
def test_fleet_that_fails_gives_the_same_bytes_again_and_step_by_step(fleet):
    one, again, slow = (run(**fleet, fast=fast)[0] for fast in (True, True, False))
    for other in (again, slow):
        assert one.losses == other.losses
        assert one.transfers == other.transfers
        assert one.moves == other.moves
        assert one.places == other.places
        assert one.reject_reasons == other.reject_reasons
        for mine, its in zip(one.of_engines, other.of_engines, strict=True):
            assert laws.signature(mine) == laws.signature(its)
