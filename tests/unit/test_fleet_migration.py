import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from schedlab.experiments.running import fleet
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.cluster import Cluster
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies import ContinuousBatching, registry
from schedlab.policies.migrators import registry as migrators
from schedlab.policies.migrators.migrator import Migrator
from schedlab.policies.routers import registry as routers
from schedlab.policies.routers.llumnix import freeness
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.audit import check_conservation
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive import migration as moving
from schedlab.sim.drive.cluster import Changes, simulate_cluster
from schedlab.sim.drive.disaggregation import Disaggregation
from schedlab.sim.drive.engine_state import Candidate
from schedlab.sim.drive.links import Interconnect
from schedlab.sim.drive.members import Supply
from schedlab.sim.drive.migration import MigrationPlan
from schedlab.sim.errors import PolicyError, SpecError
from schedlab.sim.hardware.link import Link
from schedlab.sim.record.cluster_log import Move
from tests.laws import LinearCost, arrival

FLEETS = Path(__file__).resolve().parents[2] / "docs" / "fleets.md"
CONFIG = EngineConfig(num_blocks=200, max_model_len=100, block_size=4, max_num_seqs=4)
JOINS = Interconnect(Link(1e12, 50e-9, "a test"), 1000, [1, 1])  # a token a nanosecond


class FromFirst(Migrator):
    def pairs(self, candidates):
        return [(0, 1)]


def simulate(
    workload, migrator=None, every_ns=2_000, last_stage_blocks=1, joins=JOINS, policy=None
):
    def new_engine(pool):
        executor = SimExecutor(Pricing(LinearCost(1000, 10, 0)))
        made = policy() if policy else registry.make("fcfs")
        return Engine(CONFIG, made, executor, check_conservation)

    plan = MigrationPlan(migrator or FromFirst(), every_ns, last_stage_blocks)
    return simulate_cluster(
        [new_engine(0), new_engine(1)],
        routers.make("round_robin"),
        workload,
        interconnect=joins,
        changes=Changes(Supply(new_engine, ["mixed"] * 2, [0, 0]), migration=plan),
    )


def test_stages_of_a_move_add_up():
    log = simulate([arrival(0, 0, 20, 5)], every_ns=2_000)
    # Asked at 2000; the step ends at 2210 with 21 tokens computed: 50 + 21 ns. The next one ends
    # at 3220: it stops, for 50 + 1 ns, and goes on with 1010 ns a token.
    assert log.moves == [Move(0, 0, 1, 2_210, 3_220, 3_271, 22_000, 2)]
    assert log.token_times(0).tolist() == [1_200, 2_210, 3_220, 4_281, 5_291]
    row = {name: column[0] for name, column in log.requests().items()}
    assert (row["engine"], row["num_moves"], row["moved_stop_ns"]) == (1, 1, 51)
    assert row["moved_bytes"] == 22_000


def test_policy_hears_that_a_request_leaves_and_that_it_is_complete_where_it_ends():
    heard = []

    class Listens(ContinuousBatching):
        def __init__(self):
            self.engine = len(made)
            made.append(self)

        def on_finish(self, state, now_ns):
            heard.append((self.engine, state.is_complete, state.num_output_tokens))

    made = []
    simulate([arrival(0, 0, 20, 5)], policy=Listens)
    assert heard == [(0, False, 3), (1, True, 5)]


def test_last_stage_of_a_move_is_measured_in_blocks():
    # 150 ns a token: the 21 tokens of the first stage take three steps, of a token each.
    slow = Interconnect(Link(1e12 / 150, 50e-9, "a test"), 1000, [1, 1])
    (move,) = simulate([arrival(0, 0, 20, 12)], joins=slow).moves
    assert (move.num_stages, move.num_bytes) == (2, 25_000)
    assert simulate([arrival(0, 0, 20, 12)], joins=slow, last_stage_blocks=0).moves == []


@pytest.mark.parametrize(
    ("has_tokens", "tokens", "fits"), [(4, 3, True), (4, 4, False), (5, 2, True), (5, 6, True),
                                       (5, 7, False), (3, 0, True), (4, 0, True)]
)  # fmt: skip
def test_move_needs_room_for_its_tokens_and_for_the_next_one(has_tokens, tokens, fits):
    config = EngineConfig(num_blocks=10, max_model_len=40, block_size=4)
    target = SimpleNamespace(
        engine=SimpleNamespace(config=config), live=SimpleNamespace(used_blocks=9)
    )
    assert moving._can_grow(target, has_tokens, tokens) is fits


