"""What every scheduling policy must keep, checked over random work."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, Self

import numpy as np

from schedlab.policies.policy import Policy
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.errors import PolicyLied, described
from schedlab.sim.own_code import short
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import Request, RequestState
from schedlab.testing import laws
from schedlab.testing.cases import Case, random_cases
from schedlab.testing.check import Law, Verdict, raise_first, verdicts
from schedlab.testing.laws import require

MakePolicy = Callable[[], Policy]
_CLIENTS = 3


def check_policy(
    make: MakePolicy,
    *,
    may_wait: bool = False,
    only: str | Iterable[str] | None = None,
    cases: Sequence[Case] | None = None,
    seed: int = 0,
    num_cases: int = 20,
) -> None:
    """Check that a policy keeps every law of `POLICY_LAWS`.

    Parameters
    ----------
    make : callable
        Gives a fresh policy: its class, or a function that sets its knobs.
    may_wait : bool
        Whether the policy may leave the GPU idle on purpose although requests wait.
    only : str or iterable of str, optional
        Names of the laws to check; all by default.
    cases : sequence of Case, optional
        The workloads; by default `num_cases` drawn from `seed`.
    seed : int
        What the workloads are drawn by.
    num_cases : int
        How many are drawn.

    Raises
    ------
    LawBroken
        With the law, the smallest workload found that shows it, and how to repeat it.

    Examples
    --------
    >>> from schedlab.policies import ContinuousBatching
    >>> check_policy(ContinuousBatching, num_cases=2)
    """
    found = policy_verdicts(
        make, may_wait=may_wait, only=only, cases=cases, seed=seed, num_cases=num_cases
    )
    raise_first(found)


def policy_verdicts(
    make: MakePolicy,
    *,
    may_wait: bool = False,
    only: str | Iterable[str] | None = None,
    cases: Sequence[Case] | None = None,
    seed: int = 0,
    num_cases: int = 20,
) -> list[Verdict]:
    """Return what came of each law, broken or not; parameters are those of `check_policy`."""
    chosen = {k: law for k, law in POLICY_LAWS.items() if not (may_wait and k == "never_idles")}
    if cases is None:
        cases = list(random_cases(seed, num_cases))
    name = getattr(make, "__qualname__", repr(make))
    return verdicts(f"policy {name}", make, chosen, cases, only)


# -- the laws ----------------------------------------------------------------------------------


def serves_everyone(make: MakePolicy, case: Case) -> None:
    """Every request ends once; tokens, memory, seats and budget add up."""
    laws.check(_run(make(), case), case.workload, case.limits, may_wait=True)


def never_idles(make: MakePolicy, case: Case) -> None:
    """Idle only when nobody is there (for a policy that waits on purpose: may_wait)."""
    laws.check_never_idle(_run(make(), case, prove=False))


def skips_ahead_exactly(make: MakePolicy, case: Case) -> None:
    """Skipping ahead, with or without knowing the next arrival, changes no bit."""
    by_step = _run(make(), case, fast_forward=False)
    _require_same(by_step, _run(make(), case, prove=False), ("by single steps", "ahead"))
    cut = _run(make(), case, prove=False, drive=laws.cut_at_arrivals)
    _require_same(by_step, cut, ("by single steps", "ahead without knowing the next arrival"))


def keeps_its_promises(make: MakePolicy, case: Case) -> None:
    """Planned again at every step it would skip, it decides what it promised."""
    _run(make(), case, check_horizon=True, prove=False)


def serves_a_closed_loop(make: MakePolicy, case: Case) -> None:
    """With a few clients that wait for their answers, all are served, and no more are there."""
    # In every second case a predictor takes time, so that a request is sent before it is ready.
    delay_ns = case.cost.base_ns * (len(case.workload) % 2)
    late = tuple(replace(a, ready_ns=a.ready_ns + delay_ns) for a in case.workload)
    requests = _run(make(), replace(case, workload=late), max_concurrency=_CLIENTS).requests()
    require(len(requests["id"]) == len(case.workload), "not every request was sent")
    sent, answered = requests["arrival_ns"].tolist(), requests["finish_ns"].tolist()
    done = [i for i, at_ns in enumerate(answered) if at_ns >= 0]  # the others were rejected
    events = [(sent[i], 1) for i in done] + [(answered[i], -1) for i in done]
    there = 0
    for at_ns, change in sorted(events):  # at one instant answers go out before requests come
        there += change
        require(there <= _CLIENTS, f"{there} requests of {_CLIENTS} clients at {at_ns} ns")


def cannot_see_lengths(make: MakePolicy, case: Case) -> None:
    """Whatever the true lengths, it decides the same until the first answer ends."""
    draw = random.Random(len(case.workload))
    other = tuple(replace(a, output_tokens=draw.randint(1, 39)) for a in case.workload)
    before, after = (list(_decisions(make(), c)) for c in (case, replace(case, workload=other)))
    for (now_ns, one), (_, another) in zip(before, after, strict=False):
        require(
            one == another,
            f"at {now_ns} ns, before any answer ends, tokens computed by request are {one}, and "
            f"{another} with other true lengths",
        )


def is_reproducible(make: MakePolicy, case: Case) -> None:
    """Two runs are the same to the bit, whatever the global random numbers."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - what others may use
    try:
        logs = []
        for seed in (1, 2):
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            logs.append(_run(make(), case))
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
    _require_same(logs[0], logs[1], ("in one run", "in the next"))


