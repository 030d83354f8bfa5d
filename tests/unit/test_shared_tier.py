"""A tier of KV that the engines of a fleet have together."""

from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest

from schedlab import core
from schedlab.experiments.running.run import run as run_experiment
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies import registry
from schedlab.policies.routers import registry as routers
from schedlab.policies.routers.router import Router
from schedlab.sim.config import EngineConfig, KVTier
from schedlab.sim.core.audit import check_conservation
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.tiering import Tiering
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.clock import COMES, NUM_PLACES, Clock
from schedlab.sim.drive.cluster import Changes, simulate_cluster
from schedlab.sim.drive.failures import Failures, Outage
from schedlab.sim.drive.members import Supply
from schedlab.sim.drive.server import Server
from schedlab.sim.errors import SpecError
from schedlab.sim.kv.ledger import NO_HIT
from schedlab.sim.kv.tier import SharedTier
from schedlab.sim.record.copies import Copies
from schedlab.sim.request import RequestState
from tests.laws import LinearCost, arrival

BLOCK = 16
DOCUMENT = tuple(range(8))
HOST = KVTier("cpu", 100, 1e9, 1e9)  # 100 bytes a block: 100 ns
STORE = KVTier("store", 100, 1e9, 0.5e9, 30, 40, is_shared=True)
CONFIG = EngineConfig(
    num_blocks=60, max_model_len=400, enable_prefix_caching=True, kv_block_bytes=100,
    swap_space_blocks=100, kv_tiers=(HOST, STORE),
)  # fmt: skip


def asks(request_id, at_ns, output_tokens=1):
    """Ask for all blocks of the document and a token more."""
    return arrival(request_id, at_ns, 8 * BLOCK + 1, output_tokens, prefix_hash_ids=DOCUMENT)


def run(work, size=2, config=CONFIG, outages=(), router="round_robin"):
    def engine(_=0):
        return Engine(
            config, registry.make("fcfs"), SimExecutor(Pricing(LinearCost(1000, 10, 0))),
            check_conservation,
        )  # fmt: skip

    changes = None
    if outages:
        supply = Supply(engine, ["mixed"] * size, [10] * size)
        changes = Changes(supply, Failures(outages=outages))
    engines = [engine() for _ in range(size)]
    made = routers.make(router) if isinstance(router, str) else router
    return simulate_cluster(engines, made, work, changes=changes)


def copies(log, tier, is_load):
    found = []
    for engine, one in zip(log.engines, log.of_engines, strict=True):
        rows = one.copies.columns()
        for i, kind in enumerate(rows["is_load"]):
            if (rows["tier"][i], kind) == (tier, is_load):
                found.append((engine, *(int(rows[c][i]) for c in ("id", "num_blocks", "start_ns",
                                                                  "done_ns"))))  # fmt: skip
    return found


# The document is computed in 1000 + 129 * 10 ns; its blocks are in the host's memory 800 ns later,
# and in the store 1600 + 40 ns after that.
COMPUTED_NS = 2290
WRITTEN_NS = COMPUTED_NS + 800 + 1640


def test_what_one_engine_wrote_another_loads():
    log = run([asks(0, 0), asks(1, WRITTEN_NS)])
    assert copies(log, 1, 0) == [(0, 0, 8, COMPUTED_NS + 800, WRITTEN_NS)]
    assert copies(log, 1, 1) == [(1, 1, 8, WRITTEN_NS, WRITTEN_NS + 830)]
    requests = log.requests()
    assert requests["prefix_hit_tokens"].tolist() == [0, 8 * BLOCK]
    assert requests["first_token_ns"].tolist() == [COMPUTED_NS, WRITTEN_NS + 830 + 1010]


def test_before_it_is_written_nobody_finds_it_and_it_is_not_written_twice():
    log = run([asks(0, 0), asks(1, WRITTEN_NS - 1)])
    assert copies(log, 1, 1) == []
    assert len(copies(log, 1, 0)) == 1
    assert log.requests()["first_token_ns"][1] == WRITTEN_NS - 1 + COMPUTED_NS


def test_each_engine_has_a_link_of_its_own_to_it():
    work = [asks(0, 0), asks(1, 9_000), asks(2, 9_000)]
    log = run(work, size=3)
    assert copies(log, 1, 1) == [(1, 1, 8, 9_000, 9_830), (2, 2, 8, 9_000, 9_830)]


def test_what_an_engine_was_writing_when_it_died_is_lost():
    work = [asks(0, 0), asks(1, 9_000)]
    dies = Outage(0, WRITTEN_NS - 1)
    log = run(work, outages=(dies,))
    assert copies(log, 1, 1) == []
    assert log.requests()["first_token_ns"][1] == 9_000 + COMPUTED_NS
    # Who died a nanosecond later has written it.
    log = run(work, outages=(dies._replace(at_ns=WRITTEN_NS),))
    assert len(copies(log, 1, 1)) == 1


