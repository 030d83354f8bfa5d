"""Sessions for tests: drawn at random, written token by token, and run on every driver."""

import random

from schedlab.policies import registry
from schedlab.policies.routers import registry as routers
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.cluster import simulate_cluster
from schedlab.sim.request import Arrival, Request, Turn
from tests import laws


def requests(session, first_id, start_ns, rows):
    """Return the requests of a session; a row is parents (places), delay, prompt and output."""
    return [
        Arrival(
            Request(first_id + i, start_ns, prompt, 1 << 20, session=session, predicted_tokens=1.0),
            output,
            start_ns,
            Turn(tuple(first_id + parent for parent in parents), delay_ns),
        )
        for i, (parents, delay_ns, prompt, output) in enumerate(rows)
    ]


def drawn(seed, num_sessions=8, longest=100):
    """Draw sessions of chains, fans and joins that start now and then."""
    draw = random.Random(seed)
    workload, now_ns = [], 0
    for number in range(num_sessions):
        now_ns += draw.choice([0, 1, 700, 3_000, 40_000])
        rows, used = [], 0
        for i in range(draw.randint(1, 6)):
            parents = sorted(draw.sample(range(i), min(i, draw.choice([0, 1, 1, 2, 3]))))
            used = min(used + draw.randint(1, 25), longest - 30)
            rows.append((parents, draw.choice([0, 0, 1, 5_000, 60_000]), used, draw.randint(1, 30)))
        workload += requests(f"s{number}", len(workload), now_ns, rows)
    return workload


def run_cluster(policy, workload, config, router="session_affinity", joint=None, **options):
    """Run a workload on three engines; return the log, everything conserved."""
    engines = [
        Engine(config, registry.make(policy), SimExecutor(Pricing(laws.LinearCost())))
        for _ in range(3)
    ]
    log = simulate_cluster(engines, routers.make(router, 0), workload, lockstep=joint, **options)
    for engine in engines:
        laws.check_conservation(engine)
        assert engine.kv.free_blocks == engine.kv.num_blocks
    return log


def check_order(log, workload):
    """Require that nobody is sent before the answers that it needs and its delay."""
    columns = log.requests()
    at = {int(i): row for row, i in enumerate(columns["id"])}
    assert sorted(at) == sorted(a.request.id for a in workload)
    for arrival in workload:
        row = at[arrival.request.id]
        came_ns = int(columns["arrival_ns"][row])
        after_ns = [int(columns["finish_ns"][at[parent]]) for parent in arrival.turn.parents]
        if -1 in after_ns:
            assert log.reject_reasons[arrival.request.id].startswith("never sent")
        else:
            assert came_ns == max(after_ns, default=arrival.request.arrival_ns) + (
                arrival.turn.delay_ns
            )
