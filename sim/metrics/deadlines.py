"""Deadlines of single tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from schedlab.sim.record.columns import completed

if TYPE_CHECKING:
    from schedlab.sim.result import RunResult


def deadline_misses(result: RunResult) -> float:
    """Return the share of requests with targets of which a token came after its deadline.

    Parameters
    ----------
    result : RunResult
        A run with its log in memory.

    Returns
    -------
    float
        Token i = 0, 1, ... is due at ``arrival + TTFT target + i * TPOT target``, so that a token
        that is early leaves time for the next ones; with a target to the end the last token is
        due then. Requests without a target are not counted, rejected ones are
        misses. This is how deadlines are counted in arXiv:2503.22562; the attainments of
        `request_metrics` judge the mean time per token instead.
    """
    rows = result.requests
    ttft, tpot = rows["slo_ttft_ms"], rows["slo_tpot_ms"]
    end = rows["slo_e2el_ms"]
    stated = ~(np.isnan(ttft) & np.isnan(tpot) & np.isnan(end))
    met = 0
    for i in np.flatnonzero(stated & completed(rows)).tolist():
        tokens_ms = (result.log.token_times(int(rows["id"][i])) - rows["arrival_ns"][i]) / 1e6
        late = not np.isnan(end[i]) and tokens_ms[-1] > end[i]
        late |= not np.isnan(ttft[i]) and tokens_ms[0] > ttft[i]
        if not np.isnan(tpot[i]):
            # Without a target for the first token, the clock of the others starts with it.
            first = tokens_ms[0] if np.isnan(ttft[i]) else ttft[i]
            late |= bool((tokens_ms > first + tpot[i] * np.arange(len(tokens_ms))).any())
        met += not late
    num_stated = int(np.count_nonzero(stated))
    return float(num_stated - met) / num_stated if num_stated else float("nan")