@pytest.mark.slow
def test_what_one_of_many_engines_was_writing_when_another_died_is_not_lost():
    # Of engines as far apart as there are places in an instant, too.
    class There(Router):
        def route(self, request, engines):
            return request.id

    other = tuple(range(100, 108))
    work = [
        asks(0, 0), arrival(NUM_PLACES, 0, 8 * BLOCK + 1, 1, prefix_hash_ids=other),
        asks(1, 9_000),
    ]  # fmt: skip
    log = run(work, NUM_PLACES + 1, outages=(Outage(NUM_PLACES, WRITTEN_NS - 1),), router=There())
    assert len(copies(log, 1, 1)) == 1


def test_what_an_engine_was_reading_when_it_died_can_be_evicted_again():
    small = replace(CONFIG, kv_tiers=(HOST, replace(STORE, num_blocks=8)))
    other = tuple(range(100, 108))
    work = [
        asks(0, 0), asks(1, 9_000),
        arrival(2, 20_000, 8 * BLOCK + 1, 1, prefix_hash_ids=other),
        arrival(3, 40_000, 8 * BLOCK + 1, 1, prefix_hash_ids=other),
    ]  # fmt: skip
    log = run(work, size=3, config=small, outages=(Outage(1, 9_100),))
    loads = [row[:3] for row in copies(log, 1, 1)]
    assert (1, 1, 8) in loads, "it was reading"
    assert (0, 3, 8) in loads, "the other document is there, in the place of the first"


def test_what_an_engine_had_read_before_it_died_is_still_there_and_read_by_others():
    # The second engine has read the document when it dies; the third is reading it just then.
    small = replace(CONFIG, kv_tiers=(HOST, replace(STORE, num_blocks=8)))
    work = [asks(0, 0), asks(1, 9_000), asks(2, 9_500), asks(3, 30_000)]
    log = run(work, size=3, config=small, outages=(Outage(1, 10_000),))
    assert copies(log, 1, 1) == [(1, 1, 8, 9_000, 9_830), (2, 2, 8, 9_500, 10_330)]
    assert log.requests()["prefix_hit_tokens"].tolist() == [0] + 3 * [8 * BLOCK]


def test_what_one_engine_wrote_gives_way_to_what_another_writes_once_it_is_there():
    # Nobody has looked at the store since the first began to write to it.
    small = replace(CONFIG, kv_tiers=(HOST, replace(STORE, num_blocks=8)))
    other = tuple(range(100, 108))

    def written(at_ns):
        work = [
            asks(0, 0),
            arrival(1, at_ns, 8 * BLOCK + 1, 1, prefix_hash_ids=other),
        ]
        return copies(run(work, config=small), 1, 0)

    in_host_ns = COMPUTED_NS + 800
    first = (0, 0, 8, in_host_ns, WRITTEN_NS)
    asked_ns = WRITTEN_NS - in_host_ns
    assert written(asked_ns - 1) == [first]
    assert written(asked_ns) == [first, (1, 1, 8, WRITTEN_NS, WRITTEN_NS + 1640)]


def test_tier_that_is_shared_forgets_the_writes_of_one_engine_and_no_others():
    tier = SharedTier(replace(STORE, num_blocks=4))
    assert tier.add([1, 2]) == ([1, 2], [])
    assert tier.add([3]) == ([3], [])
    tier.comes([1, 2], 50, writer=0)
    tier.comes([3], 60, writer=1)
    versions = [tier.version]
    tier.settle(49)
    assert [tier.has(name) for name in (1, 2, 3)] == [False] * 3
    tier.lose(0, 49)
    assert tier.names == [3]
    tier.settle(60)
    versions.append(tier.version)
    assert tier.has(3)
    assert versions[0] != versions[1]
    tier.check()
    assert tier.add([4, 5, 6, 7]) == ([4, 5, 6, 7], [3])
    assert tier.version != versions[1]


def test_shared_tier_has_at_any_time_what_living_engines_have_written_by_then():
    draw = Random(2)
    for _ in range(30):
        tier, writes, name = SharedTier(replace(STORE, num_blocks=100)), [], 0
        for _ in range(draw.randint(1, 9)):
            names = list(range(name, name := name + draw.randint(1, 3)))
            writes.append((draw.randint(1, 40), draw.randrange(3), names))
            tier.add(names)
            tier.comes(names, writes[-1][0], writes[-1][1])
        dead, died_ns = draw.randrange(3), draw.randint(0, 40)
        tier.lose(dead, died_ns)
        for now_ns in range(died_ns, 42):
            tier.settle(now_ns)
            for done_ns, writer, names in writes:
                there = done_ns <= (died_ns if writer == dead else now_ns)
                assert [tier.has(one) for one in names] == [there] * len(names)
        tier.check()


