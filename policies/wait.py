"""WAIT: batches wait for enough arrivals of a type, by the fluid equilibrium."""

import math
from bisect import bisect_left
from collections.abc import Sequence

from schedlab.policies.policy import Policy
from schedlab.policies.prompt_buckets import require_ascending
from schedlab.policies.registry import register
from schedlab.policies.sjf import predicted_tokens
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState
from schedlab.sim.sums import in_order


@register("wait")
class Wait(Policy):
    """Run a step only when enough new requests of some type have gathered to join it.

    Optimises throughput in heavy traffic: batches have the composition of the fluid equilibrium.
    Needs the type of each request, here the class of its predicted output length, and the rates
    of the types (given, or counted since the start). Of `total_limit` requests under way, type j
    may have a share proportional to ``rate_j * (length_j + 1)``, its limit; a step admits up to
    ``limit_j / (length_j + 1)`` of it. Otherwise the GPU idles, with decodes under way: latency
    is bad at low load, by design. First come, first served within a type and types have places
    of their own, so nobody starves.

    Two additions keep it from waiting for ever: after `max_wait_s` of the oldest request a step
    is run with what there is; and while nobody waits at all, requests under way are served
    (`drain`; the authors' code drops them at the end of a run). `only_cap` keeps the limits and
    drops the waiting, which is how a note of the authors' group says to use it.

    A decision is linear in the running batch, and walks the queue past types that have no room.
    Skip-ahead is honest: between events neither the queue nor
    the places change; the one thing that happens by itself is the time-out, which the plan names.

    Parameters
    ----------
    output_edges : sequence of float
        Longest predicted output of each type, ascending; what lies above counts as the last.
    request_rates : sequence of float, optional
        Relative arrival rates of the types; counted if not given.
    total_limit : int
        Requests under way, all types together; `policies.fluid` tells how many a load needs.
    max_wait_s : float
        Longest wait of a request for others of its type.
    drain, only_cap : bool
        See above.
    """

    source = "Ao, Luo, Simchi-Levi, Wang (arXiv:2504.11320), vidur_or, modified_booking_limit"
    needs_prediction = True

    def __init__(
        self,
        output_edges: Sequence[float] = (64, 128, 256, 512, 1024),
        request_rates: Sequence[float] | None = None,
        total_limit: int = 64,
        max_wait_s: float = 1.0,
        drain: bool = True,
        only_cap: bool = False,
    ) -> None:
        check_types(output_edges, request_rates, total_limit, max_wait_s)
        self.output_edges = output_edges
        self.request_rates = request_rates
        self.total_limit = total_limit
        self.max_wait_s = max_wait_s
        self.drain = drain
        self.only_cap = only_cap
        self._arrived = [0] * len(output_edges)
        self._in_flight = [0] * len(output_edges)
        # Worked out when they are needed, and anew after an arrival.
        self._limits: list[int] = []
        self._most_a_step: list[int] = []
        self._types: dict[int, int] = {}
        self._last_step_ns = 0

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Count arrivals by type."""
        kind = self._types[state.id] = self._type(state)
        self._arrived[kind] += 1
        self._in_flight[kind] += 1
        self._limits = []

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Count who is in flight."""
        self._in_flight[self._types.pop(state.id)] -= 1

    def on_tokens(self, plan: BatchPlan, num_steps: int, now_ns: int) -> None:
        """Remember when the last step ended."""
        self._last_step_ns = now_ns

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Run a step with new requests of each type up to its threshold, or wait."""
        types = self._types
        kinds = [types[state.id] for state in view.residents]
        running = [kinds.count(kind) for kind in range(len(self.output_edges))]
        counts = [n - r for n, r in zip(self._in_flight, running, strict=True)]
        places, thresholds = self._places(running)
        starts = (
            self.only_cap
            or (self.drain and not len(view.waiting))
            or any(n >= t for n, t in zip(counts, thresholds, strict=True))
        )
        overdue_ns, stalled_ns = self._timeouts_ns(view)
        if not starts and min(overdue_ns, stalled_ns) > view.now_ns:
            return builder.build(until_ns=min(overdue_ns, stalled_ns))
        while not builder.grant_running():
            builder.preempt(next(builder.running()))
        if builder.preempted:
            return builder.build()
        overdue = overdue_ns <= view.now_ns
        room = thresholds if starts and not (overdue or self.only_cap) else places
        room = [min(n, places) for n, places in zip(counts, room, strict=True)]
        for state in builder.undeferred(view.waiting) if any(room) else ():
            kind = types[state.id]
            if room[kind]:
                if not builder.grant(state):
                    break
                room[kind] -= 1
                if not any(room):
                    break
        if overdue:
            return builder.build(max_steps=FOREVER)
        return builder.build(max_steps=FOREVER if starts else 1, until_ns=overdue_ns)

    def _type(self, state: RequestState) -> int:
        edges = self.output_edges
        return min(bisect_left(edges, predicted_tokens(state)), len(edges) - 1)

    def _places(self, running: list[int]) -> tuple[list[int], list[int]]:
        """Return the free places of each type, and how many a step may fill."""
        if not self._limits:
            self._set_limits()
        free = [max(limit - n, 0) for limit, n in zip(self._limits, running, strict=True)]
        return free, [min(a, b) for a, b in zip(self._most_a_step, free, strict=True)]

    def _set_limits(self) -> None:
        """Work out of each type how many may run, and how many may come in one step."""
        rates = self.request_rates or self._arrived
        weights = [rate * (n + 1) for rate, n in zip(rates, self.output_edges, strict=True)]
        total = in_order(weights) or 1
        self._limits = [max(1, int(self.total_limit * weight / total)) for weight in weights]
        both = zip(self._limits, self.output_edges, strict=True)
        self._most_a_step = [max(1, int(limit / (n + 1))) for limit, n in both]

    def _timeouts_ns(self, view: EngineView) -> tuple[int, int]:
        """Return when the oldest request has waited long enough, and those under way have."""
        max_wait_ns = round(self.max_wait_s * 1e9)
        oldest_ns = view.waiting.head.request.arrival_ns if len(view.waiting) else FOREVER
        paused_ns = self._last_step_ns if view.running else FOREVER
        return oldest_ns + max_wait_ns, paused_ns + max_wait_ns


def check_types(
    output_edges: Sequence[float],
    request_rates: Sequence[float] | None,
    total_limit: int,
    max_wait_s: float,
) -> None:
    """Refuse impossible knobs of WAIT and nested WAIT (ValueError)."""
    if not output_edges:
        raise ValueError("output_edges must name at least one type")
    require_ascending("output_edges", output_edges)
    if request_rates is not None and (
        len(request_rates) != len(output_edges) or not all(rate > 0 for rate in request_rates)
    ):
        raise ValueError(
            f"request_rates must be {len(output_edges)} numbers > 0, one for each of output_edges"
        )
    if total_limit < 1:
        raise ValueError(f"total_limit must be at least 1, got {total_limit}")
    if not 0.0 <= max_wait_s < math.inf:
        raise ValueError(f"max_wait_s must be finite and >= 0, got {max_wait_s}")
