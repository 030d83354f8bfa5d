"""Figures of results written by hand are as they were, part by part, and show what they are of."""

import pytest
from matplotlib.figure import Figure

from schedlab.experiments.figures import style
from tests.golden import by_hand


def words(figure: Figure) -> list[str]:
    found = [text.get_text() for text in (*figure.texts, figure._suptitle) if text]
    for axes in figure.axes:
        found += [axes.get_title(loc=side) for side in ("left", "center", "right")]
    return found


UNTITLED = (
    "line", "claim", "lines over rates that are names", "pareto of others", "heat map of few",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", by_hand.FIGURES)
def test_figure_of_results_by_hand_is_the_kept_one_and_has_its_title(name):
    figure = by_hand.FIGURES[name]()
    assert by_hand.digests(figure) == by_hand.kept()[name]
    if name not in UNTITLED and not name.startswith(("panels", "axis")):
        assert any("title" in text for text in words(figure))


def test_figures_by_hand_are_those_kept():
    assert set(by_hand.kept()) == set(by_hand.FIGURES)


@pytest.mark.parametrize(
    ("inches", "names", "num"),
    [
        (7.0, [], 1), (7.0, ["a"], 1), (7.0, ["abc"] * 5, 5), (7.0, ["abc"] * 12, 9),
        (7.0, ["a name of twenty-two ch"] * 5, 3), (3.4, ["a name of twenty-two ch"] * 5, 1),
        (3.4, ["x" * 90, "y"], 1), (3.4, ["abc"] * 9, 4), (7.0, ["abc", "x" * 42], 2),
    ],
)  # fmt: skip
def test_names_below_a_figure_stand_in_as_many_columns_as_fit(inches, names, num):
    # 14 characters an inch, and seven beside each name for its line.
    figure = style.new_figure(inches, 3)
    assert style.columns_below(figure, names) == num
    if names:
        style.name_below(figure, zip(names, style.looks(), strict=False))
        (legend,) = figure.legends
        assert legend._ncols == min(num, len(set(names)))


@pytest.mark.parametrize("name", ["heat map", "heat map of few"])
def test_cells_of_a_heat_map_are_parted_without_ticks(name):
    axes = by_hand.FIGURES[name]().axes[0]
    for axis in (axes.xaxis, axes.yaxis):
        assert axis.get_minor_ticks()
        for which in ("major", "minor"):
            assert axis.get_tick_params(which)["length"] == 0
