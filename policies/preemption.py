"""Making room for one running request at the expense of others."""

from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.request import RequestState


def grant_or_preempt(
    builder: PlanBuilder, state: RequestState, victims: list[RequestState]
) -> bool:
    """Grant a running request its tokens, preempting from the end of `victims` until they fit.

    Parameters
    ----------
    builder : PlanBuilder
        The ledger.
    state : RequestState
        A running request; its own turn in `victims` means that it is preempted itself.
    victims : list of RequestState
        Running requests not granted anything yet, `state` among them, the first to go last. Who
        is granted or preempted is taken out.

    Returns
    -------
    bool
        Whether it was granted; False also if the tokens or the rows of the step are used up.
    """
    while not builder.grant(state):
        if builder.tokens_left < 1 or builder.rows_left < 1:
            return False
        victim = victims.pop()
        builder.preempt(victim)
        if victim is state:
            return False
    victims.remove(state)
    return True
