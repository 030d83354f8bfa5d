"""A policy that turns requests away, for drivers whose clients must hear of it."""

from schedlab.policies import ContinuousBatching
from schedlab.sim.core.plan import FOREVER


class Refusing(ContinuousBatching):
    """Rejects requests of priority 1 whenever it sees them."""

    def plan(self, view, builder):
        builder.grant_running()
        for state in view.waiting:
            if state.request.priority:
                builder.reject(state, "not today")
            else:
                builder.grant(state)
        return builder.build(max_steps=FOREVER)
