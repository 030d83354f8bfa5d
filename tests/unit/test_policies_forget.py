"""Nothing of a request is left in a policy once it was answered or turned away."""

from collections.abc import Mapping

import pytest

from schedlab.sim.config import EngineConfig
from schedlab.sim.request import RequestState, Slo
from tests import laws, policy_cases
from tests.laws import arrival

CONFIG = EngineConfig(
    num_blocks=14, max_model_len=40, block_size=4, max_num_seqs=4, max_num_batched_tokens=60
)
FIRST_ID = 7_000_000_000  # so that a number that is a request's is known by its size


LATER = ("ltr._due, item, item", "magnus._chosen._first")
"""Looked at again when their time comes, by number or as the beginning of the batch chosen last."""


class TurnsAway:
    """Lets a policy plan, but at every third plan with a queue turns its last request away."""

    def __init__(self, policy):
        self._policy = policy
        self.num_plans = 0

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def plan(self, view, builder):
        self.num_plans += bool(len(view.waiting))
        if self.num_plans % 3 == 0 and len(view.waiting):
            last = list(view.waiting)[-1]
            if not last.num_preemptions:
                builder.reject(last, "by turns")
                return builder.build()
        return self._policy.plan(view, builder)


def kept(thing, where, seen):
    """Yield where requests, or their numbers, are found in what a policy keeps."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, RequestState) or (isinstance(thing, int) and 0 <= thing - FIRST_ID < 24):
        yield where
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            yield from kept(key, f"{where}, key", seen)
            yield from kept(value, f"{where}[{key!r}]", seen)
    elif isinstance(thing, list | tuple | set | frozenset) or type(thing).__name__ == "deque":
        for value in thing:
            yield from kept(value, f"{where}, item", seen)
    elif type(thing).__module__.startswith("schedlab.policies"):
        names = {*getattr(thing, "__dict__", {})}
        for kind in type(thing).__mro__:
            names.update(getattr(kind, "__slots__", ()))
        for name in sorted(names):
            yield from kept(getattr(thing, name, None), f"{where}.{name}", seen)


def work():
    """Have prompts and answers of many lengths, two tenants, and targets that cannot be met."""
    found = []
    for i in range(24):
        fields = {
            "tenant": f"tenant {i % 2}", "session": f"session {i % 5}", "priority": i % 3 - 1,
            "predicted_tokens": 3.0 + i % 7, "prefix_hash_ids": tuple(range(i, i + 2)),
            "slo": (None, Slo(ttft_ms=0.001, tpot_ms=0.002), Slo(tpot_ms=0.004))[i % 3],
        }  # fmt: skip
        at_ns = 400 * i
        found.append(arrival(FIRST_ID + i, at_ns, 8 + i % 9, 2 + (5 * i) % 17, **fields))
    return found


@pytest.mark.parametrize("case", policy_cases.CASES)
def test_policy_keeps_nothing_of_requests_that_are_gone(case):
    policy = policy_cases.make(case)
    # Who never turns anybody away, and wraps nobody who does, is told of nobody.
    turns_away = "on_reject" in vars(type(policy))
    log = laws.run(TurnsAway(policy) if turns_away else policy, work(), CONFIG)
    assert (1 in log.requests()["status"]) == (turns_away or case == "dynamic/preferring")
    found = list(kept(policy, case, {id(getattr(policy, "_view", None))}))
    assert [where for where in found if where not in LATER] == []
