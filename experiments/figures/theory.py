"""What a closed formula says beside what the simulator did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from schedlab.experiments.figures.style import GREY, house_style, looks, new_figure
from schedlab.experiments.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class TheoryCheck(NamedTuple):
    """A formula and the simulation of what it describes.

    Attributes
    ----------
    x, theory : sequence of float
        The formula, at any number of places.
    at : sequence of float
        Where it was simulated.
    simulated : sequence of Estimate
        Mean and half its confidence interval there.
    """

    x: Sequence[float]
    theory: Sequence[float]
    at: Sequence[float]
    simulated: Sequence[Estimate]


def theory_against_simulation(
    checks: Mapping[str, TheoryCheck], title: str, x_label: str, y_label: str
) -> Figure:
    """Draw formulas as lines and simulations of them as points with their intervals.

    Parameters
    ----------
    checks : mapping of str to TheoryCheck
        Name to formula and simulation.
    title, x_label, y_label : str
        What is drawn.

    Returns
    -------
    matplotlib.figure.Figure
        One panel.
    """
    with house_style():
        figure = new_figure(6.2, 4.0)
        axes = figure.subplots()
        for (label, check), look in zip(checks.items(), looks(), strict=False):
            axes.plot(check.x, check.theory, look.line, color=look.color, linewidth=1.2)
            axes.errorbar(
                check.at, [point.mean for point in check.simulated],
                yerr=[point.half_width or 0.0 for point in check.simulated],
                fmt=look.marker, color=look.color, markersize=5, capsize=3, label=label,
            )  # fmt: skip
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_ylim(bottom=0)
        axes.set_title(title)
        axes.legend(loc="upper left")
        figure.supxlabel(
            "lines: closed formulas; points: simulated, with 95 % confidence intervals",
            fontsize=8, color=GREY,
        )  # fmt: skip
    return figure
