"""Any metric over any swept key or other metric: a curve a setting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from schedlab.experiments.analysis.rate_curves import RATE_KEYS
from schedlab.experiments.figures.style import (
    Look,
    house_style,
    looks,
    name_below,
    note,
    panels,
    plain_numbers,
)
from schedlab.experiments.results.selection import FOLDER, swept_key
from schedlab.experiments.results.tables import Row
from schedlab.sim.errors import SchedlabError, SpecError
from schedlab.sim.metrics.registry import metric_named

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOG_FROM = 30.0
_LONG = 24
_CHOSEN_KEYS = ("workload.max_concurrency", "engine.max_num_seqs")
_MOST_NAMES = 24


class _Across(NamedTuple):
    """What lies along the x axis: a key that is swept, or a metric; `names` of what is no number.

    `x` is None for a row that has no place there.
    """

    title: str
    x: list[float | None]
    names: list[str]
    key: str | None


def lines(
    results: Sequence[Row],
    title: str,
    metrics: Sequence[str],
    x: str | None = None,
    by: Sequence[str] = (),
) -> Figure:
    """Draw metrics over a swept key or over another metric, with 95 % intervals.

    Parameters
    ----------
    results : sequence of Row
        The settings.
    title : str
        Above the panels.
    metrics : sequence of str
        One a panel.
    x : str, optional
        A swept key, or the end of one; or a metric. If absent the request rate where it is swept,
        else a key whose values are numbers, else the policy.
    by : sequence of str
        Keys whose values make the curves; if absent all that vary beside `x`.

    Returns
    -------
    matplotlib.figure.Figure
        A key whose values are no numbers has them side by side, without lines between.

    Raises
    ------
    SpecError
        If there is no such key or metric, or several settings would share a place.
    SchedlabError
        If no setting has the metric.
    """
    across = _across(results, x)
    keys = [swept_key(results, key) for key in by] or _varying(results, across)
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(results):
        if across.x[i] is not None:
            groups.setdefault(_name(row, keys), []).append(i)
    _check_places(results, across, keys, groups)
    with house_style():
        figure, all_axes = panels(1.2 + 5.0 * len(metrics), 4.2, len(metrics))
        drawn = dict(zip(groups, looks(), strict=False))
        for axes, name in zip(all_axes, metrics, strict=True):
            _draw(axes, results, across, groups, drawn, name)
            if len(metrics) > 1:
                axes.set_title(metric_named(name).label)
        if len(groups) > 1:
            shown = [(name, look if not across.names else look._replace(line=""))
                     for name, look in drawn.items()]  # fmt: skip
            name_below(figure, shown)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        several = any(row.num_replications > 1 for row in results)
        left_out = sum(value is None for value in across.x)
        told = ["bars: 95 % confidence intervals over replications"] if several else []
        told += [f"{left_out} settings have no place on this axis"] if left_out else []
        note(figure, "; ".join(told))
    return figure


def _across(results: Sequence[Row], asked: str | None) -> _Across:
    """Find out what lies along the x axis, and where each row is."""
    keys = list(dict.fromkeys(key for row in results for key in row.settings))
    if asked is None:
        numeric = [key for key in keys if _is_swept(results, key) and _numbers(results, key)]
        first = [key for key in (*RATE_KEYS, *_CHOSEN_KEYS, *numeric) if key in numeric]
        asked = first[0] if first else "policy"
    elif asked not in keys and asked != "policy":
        try:
            asked = swept_key(results, asked)
        except SpecError as no_key:
            try:
                metric = metric_named(asked)
            except SpecError:
                raise SpecError(f"--x: {no_key}; nor is there such a metric") from None
            places = [_or_none(row.mean(metric.name) * metric.scale) for row in results]
            return _Across(metric.axis, places, [], None)
    if asked != "policy" and _numbers(results, asked):
        places = [_or_none(float(row.settings[asked])) for row in results]
        return _Across(_key_title(asked), places, [], asked)
    values = [row.policy if asked == "policy" else row.settings.get(asked, "-") for row in results]
    names = list(dict.fromkeys(values))
    if len(names) > _MOST_NAMES:
        raise SpecError(f"--x: {asked} has {len(names)} values: --filter some of them")
    return _Across(_key_title(asked), [float(names.index(v)) for v in values], names, asked)


def _draw(
    axes: Axes,
    results: Sequence[Row],
    across: _Across,
    groups: Mapping[str, Sequence[int]],
    drawn: Mapping[str, Look],
    name: str,
) -> None:
    """Draw one metric."""
    metric = metric_named(name)
    values = [row.mean(metric.name) * metric.scale for row in results]
    known = [value for value in values if math.isfinite(value)]
    if not known:
        raise SchedlabError(f"no setting has {name}")
    is_log = min(known) > 0 and max(known) > _LOG_FROM * min(known)
    for k, (group, members) in enumerate(groups.items()):
        look = drawn[group]
        # Without lines between them, curves stand beside each other at a name.
        shift = 0.5 * ((k + 0.5) / len(groups) - 0.5) if across.names else 0.0
        order = sorted(members, key=lambda i: across.x[i] or 0.0)
        x = [(across.x[i] or 0.0) + shift for i in order]
        line = "none" if across.names else look.line
        shown = [values[i] for i in order]
        axes.plot(x, shown, linestyle=line, marker=look.marker, color=look.color, label=group)
        for at, i in zip(x, order, strict=True):
            half = (results[i].estimate(metric.name).half_width or 0.0) * metric.scale
            if math.isfinite(half) and half:
                low = max(values[i] - half, values[i] / 10) if is_log else values[i] - half
                axes.plot([at, at], [low, values[i] + half], color=look.color, linewidth=1)
    axes.set_ylabel(metric.axis if len(metric.axis) < _LONG else metric.axis.replace(" (", "\n("))
    axes.set_xlabel(across.title)
    if is_log:
        axes.set_yscale("log")
        plain_numbers(axes, "y")
    elif min(known) >= 0:
        axes.set_ylim(bottom=0)
    if across.names:
        long = max(map(len, across.names)) * len(across.names) > 50
        axes.set_xticks(range(len(across.names)), across.names)
        if long:
            axes.tick_params(axis="x", rotation=30)
        axes.set_xlim(-0.6, len(across.names) - 0.4)


def _check_places(
    results: Sequence[Row], across: _Across, keys: Sequence[str], groups: Mapping[str, list[int]]
) -> None:
    """Refuse to draw several settings over each other at a value of a key."""
    if across.key is None:
        return
    for members in groups.values():
        places = [across.x[i] for i in members]
        if len(set(places)) < len(places):
            beside = [key for key in _varying(results, across) if key not in keys]
            raise SpecError(
                f"several settings share a place: {', '.join(beside) or 'some key'} varies as "
                "well; add it to --by, or --filter one value"
            )


def _varying(results: Sequence[Row], across: _Across) -> list[str]:
    """Return the keys beside the x axis that take several values; along a metric, but the rate."""
    skipped = RATE_KEYS if across.key is None else (across.key,)
    keys = dict.fromkeys(key for row in results for key in row.settings)
    return [key for key in keys if key not in skipped and _is_swept(results, key)]


def _is_swept(results: Sequence[Row], key: str) -> bool:
    return len({row.settings.get(key) for row in results}) > 1


def _name(row: Row, keys: Sequence[str]) -> str:
    values = {"policy": row.policy, **row.settings}
    parts = [
        values.get(key, "-")
        if key in ("policy", FOLDER)
        else f"{key.rpartition('.')[2]}={values.get(key, '-')}"
        for key in keys
    ]
    return ", ".join(parts)


def _numbers(results: Sequence[Row], key: str) -> bool:
    try:
        return bool([float(row.settings[key]) for row in results])
    except (KeyError, ValueError):
        return False


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _key_title(key: str) -> str:
    known = {
        "workload.request_rate": "request rate (requests/s)",
        "workload.arrivals.rate": "request rate (requests/s)",
        "workload.rate_scale": "speed-up of the trace's arrivals",
    }
    return known.get(key, key.rpartition(".")[2])
