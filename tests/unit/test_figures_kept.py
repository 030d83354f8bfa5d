"""Figures of results written by hand are as they were, part by part, and show what they are of."""

import pytest
from matplotlib.figure import Figure

from tests.golden import by_hand


def words(figure: Figure) -> list[str]:
    found = [text.get_text() for text in (*figure.texts, figure._suptitle) if text]
    for axes in figure.axes:
        found += [axes.get_title(loc=side) for side in ("left", "center", "right")]
    return found


UNTITLED = (
    "line", "claim", "lines over rates that are names", "pareto of others", "heat map of few",
)  # fmt: skip


@pytest.mark.parametrize("name", by_hand.FIGURES)
def test_figure_of_results_by_hand_is_the_kept_one_and_has_its_title(name):
    figure = by_hand.FIGURES[name]()
    assert by_hand.digests(figure) == by_hand.kept()[name]
    if name not in UNTITLED and not name.startswith(("panels", "axis")):
        assert any("title" in text for text in words(figure))


def test_figures_by_hand_are_those_kept():
    assert set(by_hand.kept()) == set(by_hand.FIGURES)


@pytest.mark.parametrize("name", ["heat map", "heat map of few"])
def test_cells_of_a_heat_map_are_parted_without_ticks(name):
    axes = by_hand.FIGURES[name]().axes[0]
    for axis in (axes.xaxis, axes.yaxis):
        assert axis.get_minor_ticks()
        for which in ("major", "minor"):
            assert axis.get_tick_params(which)["length"] == 0
