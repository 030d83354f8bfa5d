"""How evenly two tenants are served."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import SpecError

if TYPE_CHECKING:
    from schedlab.sim.result import RunResult

Int64 = npt.NDArray[np.int64]


def service_gap(result: RunResult, input_weight: float = 1.0, output_weight: float = 2.0) -> float:
    """Return how far the service of two tenants drifts apart while both have requests waiting.

    Parameters
    ----------
    result : RunResult
        A run of two tenants that are told apart by the column `priority`, with its log in
        memory.
    input_weight, output_weight : float
        Service of an input token, counted when its request is first admitted, and of an output
        token.

    Returns
    -------
    float
        Largest ``|W_1(t1, t2) - W_2(t1, t2)|`` over instants within the longest time in which
        both always have a request that arrived and was not yet scheduled: the quantity that
        Sheng et al. (OSDI 2024), theorem 4.4, bound by ``2 max(w_p L, w_q M)``.

    Raises
    ------
    SpecError
        If there are not two tenants.
    """
    # Who was turned away got nothing and waited for nothing.
    served = result.requests["first_scheduled_ns"].astype(np.int64) >= 0
    rows = {
        name: result.requests[name].astype(np.int64)[served]
        for name in ("id", "priority", "arrival_ns", "first_scheduled_ns", "prompt_tokens")
    }
    tenants = np.unique(rows["priority"])
    if len(tenants) != 2:
        raise SpecError(f"service_gap needs two tenants, there are {len(tenants)}")
    sign = np.where(rows["priority"] == tenants[0], 1.0, -1.0)
    start_ns, end_ns = _both_wait(rows["arrival_ns"], rows["first_scheduled_ns"], sign)
    times, service = [rows["first_scheduled_ns"]], [sign * input_weight * rows["prompt_tokens"]]
    for request_id, which in zip(rows["id"].tolist(), sign.tolist(), strict=True):
        tokens = result.log.token_times(request_id)
        times.append(tokens)
        service.append(np.full(len(tokens), which * output_weight))
    at, amount = np.concatenate(times), np.concatenate(service)
    inside = (at >= start_ns) & (at <= end_ns)
    order = np.argsort(at[inside], kind="stable")
    at, amount = at[inside][order], amount[inside][order]
    # What comes out at one instant comes out together.
    total = np.cumsum(amount)[np.append(np.diff(at) > 0, True)] if len(at) else np.zeros(0)
    total = np.append(0.0, total)
    return float(total.max() - total.min())


def _both_wait(arrival: Int64, scheduled: Int64, sign: npt.NDArray[np.float64]) -> tuple[int, int]:
    """Return the longest time in which both tenants have a request waiting."""
    times = np.concatenate([arrival, scheduled])
    change = np.repeat(np.array([1, -1]), len(arrival))
    who = np.concatenate([sign, sign])
    order = np.lexsort((-change, times))
    times, change, who = times[order], change[order], who[order]
    both = np.ones(len(times), dtype=bool)
    for which in (1.0, -1.0):
        both &= np.cumsum(np.where(who == which, change, 0)) > 0
    best, since = (0, -1), -1
    for time, waits in zip(times.tolist(), both.tolist(), strict=True):
        if waits and since < 0:
            since = time
        elif not waits and since >= 0:
            best, since = max(best, (since, time), key=lambda span: span[1] - span[0]), -1
    return best