def changes_nothing_but_itself(make: MakePolicy, case: Case) -> None:
    """Neither plan nor a hook writes to a request, or to the running and waiting."""
    _run(_Guard(make()), case)


def has_sane_keys(make: MakePolicy, case: Case) -> None:
    """Keys can be compared, none is None or NaN, and the queue is in their order."""
    _run(KeyWatch(make()), case)


POLICY_LAWS: dict[str, Law[MakePolicy]] = {
    law.__name__: law
    for law in (
        serves_everyone, has_sane_keys, changes_nothing_but_itself, never_idles,
        keeps_its_promises, skips_ahead_exactly, serves_a_closed_loop, cannot_see_lengths,
        is_reproducible,
    )
}  # fmt: skip
"""The laws of policies by name, in the order in which they are checked."""


# -- what they are made of ---------------------------------------------------------------------


def _run(
    policy: Any,  # noqa: ANN401 - a policy, or what stands around one
    case: Case,
    observer: Callable[[Engine], None] | None = None,
    fast_forward: bool = True,
    check_horizon: bool = False,
    **options: Any,  # noqa: ANN401 - those of `simulate`
) -> RunLog:
    limits = replace(case.limits, fast_forward=fast_forward, check_horizon=check_horizon)
    # Requests of its own: what a policy writes to them is not there for the next law.
    sent = [replace(arrival, request=replace(arrival.request)) for arrival in case.workload]
    return laws.run(policy, sent, limits, case.cost, observer=observer, **options)


def _require_same(one: RunLog, other: RunLog, names: tuple[str, str]) -> None:
    change = laws.difference(one, other, names)
    require(change is None, f"the runs differ at {change}")
    require(
        laws.signature(one) == laws.signature(other), f"token times differ {' and '.join(names)}"
    )


def _decisions(policy: Policy, case: Case) -> Iterator[tuple[int, dict[int, int]]]:
    """Yield when each step ended and what was computed by then, until the first answer ends."""
    seen: list[tuple[int, dict[int, int]]] = []

    def watch(engine: Engine) -> None:
        known = engine.requests
        if not (known.num_finished or known.num_rejected or known.held):
            computed = {s.id: s.num_computed_tokens for s in known.running.values()}
            seen.append((engine.now_ns, computed))

    # The baselines that reserve memory by true length may, by definition, know it.
    paged = replace(case, limits=replace(case.limits, kv_allocator="paged"))
    _run(policy, paged, watch, fast_forward=False, prove=False)
    return iter(seen)


class _Around:
    """Stands between the engine and a policy, under its name, and hands everything on."""

    def __new__(cls, policy: Policy, *_: object, **__: object) -> Self:
        # Messages of the engine tell the name of the type, and lines of its module.
        named = {"__module__": type(policy).__module__}
        return object.__new__(type(type(policy).__name__, (cls,), named))

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the policy has
        return getattr(self.policy, name)


