"""How evenly two tenants are served."""

from __future__ import annotations

import numpy as np

from schedlab.sim.errors import SpecError
from schedlab.sim.metrics.observation import Observation
from schedlab.sim.metrics.registry import register
from schedlab.sim.record.columns import Floats, Ints


@register()
def service_gap(run: Observation, input_weight: float = 1.0, output_weight: float = 2.0) -> float:
    """Return how far the service of two tenants drifts apart while both have requests waiting.

    The largest |W1(t1, t2) - W2(t1, t2)| over instants within the longest time in which both
    always have a request that arrived and was not yet scheduled: what Sheng et al. (OSDI 2024),
    theorem 4.4, bound by 2 max(w_p L, w_q M). `input_weight` is the service of an input token,
    counted when its request is first admitted, `output_weight` that of an output token.

    Raises
    ------
    SpecError
        If there are not two tenants.
    """
    if "tenant" not in run.requests:
        raise SpecError("service_gap needs two tenants: the workload names none (column tenant)")
    # Who was turned away got nothing and waited for nothing.
    served = run.requests["first_scheduled_ns"].astype(np.int64) >= 0
    rows = {
        name: run.requests[name].astype(np.int64)[served]
        for name in ("id", "arrival_ns", "first_scheduled_ns", "prompt_tokens")
    }
    tenant = run.requests["tenant"][served]
    tenants = np.unique(tenant)
    if len(tenants) != 2:
        raise SpecError(f"service_gap needs two tenants, there are {len(tenants)}")
    sign = np.where(tenant == tenants[0], 1.0, -1.0)
    start_ns, end_ns = _both_wait(rows["arrival_ns"], rows["first_scheduled_ns"], sign)
    times, service = [rows["first_scheduled_ns"]], [sign * input_weight * rows["prompt_tokens"]]
    for request_id, which in zip(rows["id"].tolist(), sign.tolist(), strict=True):
        tokens = run.token_times(request_id, seen=False)
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


def _both_wait(arrival: Ints, scheduled: Ints, sign: Floats) -> tuple[int, int]:
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
