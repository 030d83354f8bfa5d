"""What a policy is told whose plan ended in an error: by which hook, and where."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import isgeneratorfunction
from types import FrameType

from schedlab.sim.errors import InfeasiblePlan, described
from schedlab.sim.own_code import last_own_line, modules_of, place, short


def plan_fault(error: Exception, policy: object, plan_again: Callable[[], object]) -> str:
    """Return what went wrong in a plan, with the last line that is the policy's own.

    Where there is none, ours could not use what a hook returned: then the plan is made again, which
    a policy allows, to learn what was returned last. A run pays nothing for it before it ends.

    Parameters
    ----------
    error : Exception
        What ended the plan: an error of the policy's, or the refusal of what it asked for.
    policy : SchedulingPolicy
        Whose plan.
    plan_again : callable
        Asks the policy for the same plan.
    """
    cls = type(policy)
    at = last_own_line(error, cls)
    if isinstance(error, InfeasiblePlan):
        if at is not None:
            return f"{error} ({at[0]}(), {at[1]})"
        what = str(error)
    elif at is not None:
        return f"{at[0]}() raised {described(error)} ({at[1]})"
    else:
        what = f"plan() raised {described(error)}"
    for name in ("key", "victim", "hold", "chunk", "seating", "horizon"):
        if isgeneratorfunction(getattr(policy, name, None)):
            return f"{what}; {name}() has a yield in it, so it returns a generator"
    own = modules_of(cls)
    answer = _last_answer(own, plan_again) if own else None
    return what if answer is None else f"{what}, after {answer}"


def _last_answer(own: set[str], plan_again: Callable[[], object]) -> str | None:
    """Return which function of some modules returned last, and what; None if none did."""
    last: str | None = None

    def watch(frame: FrameType, event: str, value: object) -> None:
        nonlocal last
        if event == "return" and frame.f_globals.get("__name__") in own:
            at = place(frame, frame.f_lineno)
            last = f"{frame.f_code.co_name}() returned {short(value)} ({at})"

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        plan_again()
    except Exception:  # the one that is told
        pass
    finally:
        sys.setprofile(before)
    return last
