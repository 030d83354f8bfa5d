"""The least loaded of a few engines drawn at random."""

from collections.abc import Sequence

from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.request import Request


@register("power_of_d")
class PowerOfD(Router):
    """The engine with the fewest requests of `d` that are drawn at random.

    Two choices already make the tail of the queue lengths fall double-exponentially; the tail of
    latencies follows as far as requests are alike. It is robust to stale state, since not everybody
    runs to the same engine.

    Parameters
    ----------
    d : int
        How many are looked at, without replacement; all if there are no more.
    """

    source = "Mitzenmacher 2001, The Power of Two Choices in Randomized Load Balancing"

    def __init__(self, d: int = 2) -> None:
        if isinstance(d, bool) or not isinstance(d, int) or d < 1:
            raise ValueError(f"d must be a whole number >= 1, got {d!r}")
        self.d = d

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Draw, and take the first with the fewest."""
        places = list(range(len(engines)))
        num_drawn = min(self.d, len(places))
        for i in range(num_drawn):  # the first steps of a shuffle
            j = i + int(self.rng.random() * (len(places) - i))
            places[i], places[j] = places[j], places[i]
        return min(places[:num_drawn], key=lambda place: engines[place].num_in_flight)
