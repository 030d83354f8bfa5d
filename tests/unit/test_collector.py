"""A run may go without Python's search for reference cycles, because it makes none."""

import gc
from dataclasses import replace

import pytest

from schedlab.policies import registry
from schedlab.policies.routers.vllm import Vllm
from schedlab.sim.config import EngineConfig
from schedlab.sim.drive.cluster import simulate_cluster
from schedlab.sim.drive.collector import collector_off
from tests import laws
from tests.laws import arrival

KNOBS = {
    "multi_bin": {"bin_edges": [8, 16]},
    "nested_wait": {"output_edges": [4, 12], "total_limit": 12},
    "prompt_buckets": {"bucket_edges": [10, 30]},
    "wait": {"output_edges": [4, 12], "total_limit": 12},
}
# Short of memory, so that requests are preempted.
CONFIG = EngineConfig(num_blocks=14, max_model_len=40, block_size=4, max_num_seqs=4)


@pytest.fixture(autouse=True, scope="module")
def _everything_else_left_out():
    """Keep what the other tests hold out of each search: that takes longer than the runs."""
    gc.collect()
    gc.freeze()


def workload(count):
    return [
        arrival(
            i, 4_000 * i, 5 + i % 9, 3 + i % 17, predicted_tokens=9.0,
            prefix_hash_ids=tuple(100 * (i % 3) + b for b in range((5 + i % 9) // 4)),
        )
        for i in range(count)
    ]  # fmt: skip


def garbage(policy, count, **options):
    """Count the objects of a run that only a search for cycles finds, its engine still there."""
    engines = []
    config = replace(CONFIG, **options.pop("changes", {}))
    made = registry.make(policy, **KNOBS.get(policy, {}))
    gc.collect()
    with collector_off():
        laws.run(made, workload(count), config, prove=False, observer=engines.append, **options)
        return gc.collect()


def assert_does_not_grow(policy, **options):
    garbage(policy, 10, **options)  # whatever is made once is made now
    few, many = (garbage(policy, count, **options) for count in (10, 40))
    assert many <= few + 10


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.names())
def test_garbage_of_a_run_does_not_grow_with_its_requests(name):
    assert_does_not_grow(name)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"enable_prefix_caching": True}, {"async_scheduling": True}])
def test_garbage_does_not_grow_with_requests_whatever_the_engine_does(changes):
    assert_does_not_grow("fcfs", changes=changes)


@pytest.mark.parametrize("clients", [None, 3])
def test_garbage_of_several_engines_does_not_grow_with_their_requests(clients):
    def drive(engine, arrivals):
        return simulate_cluster([engine], Vllm(), arrivals, max_concurrency=clients)

    assert_does_not_grow("fcfs", drive=drive)


@pytest.mark.parametrize("was_on", [True, False])
def test_collector_is_left_as_it_was_also_after_an_error(was_on):
    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with pytest.raises(ZeroDivisionError), collector_off():
            1 / gc.isenabled()
        assert gc.isenabled() is was_on
    finally:
        (gc.enable if before else gc.disable)()
