"""Where labels of a figure stand."""

import itertools

import numpy as np
import pytest

from schedlab.experiments.figures.style import LOOKS, looks, spread


def naively(levels, gap, low, high):
    """Push each level up from the one below it, then all down from the upper end."""
    n = len(levels)
    gap = min(gap, (high - low) / (n - 1)) if n > 1 else gap
    order = sorted(range(n), key=levels.__getitem__)
    found = [max(levels[i], low) for i in order]
    for i in range(1, n):
        found[i] = max(found[i], found[i - 1] + gap)
    for i in range(n)[::-1]:
        found[i] = min(found[i], high if i == n - 1 else found[i + 1] - gap)
    return [found[order.index(i)] for i in range(n)]


@pytest.mark.parametrize("seed", range(20))
def test_spread_levels_keep_order_range_and_as_much_distance_as_there_is_room_for(seed):
    rng = np.random.default_rng(seed)
    low, high = sorted(rng.choice([0.0, 0.1, 0.4, 0.9, 1.0, 1.5], size=2, replace=False).tolist())
    for n in range(1, 7):
        levels = rng.choice(np.linspace(low, high, 5), size=n).tolist()
        for gap in (0.0, 0.05, (high - low) / n, (high - low) / max(1, n - 1), 3.0):
            found = spread(levels, gap, low, high)
            assert found == pytest.approx(naively(levels, gap, low, high))
            ordered = [found[i] for i in sorted(range(n), key=levels.__getitem__)]
            assert min(ordered) >= low - 1e-9
            assert max(ordered) <= high + 1e-9
            least = min(gap, (high - low) / max(1, n - 1))
            assert all(b - a >= least - 1e-9 for a, b in itertools.pairwise(ordered))


def test_levels_that_are_far_enough_apart_stay_where_they_are():
    assert spread([0.5, 0.125, 0.875], 0.375) == [0.5, 0.125, 0.875]
    assert spread([0.3, 0.3], 5.0) == [0.0, 0.94]


def test_looks_are_eight_colours_and_64_looks_before_any_comes_again():
    some = list(itertools.islice(looks(), 65))
    assert [one.color for one in some[:9]] == [*(one.color for one in LOOKS), LOOKS[0].color]
    assert len(set(some[:64])) == 64
    assert some[64] == some[0]
    for turn in range(8):
        of_turn = some[8 * turn : 8 * turn + 8]
        assert [(one.marker, one.line) for one in of_turn] == [
            (one.marker, one.line) for one in (*LOOKS[turn:], *LOOKS[:turn])
        ]
