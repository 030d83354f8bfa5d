"""Sweeps, runs and calibrations on one folder, interleaved and killed anywhere, from seeds."""

import fcntl

import pytest

from schedlab.sim.files import write_text
from tests.torture.interleaving import World

pytest.importorskip("torch")  # which calibrations need

from tests.torture.concurrent_work import SCENARIOS

SEEDS = range(8)  # make torture tries more
_FAULTY_ONCE = {
    "sweeps": (),
    "runs": (705_000_634, 705_000_643, 705_000_700),
    "calibrations": (704_000_140,),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_work_of_several_on_one_folder_keeps_its_laws_however_it_interleaves(name, tmp_path):
    histories = []
    for seed in (*SEEDS, *_FAULTY_ONCE[name]):
        (root := tmp_path / str(seed)).mkdir()
        histories.append(SCENARIOS[name](root, seed))
    assert sum(history.num_kills for history in histories) > len(SEEDS) // 2
    if name != "runs":  # which wait for nobody
        assert any(history.errors for history in histories)


def test_world_finds_a_writer_who_locks_nothing(tmp_path):
    def careless(root):
        path = root / "count"
        before = int(path.read_text()) if path.exists() else 0
        path.write_text(str(before + 1))

    ends = set()
    for seed in range(10):
        (root := tmp_path / str(seed)).mkdir()
        World(root, seed, kill=0.0).run({n: lambda root=root: careless(root) for n in "ab"})
        ends.add((root / "count").read_text())
    assert ends == {"1", "2"}


def test_world_of_the_same_seed_has_the_same_history(tmp_path):
    def work(root):
        with (root / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_text(root / "a" / "b", "x")

    def history(name):
        (root := tmp_path / name).mkdir()
        found = World(root, 5, kill=0.1).run({n: lambda: work(root) for n in "abc"})
        return found.operations, [name for name, _ in found.errors], found.num_kills

    assert history("one") == history("two")
