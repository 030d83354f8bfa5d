"""The curves of a sweep over the request rate: which rows they have, and where they saturate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from schedlab.experiments.results.selection import FOLDER
from schedlab.experiments.results.tables import Row
from schedlab.sim.errors import SchedlabError

RATE_KEYS = ("workload.request_rate", "workload.arrivals.rate", "workload.rate_scale")
"""What is swept along a curve rather than from curve to curve."""

SATURATED = 1.05
"""Offered over achieved rate from which a point counts as saturated."""


def curve_name(row: Row) -> str:
    """Return what tells a row's curve from the others: its settings but the rate."""
    return _named(row, RATE_KEYS)


def setting_name(row: Row) -> str:
    """Return all settings of a row in a line, under the names that figures give them."""
    return _named(row, ())


def _named(row: Row, without: Sequence[str]) -> str:
    rest = [
        value if key in ("policy", FOLDER) else f"{key.rsplit('.', 1)[-1]}={value}"
        for key, value in row.settings.items()
        if key not in without
    ]
    return ", ".join(rest) or row.policy


def curves(results: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of each curve, by its name, in the order given."""
    found: dict[str, list[Row]] = {}
    for row in results:
        found.setdefault(curve_name(row), []).append(row)
    return found


def rate_key(results: Sequence[Row]) -> str:
    """Return the key of the request rate that is swept.

    Raises
    ------
    SchedlabError
        If none is.
    """
    for key in RATE_KEYS:
        if any(key in row.settings for row in results):
            return key
    raise SchedlabError(f"no request rate is swept: none of {', '.join(RATE_KEYS)}")


def rate(row: Row) -> float:
    """Return the swept request rate of a row; infinity if all requests came at once."""
    return float(row.settings[rate_key([row])])


def is_saturated(row: Row) -> bool:
    """Say whether requests arrived more than 5 % faster than they were served.

    Parameters
    ----------
    row : Row
        A setting; see the notes of `throughput_against_p99`.

    Returns
    -------
    bool
        False where nothing was completed or all requests came at once.
    """
    service_ms = row.mean("median_e2el_ms") - row.mean("median_queue_time_ms")
    open_s = row.mean("duration_s") - service_ms / 1e3
    return row.mean("offered_request_rate") * open_s > SATURATED * row.mean("completed")


def rate_bracket(rows: Sequence[Row], metric: str, at_least: float) -> tuple[float, float]:
    """Return between which rates that were run a metric falls below a bar.

    Parameters
    ----------
    rows : sequence of Row
        One curve, in order of the rate.
    metric : str
        A metric that falls with the rate, such as slo_attainment.
    at_least : float
        The bar.

    Returns
    -------
    held : float
        The last rate that holds, walking up, and is not saturated: there a longer run may hold
        less. NaN if there is none.
    broken : float
        The first that does not; NaN if all hold, or are saturated from there on. Where
        between the two the bar breaks is not known: the curve is no straight line, least of all
        where the upper rate is saturated.
    """
    held = math.nan
    for row in rows:
        if not row.mean(metric) >= at_least:
            return held, rate(row)
        if is_saturated(row):
            break
        held = rate(row)
    return held, math.nan


def saturated_from(found: Iterable[list[Row]]) -> float:
    """Return the rate from which every curve is saturated; NaN if there is none."""
    latest = -math.inf
    for rows in found:
        first = next((rate(row) for row in rows if is_saturated(row)), math.inf)
        latest = max(latest, first)
    return latest if math.isfinite(latest) else math.nan