class _Guard(_Around):
    """Notices when a policy writes to what it may only read."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self._view: EngineView | None = None

    def key(self, state: RequestState, now_ns: int) -> Any:  # noqa: ANN401 - anything that sorts
        return self._watched("key", self.policy.key, state, now_ns)

    def on_start(self, view: EngineView) -> None:
        self._view = view
        if self.policy.on_start is not None:
            self._watched("on_start", self.policy.on_start, view)

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        plan: BatchPlan = self._watched("plan", self.policy.plan, view, builder)
        return plan

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        if self.policy.on_arrival is not None:
            self._watched("on_arrival", self.policy.on_arrival, state, now_ns)

    def on_tokens(self, plan: BatchPlan, num_steps: int, now_ns: int) -> None:
        if self.policy.on_tokens is not None:
            self._watched("on_tokens", self.policy.on_tokens, plan, num_steps, now_ns)

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        if self.policy.on_finish is not None:
            self._watched("on_finish", self.policy.on_finish, state, now_ns)

    def _watched(self, name: str, hook: Callable[..., Any], *given: Any) -> Any:  # noqa: ANN401
        states = [value for value in given if isinstance(value, RequestState)]
        before = self._snapshot(states)
        answer = hook(*given)
        after = self._snapshot(states)
        for what, old in before.items():
            require(what in after, f"{name} removes {what}")
            if old is None and what.startswith("prompt of "):
                continue  # the prefix cache notes there what it was asked
            require(after[what] == old, f"{name} changes {what} from {old} to {after[what]}")
        require(len(after) == len(before), f"{name} adds {sorted(after.keys() - before.keys())}")
        return answer

    def _snapshot(self, given: Sequence[RequestState]) -> dict[str, object]:
        view = self._view
        known = [] if view is None else [*view.waiting, *view.running, *view.held]
        # What mypyc compiles has no slots by that name.
        slots = getattr(RequestState, "__mypyc_attrs__", None) or RequestState.__slots__
        found: dict[str, object] = {}
        if view is not None:
            found["the queue"] = [state.id for state in view.waiting]
            found["the running"] = [state.id for state in view.running]
        for state in (*given, *known):
            for name in slots:
                found[f"{name} of request {state.id}"] = getattr(state, name)
            for field in fields(Request):
                found[f"request.{field.name} of request {state.id}"] = getattr(
                    state.request, field.name
                )
        return found


class KeyWatch(_Around):
    """Looks at every key, and at the order of the queue before a plan.

    Parameters
    ----------
    policy : Policy
        Who is watched.
    num_plans : int
        Plans before which the queue is looked at, which takes as long as sorting it.
    """

    def __init__(self, policy: Policy, num_plans: int = FOREVER) -> None:
        super().__init__(policy)
        self._plans_left = num_plans
        self.num_looked_at = 0
        """Plans before which two requests or more waited, and their order was looked at."""
        self._kinds: dict[object, tuple[int, Any]] = {}

    def key(self, state: RequestState, now_ns: int) -> Any:  # noqa: ANN401 - anything that sorts
        """Return the policy's key once it is known to sort."""
        key = self.policy.key(state, now_ns)
        unpredicted = key is None and state.request.predicted_tokens is None
        hint = "; if it goes by predicted_tokens, give the policy a predictor" * unpredicted
        try:
            has_hole = _has_hole(key)
        except Exception as error:  # an array does not say whether it is itself
            raise PolicyLied(
                f"the key {short(key)} of request {state.id} cannot be compared: {described(error)}"
            ) from error
        _require_kept(
            not has_hole,
            f"the key of request {state.id} is {short(key)}, which sorts anywhere{hint}",
        )
        for other, its_key in self._kinds.values():
            try:
                bool(key < its_key)
            except Exception as error:
                raise PolicyLied(
                    f"the keys {short(key)} of request {state.id} and {short(its_key)} of request "
                    f"{other} cannot be compared: {described(error)}"
                ) from error
        self._kinds.setdefault(_kind(key), (state.id, key))
        return key

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Return the policy's plan once the queue is known to be in the order of its keys."""

        def place(state: RequestState) -> tuple[Any, int, int]:
            return self.policy.key(state, view.now_ns), state.request.arrival_ns, state.id

        if self._plans_left > 0 and len(view.waiting) > 1:
            self._plans_left -= 1
            self.num_looked_at += 1
            places = [(place(state), state) for state in view.waiting]
            for (one, sooner), (another, later) in pairwise(places):
                again = place(sooner)
                _require_kept(
                    again == one,
                    f"two calls of key() for request {sooner.id} at {view.now_ns} ns give "
                    f"{one[0]!r} and {again[0]!r}: draw random numbers in on_arrival, from a "
                    "generator that the constructor seeds",
                )
                _require_kept(
                    one < another,
                    f"at {view.now_ns} ns request {sooner.id} waits before request {later.id}, "
                    f"but their keys are now {one[0]!r} and {another[0]!r}: set static_keys to "
                    "False, or name in rekeyed whose key has changed",
                )
        return self.policy.plan(view, builder)


def _require_kept(condition: bool, message: str) -> None:
    if not condition:
        raise PolicyLied(message)


def _kind(key: object) -> object:
    """Return what decides whether keys can be compared: types, also inside tuples."""
    return tuple(map(_kind, key)) if isinstance(key, tuple) else type(key)


def _has_hole(key: object) -> bool:
    if isinstance(key, tuple):
        return any(map(_has_hole, key))
    return key is None or bool(key != key)
