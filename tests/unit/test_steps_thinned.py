"""Of a table of steps longer than memory has room for, every n-th, whatever the lengths."""

import numpy as np
import pytest

from schedlab.experiments.figures import timelines


class Steps(dict):
    """A table that gives some of its rows at a time, and notes how many."""

    def __init__(self, num_rows):
        place = np.arange(num_rows)
        super().__init__({name: 100 * i + place for i, name in enumerate(timelines._DRAWN)})
        self["num_preempted"] = place % 3
        self.num_rows, self.asked = num_rows, []

    def rows(self, start, stop):
        self.asked.append(stop - start)
        return {name: column[start:stop] for name, column in self.items()}


@pytest.mark.parametrize("room", [6, 7, 8])
@pytest.mark.parametrize("num_rows", [1, 6, 7, 8, 9, 12, 14, 20, 29, 36])
def test_steps_that_are_too_many_are_thinned_to_every_nth_with_all_preemptions(
    monkeypatch, room, num_rows
):
    monkeypatch.setattr(timelines, "BATCH_ROWS", room)
    steps = Steps(num_rows)
    kept, every = timelines._thinned(steps)
    assert every == -(-num_rows // room)
    if every == 1:
        assert kept is steps
        return
    chosen = np.arange(0, num_rows, every)
    for name in timelines._DRAWN:
        if name != "num_preempted":
            assert kept[name].tolist() == steps[name][chosen].tolist()
    counted = np.add.reduceat(steps["num_preempted"], chosen)
    assert kept["num_preempted"].tolist() == counted.tolist()
    assert max(steps.asked) <= room
