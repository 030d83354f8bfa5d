"""The laws, over every registered policy, random workloads and random limits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import registry
from tests import laws
from tests.workloads import configs, workloads

PARAMS = {"dynamic": {"max_batch_size": 3, "max_queue_delay_s": 5e-6}, "static": {}}
MAY_WAIT = {"dynamic"}


def make(name):
    return registry.make(name, **PARAMS.get(name, {}))


@pytest.mark.parametrize("name", registry.names())
@given(workload=workloads(), config=configs())
def test_policy_on_random_work_obeys_the_laws(name, workload, config):
    log = laws.run(make(name), workload, config)
    laws.check(log, workload, config, may_wait=name in MAY_WAIT)


@pytest.mark.parametrize("name", registry.names())
@given(workload=workloads(), config=configs())
def test_skipping_ahead_by_any_route_changes_no_bit(name, workload, config):
    fast = laws.signature(laws.run(make(name), workload, config))
    slow = laws.signature(laws.run(make(name), workload, laws.slow(config)))
    cut = laws.signature(laws.run(make(name), workload, config, lookahead=False))
    assert fast == slow
    assert fast == cut


@pytest.mark.parametrize("name", registry.names())
@given(workload=workloads(), config=configs())
def test_policy_replanned_at_every_step_keeps_its_promise(name, workload, config):
    checked = laws.run(make(name), workload, replace(config, check_horizon=True))
    assert laws.signature(checked) == laws.signature(laws.run(make(name), workload, config))


@pytest.mark.parametrize("name", registry.names())
@given(workload=workloads(), config=configs(), clients=st.integers(1, 6))
def test_closed_loop_never_exceeds_its_concurrency(name, workload, config, clients):
    most = 0

    def watch(engine):
        nonlocal most
        most = max(most, engine.num_in_flight)

    log = laws.run(make(name), workload, config, observer=watch, max_concurrency=clients)
    assert most <= clients
    requests = log.requests()
    assert len(requests["id"]) == len(workload)


@pytest.mark.parametrize("name", registry.names())
@given(workload=workloads(), config=configs(), lengths=st.randoms(use_true_random=False))
def test_policy_cannot_see_true_lengths(name, workload, config, lengths):
    """Plans are the same, whatever the true lengths, until a request finishes."""
    config = replace(config, kv_allocator="paged", fast_forward=False)
    other = [a._replace(output_tokens=lengths.randint(1, 40)) for a in workload]

    def decisions(requests):
        seen = []

        def watch(engine):
            if not (engine.num_finished or engine.num_rejected or engine.held):
                computed = {s.id: s.num_computed_tokens for s in engine.running.values()}
                seen.append((engine.now_ns, computed))

        laws.run(make(name), requests, config, observer=watch)
        return seen

    for first, second in zip(decisions(workload), decisions(other), strict=False):
        assert first == second