def test_move_of_a_request_that_ends_meanwhile_is_given_up():
    log = simulate([arrival(0, 0, 20, 3)])
    assert log.moves == []
    assert log.requests()["engine"].tolist() == [0]


class LetsNewcomersWait(ContinuousBatching):
    """Serves nobody's answer who came to its engine less than 3000 ns ago."""

    def plan(self, view, builder):
        self.seen = getattr(self, "seen", {})
        for state in view.running:
            since_ns = self.seen.setdefault(id(state), (state, view.now_ns))[1]
            if state.is_decoding and view.now_ns < since_ns + 3_000:
                return builder.build(until_ns=since_ns + 3_000)
        return super().plan(view, builder)


def test_request_that_waits_for_longer_than_it_stays_moves_once_a_token():
    restless = SimpleNamespace(pairs=lambda _: [(0, 1), (1, 0)], victim=lambda _: 0)
    log = simulate([arrival(0, 0, 20, 4)], restless, every_ns=400, policy=LetsNewcomersWait)
    assert len(log.moves) >= 2
    for before, after in pairwise(log.moves):
        assert any(before.end_ns < at <= after.start_ns for at in log.token_times(0))


class Nowhere(Migrator):
    def __init__(self, place):
        self.place = place

    def pairs(self, candidates):
        return [(0, self.place)]


@pytest.mark.parametrize("place", [0, 2])
def test_migrator_that_names_no_other_engine_is_blamed(place):
    with pytest.raises(PolicyError, match=rf"Nowhere: pairs\(\) named \(0, {place}\)"):
        simulate([arrival(0, 0, 20, 5)], Nowhere(place))


def engine(
    used_blocks=0,
    running=1,
    first_waiting_blocks=0,
    num_urgent=0,
    waiting=0,
    waiting_blocks=0,
    num_preempted=0,
):
    return SimpleNamespace(
        used_blocks=used_blocks, num_blocks=100, num_running=running, num_urgent=num_urgent,
        first_waiting_blocks=first_waiting_blocks, num_waiting=waiting,
        waiting_blocks=waiting_blocks, num_preempted=num_preempted,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("state", "blocks"),
    [
        (engine(40, 4), 15.0),
        (engine(40, 4, first_waiting_blocks=20), 10.0),
        (engine(90, 5, first_waiting_blocks=20), -2.0),
        (engine(40, 4, num_urgent=1), 2.5),
        (engine(0, 0), 100.0),
    ],
)
def test_freeness_counts_what_waits_and_headroom_for_the_urgent(state, blocks):
    assert freeness(state, headroom=0.5) == blocks


@pytest.mark.parametrize(
    ("state", "blocks"),
    [
        (engine(40, 4), 15.0),
        (engine(40, 4, waiting=2, first_waiting_blocks=10, waiting_blocks=30), 5.0),
        (engine(80, 1, waiting=4, waiting_blocks=30), -2.0),
        (engine(40, 4, num_urgent=1), 15.0),  # no headroom
        (engine(0, 0), float("inf")),
        (engine(10, 0), float("inf")),
    ],
)
def test_freeness_of_the_code_counts_all_who_wait_and_divides_by_them_too(state, blocks):
    assert freeness(state, headroom=0.5, rule="code") == blocks


def test_migrator_and_router_go_by_the_freeness_of_the_rule_they_are_given():
    states = [
        engine(10, 9, waiting=0),
        engine(10, 9, first_waiting_blocks=2, waiting=9, waiting_blocks=89),
    ]
    candidates = [Candidate(state, False) for state in states]
    knobs = {"leave_below": 3.0, "enter_above": 3.0}
    assert migrators.make("llumnix", **knobs).pairs(candidates) == []
    assert migrators.make("llumnix", rule="code", **knobs).pairs(candidates) == [(1, 0)]
    routed = [engine(10, 4, waiting=9, waiting_blocks=9), engine(30, 5)]  # 22.5 and 14; 6.2 and 14
    assert routers.make("llumnix").route(None, routed) == 0
    assert routers.make("llumnix", rule="code").route(None, routed) == 1
    for make in (routers.make, migrators.make):
        with pytest.raises(SpecError, match="rule must be paper or code, got 'ours'"):
            make("llumnix", rule="ours")


