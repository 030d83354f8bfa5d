"""The busiest engine that will still hold the targets."""

from collections.abc import Sequence

from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.policies.routers.step_times import decode_ms, first_token_ms
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.offer import column
from schedlab.sim.request import Request


@register("slo_aware")
class SloAware(Router):
    """The most loaded engine that is expected to hold the request's targets.

    Packing requests onto engines that can still take them leaves others free for those with tight
    targets. Expected is, from the calibrated step times: a first token once the prompts that are to
    be computed, and this one, are; and a step of the decodes there with one more. If no engine is
    expected to hold them, the one with the earliest first token takes it. Without a target the
    least loaded does.

    Parameters
    ----------
    margin : float
        Share of a target that may be used up, > 0.
    """

    source = "PolyServe, Zhu et al. 2025 (arXiv:2507.17769): the highest load that holds the target"
    needs_targets = ("ttft_ms", "tpot_ms")

    def __init__(self, margin: float = 0.9) -> None:
        if not margin > 0:
            raise ValueError(f"margin must be > 0, got {margin!r}")
        self.margin = margin

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Choose among those that hold the targets."""
        ttft_ms = None if request.slo is None else request.slo.ttft_ms
        tpot_ms = None if request.slo is None else request.slo.tpot_ms
        if ttft_ms is None and tpot_ms is None:
            return self.least(column(engines, "num_in_flight"))
        first_ms = [first_token_ms(engine, request.prompt_tokens) for engine in engines]
        places, prompt_tokens = range(len(engines)), request.prompt_tokens
        holding = [
            place
            for place in places
            if (ttft_ms is None or first_ms[place] <= self.margin * ttft_ms)
            and (
                tpot_ms is None or decode_ms(engines[place], prompt_tokens) <= self.margin * tpot_ms
            )
        ]
        if holding:
            return max(holding, key=lambda place: (engines[place].num_in_flight, -place))
        return min(places, key=lambda place: (first_ms[place], place))
