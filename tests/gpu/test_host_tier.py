"""The host tier by itself: what lies where, and which copy waits for which."""

import threading
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from schedlab.gpu_backend.copy_lane import ThreadLane  # noqa: E402
from schedlab.gpu_backend.host_blocks import HostBlocks  # noqa: E402
from schedlab.gpu_backend.host_tier import HostTier  # noqa: E402
from tests.gpu.lanes import LazyLane  # noqa: E402


def make(num_host_blocks=8, lane=LazyLane):
    pools = [(torch.rand(12, 2, 4, 8), torch.rand(12, 2, 4, 8)) for _ in range(2)]
    return HostTier(HostBlocks(pools, num_host_blocks), lane(), lane()), pools


def contents(pools, block):
    return torch.stack([pool[block] for pair in pools for pool in pair]).clone()


def wipe(pools, *blocks):
    for pair in pools:
        for pool in pair:
            pool[list(blocks)] = 0.0


@pytest.mark.parametrize("lane", [LazyLane, ThreadLane])
def test_blocks_are_loaded_by_name_wherever_they_lay_before(lane):
    tier, pools = make(lane=lane)
    before = {name: contents(pools, block) for name, block in ((70, 1), (71, 2), (72, 3))}
    tier.store([70, 71, 72], np.array([1, 2, 3])).wait()
    wipe(pools, 1, 2, 3)
    tier.load([72, 70], np.array([9, 2])).wait()
    assert torch.equal(contents(pools, 9), before[72])
    assert torch.equal(contents(pools, 2), before[70])
    assert not contents(pools, 1).any()


def test_request_that_comes_back_at_once_waits_for_its_way_out():
    tier, pools = make()
    before = contents(pools, 4)
    tier.swap_out(1, np.array([4]))
    tier.swap_in(1, np.array([5])).wait()
    assert torch.equal(contents(pools, 5), before)


def test_load_into_a_block_that_is_being_stored_waits_for_that():
    tier, pools = make()
    old, other = contents(pools, 1), contents(pools, 2)
    tier.store([2], np.array([2])).wait()
    tier.store([1], np.array([1]))
    assert list(tier.reading) == [2, 1]
    tier.load([2], np.array([1])).wait()
    assert torch.equal(contents(pools, 1), other)
    tier.load([1], np.array([3])).wait()
    assert torch.equal(contents(pools, 3), old)


def test_settled_copies_leave_their_blocks_free_to_write():
    tier, _ = make()
    first = tier.store([1], np.array([1]))
    tier.store([2], np.array([2]))
    first.wait()
    tier.settle()
    assert list(tier.reading) == [2]


def test_host_blocks_are_handed_out_again_when_they_are_evicted_or_forgotten():
    tier, pools = make(num_host_blocks=2)
    tier.store([1, 2], np.array([1, 2])).wait()
    tier.places.evict([1])
    tier.swap_out(7, np.array([3]))
    expected = contents(pools, 3)
    tier.swap_in(7, np.array([4])).wait()
    assert torch.equal(contents(pools, 4), expected)
    tier.forget(7)
    tier.forget(7)
    tier.store([5], np.array([6])).wait()
    tier.load([2], np.array([7])).wait()


@pytest.mark.parametrize("is_done", [False, True])
def test_request_that_goes_leaves_its_host_blocks_free_were_it_still_on_its_way_out(is_done):
    tier, pools = make(num_host_blocks=3)
    tier.store([5], np.array([6])).wait()
    expected = contents(pools, 3)
    ticket = tier.swap_out(7, np.array([1, 2]))
    if is_done:
        ticket.wait()
    tier.forget(8)
    tier.places.check([*tier._swapped[7]])
    tier.forget(7)
    assert ticket.is_done(), "nobody may write there before"
    tier.places.check([])
    tier.store([3, 4], np.array([3, 4])).wait()
    tier.load([3], np.array([9])).wait()
    assert torch.equal(contents(pools, 9), expected)


def test_thread_copies_in_order_and_beside_the_caller():
    lane, gate, done = ThreadLane(), threading.Event(), []
    first = lane.order(lambda: (gate.wait(), done.append(1)))
    second = lane.order(lambda: done.append(2))
    assert not first.is_done()
    assert first.wait(0.001) is False
    gate.set()
    assert second.wait() is True
    assert done == [1, 2]
    begun_ns, ended_ns = second.times_ns()
    assert first.times_ns()[1] <= begun_ns <= ended_ns <= time.perf_counter_ns()


def test_thread_waits_for_copies_of_the_other_direction():
    out, back, gate = ThreadLane(), ThreadLane(), threading.Event()
    stored = out.order(gate.wait)
    loaded = back.order(lambda: None, [stored])
    assert loaded.wait(0.005) is False
    gate.set()
    assert loaded.wait() is True


def test_error_of_a_copy_in_a_thread_is_raised_where_it_is_waited_for():
    def fail():
        raise RuntimeError("no such memory")

    ticket = ThreadLane().order(fail)
    with pytest.raises(RuntimeError, match="no such memory"):
        ticket.wait()
