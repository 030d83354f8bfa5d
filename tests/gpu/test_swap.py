from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from schedlab.gpu_backend import swap_timing  # noqa: E402
from schedlab.gpu_backend.executor import TorchExecutor  # noqa: E402
from schedlab.gpu_backend.host_blocks import HostBlocks  # noqa: E402
from schedlab.gpu_backend.swap import SwapSpace  # noqa: E402
from schedlab.sim.errors import SchedlabError  # noqa: E402
from tests.gpu.backend import CONFIG, tiny_runner  # noqa: E402


def make(num_host_blocks=40, num_blocks=50, allocate=True):
    shape = (num_blocks, 2, 4, 8)
    pools = [(torch.rand(shape), torch.rand(shape)) for _ in range(3)]
    host = HostBlocks(pools, num_host_blocks)
    if allocate:
        host.allocate()
    return SwapSpace(host), pools


@pytest.mark.parametrize("num_blocks", [1, 16, 21])
def test_swapped_blocks_come_back_in_order_wherever_they_are_put(num_blocks):
    swap, pools = make()
    old, new = np.arange(1, num_blocks + 1)[::-1].copy(), np.arange(25, 25 + num_blocks)
    before = [[pool[torch.from_numpy(old)].clone() for pool in pair] for pair in pools]
    swap.swap_out(0, old)
    swap.run()
    assert swap.num_used == num_blocks
    for pair in pools:
        for pool in pair:
            pool.zero_()
    swap.swap_in(0, np.append(new, 49))
    swap.run()
    assert swap.num_used == 0
    for pair, expected in zip(pools, before, strict=True):
        for pool, blocks in zip(pair, expected, strict=True):
            assert torch.equal(pool[torch.from_numpy(new)], blocks)
            assert not pool[49].any()


def test_blocks_that_change_hands_before_the_copies_run_keep_their_contents():
    swap, pools = make(num_host_blocks=1)
    first, second = pools[0][0][[1, 2]].clone()
    swap.swap_out(1, np.array([1]))
    swap.run()
    # Request 1 returns into block 2, which request 2 leaves, over the only host block.
    swap.swap_in(1, np.array([3]))
    swap.swap_out(2, np.array([2]))
    swap.run()
    assert torch.equal(pools[0][0][3], first)
    swap.swap_in(2, np.array([1]))
    swap.run()
    assert torch.equal(pools[0][0][1], second)


def test_swap_space_without_room_or_of_a_forgotten_request():
    swap, _ = make(num_host_blocks=2)
    swap.swap_out(1, np.array([1, 2]))
    with pytest.raises(SchedlabError, match="request 2 needs 1 blocks of swap space and 0 of 2"):
        swap.swap_out(2, np.array([3]))
    swap.forget(1)
    swap.forget(3)
    assert swap.num_used == 0


def test_swap_space_takes_no_memory_before_a_block_is_swapped_out(monkeypatch):
    sizes = []
    real_empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda size, **how: sizes.append(size) or real_empty(size, **how)
    )
    swap, pools = make(num_host_blocks=4, allocate=False)
    swap.run()
    assert sizes == []
    expected = pools[0][0][1].clone()
    swap.swap_out(0, np.array([1]))
    swap.run()
    assert sizes == [(4, 6, 2, 4, 8)]
    pools[0][0].zero_()
    swap.swap_in(0, np.array([2]))
    swap.run()
    assert torch.equal(pools[0][0][2], expected)


def test_runner_takes_swap_space_only_where_preemption_swaps():
    assert tiny_runner(replace(CONFIG, swap_space_blocks=2)).swap._host._memory is None
    swapping = replace(CONFIG, swap_space_blocks=2, preemption_mode="swap", kv_block_bytes=1)
    assert tiny_runner(swapping).swap._host._memory is not None


def test_swap_times_are_medians_of_what_comes_after_warming_up(monkeypatch):
    pools = [(torch.zeros(6, 1, 4, 2), torch.zeros(6, 1, 4, 2))] * 3
    ticks, begun = iter(range(1000)), []
    monkeypatch.setattr(swap_timing, "_run", lambda *_: next(ticks))
    monkeypatch.setattr(
        swap_timing, "SwapSpace", lambda *_: SimpleNamespace(
            swap_out=lambda _, blocks: begun.append(("out", len(blocks))) or copied.append(blocks),
            swap_in=lambda _, blocks: begun.append(("in", len(blocks))) or copied.append(blocks),
        ),
    )  # fmt: skip
    copied = []
    found = swap_timing.swap_times(SimpleNamespace(kv_pools=pools), lambda: 0)
    block_bytes = 3 * 2 * 4 * 2 * 4
    # Of 0, 2, ... 10 seconds out and 1, 3, ... 11 in the first is left out; 12 for each count.
    assert [tuple(one) for one in found] == [
        (way, n, n * block_bytes, 12.0 * i + 6 + (way == "in"))
        for i, n in enumerate((1, 4, 5))
        for way in ("out", "in")
    ]
    assert begun == [(way, n) for n in (1, 4, 5) for _ in range(6) for way in ("out", "in")]
    # All but the null block, scattered, and of fewer the first of them.
    *few, every = [copied[at].tolist() for at in (0, 12, 24)]
    assert sorted(every) == [1, 2, 3, 4, 5] != every
    assert few == [every[:1], every[:4]]
    assert all(blocks.tolist() == every for blocks in copied[24:])


@pytest.mark.parametrize(
    ("shares", "has_tiers", "asked"),
    [
        (False, False, ["pool", "swap"]), (False, True, ["pool"]),
        (True, False, ["kv", "swap"]), (True, True, ["kv"]),
    ],
)  # fmt: skip
def test_blocks_of_device_and_host_are_counted_where_they_are(shares, has_tiers, asked):
    told = []

    def counting(name):
        return SimpleNamespace(check=lambda engine: told.append((name, engine)))

    executor = SimpleNamespace(
        kv_bytes=counting("kv") if shares else None, pool=counting("pool"), _has_tiers=has_tiers,
        runner=SimpleNamespace(swap=counting("swap")),
    )  # fmt: skip
    TorchExecutor.check(executor, "engine")
    assert told == [(name, "engine") for name in asked]