def test_engine_finds_in_a_shared_tier_what_others_wrote_and_lost_since_it_asked_last():
    limits = replace(CONFIG, kv_load="always")
    tiering, store = Tiering(limits, lambda shape, k: 1, Copies()), SharedTier(STORE)
    tiering.share(store, writer=0)
    state = RequestState(asks(0, 0).request)

    def found(now_ns):
        tiering.settle(now_ns)
        return tiering.find(state, NO_HIT)

    assert found(10) == ()
    store.add([0, 1])
    store.comes([0, 1], 50, writer=1)
    assert found(49) == ()
    assert found(50) == ((1, (0, 1)),)
    store.add([2])
    store.comes([2], 70, writer=1)
    assert found(69) == ((1, (0, 1)),)
    assert found(70) == ((1, (0, 1, 2)),)
    assert store.add(range(100, 198))[1] == [1]  # the end of what was written first
    assert found(70) == ((1, (0,)),)
    tiering.keep(found(70))
    assert store.add([300, 301]) == ([300], [2]), "what is read is not evicted"
    assert found(70) == ((1, (0,)),)
    tiering.abandon(70)  # nobody reads it any more
    assert store.add([301])[1] == [0]
    assert found(70) == ()


@pytest.mark.skipif(core.running() != "python", reason="compiled code refuses stand-ins")
@pytest.mark.parametrize(
    ("places", "order"),
    [
        ((0, 1), ["end 0", "end 1", "plan 0", "plan 1"]),
        ((None, None), ["end 1", "plan 1", "end 0", "plan 0"]),  # as they were asked for
    ],
)
def test_engines_with_places_end_their_steps_by_place_before_any_plans(places, order):
    clock, did = Clock(), []

    def server(number, place):
        segment = SimpleNamespace(end_ns=10)
        segments = iter([segment, None])
        engine = SimpleNamespace(
            begin=lambda now_ns: (did.append(f"plan {number}"), next(segments))[1],
            commit=lambda: did.append(f"end {number}"),
            wait_until_ns=FOREVER,
        )
        live = SimpleNamespace(segment=None, has_changed=lambda segment: None)
        return Server(clock, engine, live, place=place)

    servers = [server(number, place) for number, place in enumerate(places)]
    for one in reversed(servers):
        clock.at(0, COMES, lambda event, one=one: one._plan_now(event))
    clock.run()
    assert did == ["plan 1", "plan 0", *order]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kv_tiers": (replace(STORE),)}, "below one that each engine has for itself"),
        ({"kv_tiers": (HOST, STORE, replace(HOST, name="disk"))}, "the last one may be shared"),
        ({"offloading_connector": True}, "offloading_connector waits for what is being stored"),
    ],
)
def test_tier_that_cannot_be_shared_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **keys)


OFFLOAD = {
    "tiers": [
        {"name": "cpu", "gib": 2, "link": "pcie-4"},
        {"name": "store", "gib": 50, "link": "ethernet-100g", "shared": True},
    ]
}


def experiment(**keys):
    return make_spec(
        {
            "engine": {
                "enable_prefix_caching": True, "kv_offload": OFFLOAD,
                "num_gpu_blocks_override": 700, "max_model_len": 8192,
            },
            "workload": {
                "session_rate": 1.0,
                "sessions": {
                    "count": 12, "turns": 4, "new_tokens": 600, "output_tokens": 40,
                    "think_s": {"distribution": "fixed", "seconds": 5},
                },
            },
            **keys,
        }
    )  # fmt: skip


def test_store_of_an_experiment_finds_what_other_engines_said():
    asked = experiment(cluster={"count": 3, "router": "round_robin"})
    together = run_experiment(asked).metrics()
    data = asked.to_data()
    data["engine"]["kv_offload"]["tiers"][1]["shared"] = False
    apart = run_experiment(make_spec(data)).metrics()
    assert together["tier_hit_tokens(tier=store)"] > 2 * apart["tier_hit_tokens(tier=store)"]
    assert together["prefix_hit_share"] > 1.2 * apart["prefix_hit_share"]


def test_store_of_one_engine_is_refused_with_the_key():
    with pytest.raises(
        SpecError, match=r"engine.kv_offload.tiers\[1\].shared: there is one engine"
    ):
        experiment()


def test_store_that_is_not_the_last_tier_is_refused_with_the_key():
    data = experiment(cluster=2).to_data()
    data["engine"]["kv_offload"]["tiers"].reverse()
    with pytest.raises(SpecError, match=r"tiers\[0\]\.shared: only the last tier"):
        make_spec(data)
