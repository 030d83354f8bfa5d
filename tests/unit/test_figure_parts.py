"""What parts of figures draw, told to stand-ins for axes."""

from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.experiments.figures import agreement, fleets
from schedlab.experiments.figures.agreement import SHOWN, _draw_errors


def drawn(*rows):
    calls = []
    axes = SimpleNamespace(
        plot=lambda *given, **how: calls.append((*given, how.get("markerfacecolor"))),
        annotate=lambda *given, **how: calls.append(given[0]),
    )
    _draw_errors(axes, rows, 0.25, "red", "o", "label")
    assert calls.pop() == ([], [], "o", None)  # for the legend
    return calls


def row(metric, error, spread=0.02, within=True):
    return {"metric": metric, "error": error, "spread": spread, "within_bar_or_spread": within}


def test_each_error_is_a_mark_beside_its_metric_over_its_spread_and_none_at_all_is_one_too():
    first, *_, last = SHOWN
    calls = drawn(
        row(last, 0.0), row("other", 0.1), row(first, None), row(first, -0.05, None, False)
    )
    y = len(SHOWN) - 0.75
    assert calls == [
        ([-2.0, 2.0], [y, y], None), (0.0, y, "o", "red"),
        ([0.0, 0.0], [0.25, 0.25], None), (-5.0, 0.25, "o", "white"),
    ]  # fmt: skip


@pytest.mark.parametrize("sign", [-1, 1])
def test_error_beyond_the_widest_is_marked_at_the_edge_and_written_out(sign):
    _, mark, *told = drawn(row(SHOWN[1], sign * (agreement._WIDEST + 20) / 100))
    assert mark[:2] == (sign * agreement._WIDEST, 1.25)
    assert told == [f"{sign * (agreement._WIDEST + 20):+.0f} %"]


@pytest.mark.parametrize("num", [2, fleets._MOST_NAMED, fleets._MOST_NAMED + 1])
def test_rows_of_engines_are_shaded_from_zero_over_their_time_and_few_of_them_named(num):
    drawn, ticks, labels = {}, [], []
    axes = SimpleNamespace(
        imshow=lambda values, **how: drawn.update(how, values=values) or "image",
        set_yticks=lambda *given: ticks.append(given), set_ylabel=labels.append,
        grid=lambda visible: None,
    )  # fmt: skip
    bar = SimpleNamespace(
        set_label=lambda text, fontsize: labels.append(text),
        outline=SimpleNamespace(set_visible=lambda visible: None),
    )
    figure = SimpleNamespace(colorbar=lambda image, ax, **how: bar if ax is axes else None)
    values = np.full((num, 3), 7.0)
    values[0, 1] = np.nan
    engines = [SimpleNamespace(pool="", index=i) for i in range(num)]
    result = SimpleNamespace(engines=engines)
    fleets._draw_rows(figure, axes, np.array([1.0, 2.0, 5.0, 9.0]), values, "busy", result)
    assert drawn["vmin"] == 0
    assert "vmax" not in drawn
    assert drawn["extent"] == (1.0, 9.0, num - 0.5, -0.5)
    assert np.ma.getmaskarray(drawn["values"]).sum() == 1
    assert labels == ["engine", "busy"]
    assert [list(places) for places, _ in ticks] == [list(range(num))] * (num <= fleets._MOST_NAMED)
