"""A tier in a file by itself: where it lies, what it holds, and which copy waits for which."""

import errno
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from schedlab.gpu_backend import file_blocks  # noqa: E402
from schedlab.gpu_backend.copy_lane import ThreadLane  # noqa: E402
from schedlab.gpu_backend.file_blocks import FileBlocks, open_block_file  # noqa: E402
from schedlab.gpu_backend.file_tier import FileTier  # noqa: E402
from schedlab.gpu_backend.host_blocks import HostBlocks  # noqa: E402
from schedlab.gpu_backend.host_tier import HostTier  # noqa: E402
from schedlab.gpu_backend.places import Places  # noqa: E402
from schedlab.sim.errors import SchedlabError, SpecError  # noqa: E402
from tests.gpu.backend import files_in  # noqa: E402
from tests.gpu.lanes import EagerLane, LazyLane  # noqa: E402

BLOCK_BYTES = 4 * 2 * 4 * 8 * 4
KEY = "engine.kv_offload.tiers[1]"


def pools_of(num_blocks=40):
    return [(torch.rand(num_blocks, 2, 4, 8), torch.rand(num_blocks, 2, 4, 8)) for _ in range(2)]


def contents(pools, block):
    return torch.stack([pool[block] for pair in pools for pool in pair]).clone()


def file_of(pools, num_blocks=8, file=None):
    file = file or open_block_file(num_blocks * BLOCK_BYTES, None, KEY)
    return FileBlocks(pools, file, num_blocks, "tier disk of engine.kv_offload")


def make(num_host_blocks=8, num_file_blocks=(8,), host_lane=LazyLane, lane=LazyLane, **how):
    """Return the cache, the host's tier, and those in files below it."""
    pools = pools_of()
    tiers = [HostTier(HostBlocks(pools, num_host_blocks), host_lane(), host_lane())]
    for num_blocks in num_file_blocks:
        tiers.append(FileTier(file_of(pools, num_blocks, **how), tiers[-1], lane(), lane()))
    return pools, *tiers


# -- the file ------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="this system has no /proc")
def test_file_takes_its_room_has_no_name_and_is_gone_when_it_is_closed(tmp_path):
    file = open_block_file(5_000, tmp_path, KEY)
    assert list(tmp_path.iterdir()) == [], "an end of the process would leave it"
    assert os.fstat(file.fileno()).st_size == 5_000
    assert os.fstat(file.fileno()).st_blocks * 512 >= 5_000
    assert len(files_in(tmp_path)) == 1
    del file
    assert files_in(tmp_path) == []


def test_file_lies_in_the_systems_temporary_folder_unless_one_is_named(tmp_path, monkeypatch):
    made, temporary = [], tempfile.TemporaryFile
    monkeypatch.setattr(
        tempfile, "TemporaryFile", lambda dir, **how: made.append(dir) or temporary(dir=dir, **how)
    )
    open_block_file(10, None, KEY)
    open_block_file(10, tmp_path, KEY)
    assert made == [Path(tempfile.gettempdir()), tmp_path]


def test_folder_that_is_none_is_refused_by_its_key(tmp_path):
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        with pytest.raises(SpecError, match=rf"tiers\[1\]\.path: there is no folder .*{name}; "):
            open_block_file(10, tmp_path / name, KEY)


def test_folder_that_cannot_be_written_is_refused_by_its_key(tmp_path, monkeypatch):
    def refuse(**how):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(SpecError, match=r"tiers\[1\]\.path: no file can be made .*\(Permission de"):
        open_block_file(10, tmp_path, KEY)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system reserves no room")
def test_disk_without_room_is_refused_by_its_key_before_and_while_it_is_taken(
    tmp_path, monkeypatch
):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    message = rf"^engine\.kv_offload\.tiers\[1\]: 3\.00 GiB are to lie in {tmp_path}, where 2\.50 G"
    monkeypatch.setattr(file_blocks, "disk_usage", lambda _: SimpleNamespace(free=5 * 2**29))
    with pytest.raises(SpecError, match=message):
        open_block_file(3 * 2**30, tmp_path, KEY)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SpecError, match=r"tiers\[1\]: 1\.00 GiB are to lie in"):
        open_block_file(2**30, tmp_path, KEY)
    assert files_in(tmp_path) == []


# -- blocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1 << 20, 100])
def test_blocks_go_to_the_file_and_come_back_whole_however_much_is_copied_at_once(
    at_once, monkeypatch
):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:at_once], at))
    monkeypatch.setattr(
        os, "preadv", lambda file, parts, at: preadv(file, [parts[0][:at_once]], at)
    )
    pools, count = pools_of(), 20
    host, file = HostBlocks(pools, count), file_of(pools, 25)
    blocks = np.arange(1, count + 1)
    before = [contents(pools, block) for block in blocks]
    host.copy_out(blocks, range(count))
    file.copy_down(host, range(count), range(24, 4, -1))
    for pair in pools:
        for pool in pair:
            pool.zero_()
    file.copy_in(range(24, 4, -1), blocks + 19)
    for block, expected in zip(blocks, before, strict=True):
        assert torch.equal(contents(pools, block + 19), expected)
    assert not contents(pools, 5).any()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_disk_that_takes_nothing_more_is_told_with_the_tier():
    pools = pools_of()
    host = HostBlocks(pools, 1)
    host.allocate()
    with open("/dev/full", "r+b", buffering=0) as full:
        blocks = file_of(pools, file=full)
        message = r"tier disk of engine\.kv_offload: block 3 cannot be written: No space left"
        with pytest.raises(SchedlabError, match=message):
            blocks.copy_down(host, [0], [3])


