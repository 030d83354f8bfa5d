"""What `find` and `tune` tried, and what they came to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from schedlab.experiments.figures.style import (
    GREY,
    LOOKS,
    house_style,
    looks,
    name_below,
    new_figure,
    note,
    panels,
    plain_numbers,
)
from schedlab.sim.errors import SchedlabError
from schedlab.sim.metrics.registry import metric_named
from schedlab.sim.text import json_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Data = Mapping[str, Any]

_LOG_FROM = 30.0


def answers(found: Data, title: str) -> Figure:
    """Draw the answer of every setting of a search, and those of its seeds.

    Parameters
    ----------
    found : mapping
        What `schedlab find` writes into find.json.
    title : str
        Above it.

    Returns
    -------
    matplotlib.figure.Figure
        A line a setting: the mean over the seeds with its 95 % interval, a dot a seed. An arrow
        says that the answer lies beyond what was tried.

    Raises
    ------
    SchedlabError
        If no setting has an answer.
    """
    settings = [one for one in found["settings"] if one["replications"]]
    if not settings:
        raise SchedlabError("the search has no answer to draw")
    with house_style():
        figure = new_figure(7.2, 1.3 + 0.34 * len(settings))
        axes = figure.subplots()
        for i, (one, look) in enumerate(zip(settings, looks(), strict=False)):
            values = [seed["value"] for seed in one["replications"]]
            mean = one["mean"]
            axes.plot(values, [i] * len(values), ".", color=look.color, alpha=0.45, markersize=5)
            axes.plot(mean, i, look.marker, color=look.color)
            if one["bound"]:
                arrow = ">" if one["bound"] in ("at least", "above") else "<"
                axes.plot(mean * (1.04 if arrow == ">" else 0.96), i, arrow, color=look.color)
            elif one["ci95"] and isinstance(one["ci95"], float) and math.isfinite(one["ci95"]):
                low, high = mean - one["ci95"], mean + one["ci95"]
                axes.plot([low, high], [i, i], "-", color=look.color, linewidth=1.4)
        axes.set_yticks(range(len(settings)), [one["label"] for one in settings])
        axes.set_ylim(len(settings) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.set_xlabel(f"{_searched(found['find'])} within the constraints")
        axes.set_title(title)
        note(figure, f"{_constraints(found['find'])}; dots: seeds; bars: 95 % confidence intervals")
    return figure


def tried(found: Data, title: str) -> Figure:
    """Draw what each value tried gave, a panel a constraint.

    Parameters
    ----------
    found : mapping
        What `schedlab find` writes into find.json.
    title : str
        Above it.

    Returns
    -------
    matplotlib.figure.Figure
        The metric of the constraint over the value: a dot a value tried, a thin line a seed. What
        was tried with the length of runs behind the answer is shown.
    """
    asked = found["find"]
    constraints = [
        *((metric, bound, 1.0) for metric, bound in asked["at_most"].items()),
        *((metric, bound, -1.0) for metric, bound in asked["at_least"].items()),
    ]
    settings = [one for one in found["settings"] if one["replications"]]
    drawn = dict(zip((one["label"] for one in settings), looks(), strict=False))
    with house_style():
        figure, all_axes = panels(1.0 + 4.4 * len(constraints), 4.0, len(constraints))
        for i, (axes, (name, bound, sign)) in enumerate(zip(all_axes, constraints, strict=True)):
            metric = metric_named(name)
            low = math.inf
            for one in settings:
                look = drawn[one["label"]]
                for seed in one["replications"]:
                    points = sorted(
                        (probe["value"],
                         (bound + sign * json_number(list(probe["excess"].values())[i]))
                         * metric.scale)
                        for probe in seed["tried"]
                    )  # fmt: skip
                    known = [(x, y) for x, y in points if math.isfinite(y)]
                    low = min([low, *(y for _, y in known)])
                    # Between values of a seed only: another seed is another workload.
                    axes.plot(
                        *np.array(known).reshape(-1, 2).T, look.line, color=look.color,
                        linewidth=0.8, marker=look.marker, markersize=3,
                    )  # fmt: skip
            axes.axhline(bound * metric.scale, color=GREY, linewidth=0.9, linestyle=(0, (6, 2)))
            axes.set_xscale("log")
            plain_numbers(axes, "x")
            if low > 0 and axes.get_ylim()[1] > _LOG_FROM * low:
                axes.set_yscale("log")
                plain_numbers(axes, "y")
            axes.set_xlabel(_goal(asked))
            axes.set_ylabel(metric.axis)
        name_below(figure, list(drawn.items()))
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        note(figure, "dashed: the constraint; dots: values tried; a line a seed")
    return figure


def tuned(found: Data, title: str) -> Figure:
    """Draw every setting that was tuned over: what is optimized, against each key.

    Parameters
    ----------
    found : mapping
        What `schedlab tune` writes into tune.json.
    title : str
        Above it.

    Returns
    -------
    matplotlib.figure.Figure
        A panel a key. Hollow settings break a constraint; the line joins the best that holds at
        each value; the star is the winner, the diamond what was given. Names stand in the order
        asked.
    """
    keys = list(found["tune"]["over"])
    trials = [trial for trial in found["tried"] if trial["goals"]]
    goals = [float(np.mean([json_number(goal) for goal in trial["goals"]])) for trial in trials]
    goal = _goal(found["tune"])
    least = "minimize" in found["tune"]
    is_metric = "." not in goal or "(" in goal or ":" in goal
    scale = metric_named(goal).scale if is_metric else 1.0
    best, given = found["best_on_new_seeds"], found["given_on_new_seeds"]
    with house_style():
        figure, all_axes = panels(1.0 + 4.0 * len(keys), 4.0, len(keys), sharex=False)
        for axes, key in zip(all_axes, keys, strict=True):
            names = [one for one in found["tune"]["over"][key] if isinstance(one, str)]
            place = {name: float(i) for i, name in enumerate(names)}
            points = [
                (_place(trial["values"][key], place), goal * scale, bool(trial["holds"]))
                for trial, goal in zip(trials, goals, strict=True)
            ]
            _draw_trials(axes, points, least)
            for one, marker, color in ((given, "D", LOOKS[1].color), (best, "*", LOOKS[2].color)):
                if one:
                    value = float(np.mean([json_number(goal) for goal in one["goals"]])) * scale
                    size = 14 if marker == "*" else 7
                    axes.plot(_place(one["values"][key], place), value, marker, color=color,
                              markersize=size, markeredgecolor="white", zorder=4)  # fmt: skip
            if names:
                axes.set_xticks(range(len(names)), names)
                axes.set_xlim(-0.5, len(names) - 0.5)
            else:
                axes.set_xscale("log")
                plain_numbers(axes, "x")
            axes.set_xlabel(key)
        all_axes[0].set_ylabel(metric_named(goal).axis if is_metric else f"largest {goal}")
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        note(
            figure,
            f"{_constraints(found['tune'])}; hollow: breaks a constraint; line: the best that "
            "holds; star: the winner on new seeds, in longer runs; diamond: the given one there",
        )
    return figure


def recommended(found: Data, title: str) -> Figure:
    """Draw what everything that `recommend` tried serves, the last two on new seeds.

    Parameters
    ----------
    found : mapping
        What `schedlab recommend` writes into recommend.json.
    title : str
        Above it.
    """
    constraints = {"slo_attainment": found["question"]["attainment"]}
    settings = [{**one, "label": f"{one['stage']}: {one['label']}"} for one in found["tried"]]
    asked = {"maximize": "requests/s", "at_least": constraints, "at_most": {}}
    return answers({"find": asked, "settings": settings}, title)


def _goal(asked: Data) -> str:
    return str(asked.get("maximize") or asked["minimize"])


def _searched(asked: Data) -> str:
    return f"{'largest' if asked.get('maximize') else 'least'} {_goal(asked)}"


def _place(value: float | str, names: Mapping[str, float]) -> float:
    """Return where a value stands on its axis."""
    return names[value] if isinstance(value, str) else float(value)


def _draw_trials(
    axes: Axes, points: Sequence[tuple[float, float, bool]], least: bool = False
) -> None:
    blue = LOOKS[0].color
    for x, y, holds in points:
        axes.plot(x, y, "o", color=blue, markerfacecolor=blue if holds else "white", markersize=4.5)
    tops: dict[float, float] = {}
    for x, y, holds in points:
        if holds:
            tops[x] = min(y, tops.get(x, y)) if least else max(y, tops.get(x, y))
    axes.plot(*np.array(sorted(tops.items())).reshape(-1, 2).T, "-", color=blue, linewidth=1.0)


def _constraints(asked: Data) -> str:
    constraints = [f"{name} <= {bound:g}" for name, bound in asked["at_most"].items()]
    constraints += [f"{name} >= {bound:g}" for name, bound in asked["at_least"].items()]
    return "within " + " and ".join(constraints) if constraints else "no constraints"
