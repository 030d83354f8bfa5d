"""What makes the page of a report alive: its data, our script, and Plotly, all inside the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from schedlab.experiments.analysis.rate_curves import RATE_KEYS, is_saturated
from schedlab.experiments.figures.style import LOOKS
from schedlab.experiments.results.tables import Row, metrics_told
from schedlab.sim.metrics.registry import metric_named
from schedlab.sim.text import json_text

_SCRIPT = Path(__file__).with_name("page.js")
_LIBRARY = Path("package_data") / "plotly.min.js"


def plotly_script() -> str | None:
    """Return Plotly's JavaScript as the Python package of that name brings it; None without it."""
    found = find_spec("plotly")
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(next(iter(found.submodule_search_locations))) / _LIBRARY
    return path.read_text(encoding="utf-8") if path.is_file() else None


def live(rows: Sequence[Row], name: str, library: str | None) -> dict[str, str] | None:
    """Return what the template puts into scripts.

    Parameters
    ----------
    rows : sequence of Row
        The settings, in the order of the page's first table.
    name : str
        Of the experiment, for the names of downloads.
    library : str or None
        Plotly's JavaScript; without it the page has no script at all.

    Returns
    -------
    dict or None
        ``data`` (JSON), ``library`` and ``script``, in which nothing ends a script early.
    """
    if library is None:
        return None
    return {
        "data": _harmless(json_text(live_data(rows, name))),
        "library": library.replace("</script", "<\\/script"),
        "script": _SCRIPT.read_text(encoding="utf-8"),
    }


def live_data(rows: Sequence[Row], name: str) -> dict[str, Any]:
    """Return all settings with all metrics that any of them has, as the script reads them.

    Parameters
    ----------
    rows : sequence of Row
        The settings.
    name : str
        Of the experiment.

    Returns
    -------
    dict
        ``keys``: swept key to its values in order, the policy first; ``rate``: the key of the
        request rate, or null; ``metrics``: name to title and scale; ``rows``: label, policy,
        settings, whether it is saturated, and of each metric its mean and half its 95 % interval.
    """
    keys: dict[str, dict[str, None]] = {"policy": {}}
    for row in rows:
        for key, value in {"policy": row.policy, **row.settings}.items():
            keys.setdefault(key, {})[value] = None
    names = [
        metric
        for metric in metrics_told(rows)
        if any(math.isfinite(row.told(metric).mean) for row in rows)
    ]
    return {
        "name": name,
        "colors": [look.color for look in LOOKS],
        "keys": {key: list(values) for key, values in keys.items()},
        "rate": next((key for key in RATE_KEYS if len(keys.get(key, ())) > 1), None),
        "metrics": {
            metric: {"title": metric_named(metric).axis, "scale": metric_named(metric).scale}
            for metric in names
        },
        "rows": [
            {
                "label": row.label,
                "policy": row.policy,
                "settings": {"policy": row.policy, **row.settings},
                "saturated": is_saturated(row),
                "metrics": {
                    metric: [
                        value if value is not None and math.isfinite(value) else None
                        for value in row.told(metric)
                    ]
                    for metric in names
                },
            }
            for row in rows
        ],
    }


def _harmless(text: str) -> str:
    """Return JSON that can stand in a script element whatever its strings hold."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