def test_file_that_is_too_short_is_told_with_the_tier(tmp_path):
    pools = pools_of()
    with open(tmp_path / "short", "w+b", buffering=0) as short:
        blocks = file_of(pools, file=short)
        with pytest.raises(SchedlabError, match="block 2 cannot be read: the file is too short"):
            blocks.copy_in([2], np.array([1]))


# -- places --------------------------------------------------------------------------------------


class Ticket:
    def __init__(self, done):
        self.is_done = lambda: done


def test_places_that_are_still_read_are_handed_out_last_and_with_their_copies():
    places, ticket, done = Places(6), Ticket(False), Ticket(True)
    mine, after = places.add([10, 11, 12, 13])
    assert after == []
    places.read_until(places.of([10, 11]), ticket)
    places.read_until(places.of([12]), done)
    places.evict([10, 11, 12])
    taken, after = places.take(3)
    assert set(taken) == {0, 1, 2, 3, 4, 5} - set(mine[:2]) - {mine[3]}
    assert after == []
    taken, after = places.take(2)
    assert (set(taken), after) == (set(mine[:2]), [ticket])
    places.give_back(taken)
    assert places.take(1)[1] == [], "whoever had the place since has waited"


def test_place_that_nobody_holds_or_several_do_is_found_out():
    places = Places(3)
    places.add([5])
    (other,), _ = places.take(1)
    places.check([other])
    with pytest.raises(AssertionError, match="lost or held twice"):
        places.check()
    places.give_back([other, other])
    with pytest.raises(AssertionError, match="lost or held twice"):
        places.check()


# -- the tier ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", [LazyLane, ThreadLane])
def test_blocks_that_left_the_host_are_loaded_from_the_file_by_name(lane):
    pools, host, file = make(num_host_blocks=2, host_lane=lane, lane=lane)
    before = {name: contents(pools, name) for name in range(1, 7)}
    for first in (1, 3, 5):  # each two give way to the next
        host.places.evict(host.places.names & {first - 2, first - 1})
        host.store([first, first + 1], np.array([first, first + 1])).wait()
        written = file.store([first, first + 1])
    written.wait()
    file.load([6, 1, 4], np.array([20, 21, 22])).wait()
    for block, name in ((20, 6), (21, 1), (22, 4)):
        assert torch.equal(contents(pools, block), before[name])


@pytest.mark.parametrize("host_lane", [LazyLane, EagerLane, ThreadLane])
@pytest.mark.parametrize("swaps", [False, True])
def test_host_block_is_not_overwritten_before_the_file_has_its_bytes(host_lane, swaps):
    pools, host, file = make(num_host_blocks=1, host_lane=host_lane)
    old = contents(pools, 1)
    host.store([1], np.array([1])).wait()
    file.store([1])
    host.places.evict([1])
    if swaps:
        host.swap_out(7, np.array([2])).wait()
    else:
        host.store([2], np.array([2])).wait()
    file.load([1], np.array([9])).wait()
    assert torch.equal(contents(pools, 9), old)


def test_copy_to_the_host_that_takes_other_places_does_not_wait_for_the_file():
    _, host, file = make(num_host_blocks=2)
    host.store([1], np.array([1])).wait()
    written = file.store([1])
    host.places.evict([1])
    host.store([2], np.array([2])).wait()
    assert not written.is_done()
    host.store([3], np.array([3])).wait()
    assert written.is_done()


@pytest.mark.parametrize("lane", [LazyLane, ThreadLane])
def test_place_in_a_file_is_not_overwritten_before_the_file_below_has_its_bytes(lane):
    pools, host, upper, lower = make(num_file_blocks=(1, 8), host_lane=EagerLane, lane=lane)
    before = {name: contents(pools, name) for name in (1, 2, 3)}
    host.store([1, 2, 3], np.array([1, 2, 3]))
    upper.store([1]).wait()
    for name in (2, 3):
        written = lower.store([name - 1])
        upper.places.evict([name - 1])
        upper.store([name]).wait()
    written.wait()
    lower.load([2, 1], np.array([20, 21])).wait()
    upper.load([3], np.array([22])).wait()
    for block, name in ((20, 2), (21, 1), (22, 3)):
        assert torch.equal(contents(pools, block), before[name])


def test_load_from_the_file_into_a_block_that_is_being_stored_waits_for_that():
    pools, host, file = make()
    old, other = contents(pools, 1), contents(pools, 2)
    host.store([2], np.array([2])).wait()
    file.store([2]).wait()
    host.store([1], np.array([1]))
    file.load([2], np.array([1])).wait()
    assert torch.equal(contents(pools, 1), other)
    host.load([1], np.array([3])).wait()
    assert torch.equal(contents(pools, 3), old)


def test_copy_that_failed_fails_whoever_comes_behind_it(monkeypatch):
    def full(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", full)
    _, host, file = make(num_host_blocks=1, host_lane=ThreadLane)
    host.store([1], np.array([1])).wait()
    failed = file.store([1])
    host.places.evict([1])
    behind = host.store([2], np.array([2]))
    for ticket in (failed, behind):
        with pytest.raises(SchedlabError, match="block 0 cannot be written: Input/output error"):
            ticket.wait()


def test_tier_that_holds_other_blocks_than_are_counted_is_found_out():
    counted = []
    tiers = SimpleNamespace(check_held=lambda *what: counted.append(what))
    engine = SimpleNamespace(requests=SimpleNamespace(tiers=tiers))
    _, host, file = make()
    host.store([4, 5], np.array([1, 2])).wait()
    file.store([5])
    file.check(engine, 1)
    assert counted == [(1, {5}, 0)]
    file.places.take(1)
    with pytest.raises(AssertionError, match="lost or held twice"):
        file.check(engine, 1)