@pytest.mark.parametrize(
    ("source", "target", "moves"),
    [
        # 10 / 10 blocks free a request, 19 / 9 with one less; 60 / 10, and 56 / 11 with one more.
        (engine(90, 10), engine(40, 10), True),
        # 58 / 18, and 55.7 / 19 with one more, which is below 3.
        (engine(90, 10), engine(42, 18), False),
        # 10 / 2, and 55 / 1 with one less; 60 / 2, and 40 / 3 with one more: the other way round.
        (engine(90, 2), engine(40, 2), False),
        (engine(90, 2), engine(0, 0), True),  # an empty one takes it all the same
        (engine(90, 10), engine(40, 10, num_preempted=1), False),  # somebody waits for memory
    ],
)
def test_llumnix_by_its_code_moves_only_what_evens_out(source, target, moves):
    candidates = [Candidate(source, False), Candidate(target, False)]
    knobs = {"leave_below": 3.0, "enter_above": 3.0}
    if source.num_running == 2:
        knobs = {"leave_below": 6.0, "enter_above": 6.0}
    by_code = migrators.make("llumnix", rule="code", **knobs)
    assert by_code.pairs(candidates) == ([(0, 1)] if moves else [])
    drains = [Candidate(source, True), candidates[1]]
    assert by_code.pairs(drains) == ([] if target.num_preempted else [(0, 1)])
    assert migrators.make("llumnix", **knobs).pairs(candidates) == [(0, 1)]


def test_llumnix_by_its_code_leaves_engines_where_the_preempted_wait():
    # 40 / 10 blocks free a request, 46 / 9 with one less; 80 / 1, and 60 / 2 with one more.
    candidates = [Candidate(engine(60, 10, num_preempted=1), False), Candidate(engine(20), False)]
    assert migrators.make("llumnix", rule="code").pairs(candidates) == [(0, 1)]
    assert migrators.make("llumnix").pairs(candidates) == []


def test_llumnix_pairs_the_least_free_with_the_freest_and_empties_who_drains():
    states = [engine(90, 5), engine(10, 2), engine(97, 3), engine(20, 4), engine(50, 2)]
    drains = [False, False, False, False, True]
    candidates = [Candidate(s, d) for s, d in zip(states, drains, strict=True)]
    # Free: 2, 45, 1, 20 blocks a request, and the last one drains.
    assert migrators.make("llumnix").pairs(candidates) == [(4, 1), (2, 3)]
    # Of equals the first ones; who has nobody running has nobody to send.
    states = [engine(10, 2), engine(97, 3), engine(97, 3), engine(10, 2), engine(98, 0)]
    even = [Candidate(s, is_draining=False) for s in states]
    assert migrators.make("llumnix").pairs(even) == [(1, 0), (2, 3)]


def test_least_urgent_and_then_shortest_request_moves():
    def state(id_, priority, tokens):
        request = SimpleNamespace(priority=priority)
        return SimpleNamespace(id=id_, request=request, num_computed_tokens=tokens)

    decoding = [state(0, 0, 10), state(1, 5, 30), state(2, 5, 20)]
    assert migrators.make("llumnix").victim(decoding) == 2


def experiment(workload=None, engine=None, **cluster):
    workload = {"trace": "azure-conv", "num_requests": 60, "request_rate": 20.0, **(workload or {})}
    sizes = {"num_gpu_blocks_override": 400, "max_model_len": 4000, "max_num_seqs": 8}
    return make_spec({"workload": workload, "engine": sizes | (engine or {}), "cluster": cluster})


def test_migration_empties_an_engine_that_drains():
    scaler = {"name": "schedule", "times": [[1, 1]], "every_s": 0.5}
    few = {"num_requests": 12, "request_rate": 10.0}
    gone_ns = []
    for migration in (None, {"name": "llumnix", "every_ms": 10}):
        spec = experiment(few, count=2, autoscaler=scaler, migration=migration)
        result = run(spec)
        gone_ns.append(min(e.paid[0].until_ns for e in result.engines if e.paid[0].until_ns > 0))
        assert result.metrics()["completed"] == 12
    assert result.metrics()["num_moves"] == result.requests["num_moves"].sum() > 0
    stops_ms = result.requests["moved_stop_ns"].sum() / 1e6
    assert result.metrics()["mean_move_stop_ms"] == stops_ms / result.metrics()["num_moves"]
    assert 0 < result.metrics()["mean_move_stop_ms"] < 5
    assert gone_ns[1] < gone_ns[0]


def test_short_prompts_stay_where_answers_are_computed():
    def new_engine():
        return Engine(CONFIG, registry.make("fcfs"), SimExecutor(Pricing(LinearCost(1000, 10, 0))))

    def engines(local):
        plan = Disaggregation(["prefill", "decode"], routers.make("jsq"), *local)
        workload = [arrival(0, 0, 20, 2), arrival(1, 100, 8, 2), arrival(2, 200, 20, 2)]
        log = simulate_cluster(
            [new_engine(), new_engine()],
            routers.make("jsq"),
            workload,
            disaggregation=plan,
            interconnect=JOINS,
        )
        return log.requests()["prefill_engine"].tolist()

    assert engines((0, None)) == [0, 0, 0]
    assert engines((8, None)) == [0, -1, 0]
    # The second finds the first one's 20 tokens under way, and 20 are not more than 20.
    assert engines((0, 20)) == [0, 0, -1]


