"""Linear ageing around any ordering with numeric keys."""

import math

from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.policies.registry import register
from schedlab.policies.wrapper import Inner, Wrapper
from schedlab.sim.request import RequestState


@register("aged")
class Aged(Wrapper):
    """Subtract from a request's key in proportion to its wait: `key - rate_per_s * wait_s`.

    Optimises what the inner ordering does, less as waits grow: a large rate is first come, first
    served. Needs what the inner ordering needs. Nobody starves, as long as the inner keys are
    bounded below: whoever comes late enough goes behind.

    All keys age at one rate, so the order is that of ``key + rate_per_s * arrival_s``, which
    never changes, and decisions cost no more than the inner ordering's. Skip-ahead is honest for
    the same reason.

    Parameters
    ----------
    inner : str or mapping
        The ordering to age, e.g. ``sjf`` or ``{name: sjf}``.
    rate_per_s : float
        What a second of waiting is worth, in the unit of the inner key (tokens for `sjf`,
        classes for `priority`).
    """

    source = "ageing as in multi-programmed operating systems; linear form"

    def __init__(self, inner: Inner = "sjf", rate_per_s: float = 100.0) -> None:
        super().__init__(inner)
        if type(self._ordering).order is not ContinuousBatching.order:
            raise ValueError(f"only a fixed key can age; {inner} has none")
        if not 0.0 <= rate_per_s < math.inf:
            raise ValueError(f"rate_per_s must be finite and >= 0, got {rate_per_s}")
        self.rate_per_s = rate_per_s

    def key(self, state: RequestState, now_ns: int) -> float:
        """Order by the inner key and the time of arrival."""
        key = self._ordering.key(state, now_ns)
        if not isinstance(key, int | float):
            raise TypeError(f"only a numeric key can age; {self.inner} orders by {key!r}")
        return key + self.rate_per_s * state.request.arrival_ns * 1e-9