@pytest.mark.parametrize(
    ("cluster", "engine", "message"),
    [
        ({"migration": "lumnix"}, {}, "unknown migrator 'lumnix'.*llumnix"),
        ({"migration": {"name": "llumnix", "every_ms": 1e-9}}, {}, "every_ms: must be >= 0.01"),
        ({"migration": {"name": "llumnix", "headroom": 2}}, {}, "headroom must be in"),
        ({"migration": "llumnix"}, {"enable_prefix_caching": True}, "have no names"),
        ({"migration": "llumnix"}, {"async_scheduling": True}, "a pool whose requests move"),
        ({"migration": "llumnix", "count": 1}, {}, "migration: only one engine decodes"),
        ({"local": {"max_prompt_tokens": 9}}, {}, "local: only where prompts have engines"),
    ],
)
def test_moves_that_cannot_be_are_told(cluster, engine, message):
    with pytest.raises(SpecError, match=message):
        experiment(engine=engine, **{"count": 2, **cluster})


@pytest.mark.parametrize("roles", [("mixed", "mixed"), ("decode", "decode"), ("mixed", "decode")])
@pytest.mark.parametrize(
    ("formats", "drafters", "message"),
    [
        (("bf16", "bf16"), ("eagle", "eagle"), None),
        (("bf16", "bf16"), (None, None), None),
        (("bf16", "fp8"), (None, None), "kv_cache_dtype must be one .* got bf16 and fp8"),
        (("bf16", "bf16"), ("eagle", None), "must have one drafter .* got eagle and none"),
    ],
)
def test_requests_move_only_among_pools_that_keep_kv_alike_whatever_their_role(
    roles, formats, drafters, message
):
    kinds = [
        SimpleNamespace(
            role=role,
            point=SimpleNamespace(
                deployment=SimpleNamespace(kv_dtype=kv_format),
                speculation=drafter and SimpleNamespace(cached_drafter=drafter),
            ),
        )
        for role, kv_format, drafter in zip(roles, formats, drafters, strict=True)
    ]
    asked = SimpleNamespace(
        name="llumnix", knobs={"enter_above": 3.0}, every_ms=2.5, last_stage_blocks=7, max_stages=9
    )
    assert fleet.migration(SimpleNamespace(migration=None), kinds) is None
    if message is None:
        plan = fleet.migration(SimpleNamespace(migration=asked), kinds)
        assert (plan.every_ns, plan.last_stage_blocks, plan.max_stages) == (2_500_000, 7, 9)
        assert plan.migrator.enter_above == 3.0
    else:
        with pytest.raises(SpecError, match=message):
            fleet.migration(SimpleNamespace(migration=asked), kinds)


def test_document_lists_every_migrator_and_knob():
    text = FLEETS.read_text(encoding="utf-8")
    for name in migrators.names():
        row = re.search(rf"^\| `{name}` \| (.*leave.*)$", text, re.M)
        for knob in migrators.migrator_class(name).knobs():
            assert f"`{knob}`" in row[1], f"docs/fleets.md does not name {knob} of {name}"


@pytest.mark.parametrize(
    ("sizes", "own", "shared", "can_move"),
    [
        # Of pools, which decode, an autoscaler of their own goes before that of the fleet.
        ((1,), (None,), None, False),
        ((2,), (None,), None, True),
        ((1,), (2,), None, True),
        ((1,), (None,), 2, True),
        ((1,), (1,), 2, False),
        ((1,), (2,), 1, True),
        ((1, 1), (None, None), None, True),
        ((1, 1), (1, None), None, True),
    ],
)
def test_requests_can_move_where_two_engines_may_decode_at_once(sizes, own, shared, can_move):
    def scaler(most):
        return {"name": "kv_thresholds", "min": 1, "max": most}

    pools = {
        f"p{i}": {"count": size} | ({} if most is None else {"autoscaler": scaler(most)})
        for i, (size, most) in enumerate(zip(sizes, own, strict=True))
    }
    cluster = {"migration": "llumnix", "pools": pools}
    if shared is not None:
        cluster["autoscaler"] = scaler(shared)
    if can_move:
        Cluster.model_validate(cluster)
    else:
        with pytest.raises(ValueError, match="only one engine decodes"):
            Cluster.model_validate(cluster)
