"""What every executor must keep, checked by running an engine on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.sim.core.audit import check_conservation
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import Executor, Steps, Work
from schedlab.sim.core.plan_log import RecordingExecutor
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import RequestState
from schedlab.testing import laws
from schedlab.testing.cases import Case, random_cases
from schedlab.testing.check import Law, raise_first, verdicts
from schedlab.testing.laws import require

MakeExecutor = Callable[[Case], Executor]


def check_executor(
    make: MakeExecutor,
    *,
    only: str | Iterable[str] | None = None,
    cases: Sequence[Case] | None = None,
    seed: int = 0,
    num_cases: int = 10,
) -> None:
    """Check that an executor keeps every law of `EXECUTOR_LAWS`.

    Parameters
    ----------
    make : callable
        Gives a fresh executor for a case, whose limits say how much memory the engine hands out.
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
    """
    if cases is None:
        cases = list(random_cases(seed, num_cases))
    name = getattr(make, "__qualname__", repr(make))
    raise_first(verdicts(f"executor {name}", make, EXECUTOR_LAWS, cases, only))


def generates_true_lengths(make: MakeExecutor, case: Case) -> None:
    """Every request generates its true length, none more, and tokens add up."""
    log = _run(make(case), case)
    laws.check(log, case.workload, case.limits, may_wait=True)
    requests = log.requests()
    generated = dict(
        zip(requests["id"].tolist(), requests["generated_tokens"].tolist(), strict=True)
    )
    for arrival in case.workload:
        asked = min(arrival.output_tokens, arrival.request.max_tokens)
        got = generated[arrival.request.id]
        require(got == asked, f"request {arrival.request.id} gets {got} tokens, not {asked}")


def runs_no_more_than_asked(make: MakeExecutor, case: Case) -> None:
    """Run at most the steps asked, all begun before the horizon, each of a positive whole time."""
    _run(_Watch(make(case)), case)


def runs_many_steps_as_single_ones(make: MakeExecutor, case: Case) -> None:
    """Run many steps at once as it does one by one, to the bit (where its times repeat)."""
    by_step = _run(make(case), replace(case, limits=laws.slow(case.limits)))
    change = laws.difference(by_step, _run(make(case), case), ("by single steps", "ahead"))
    require(change is None, f"the runs differ at {change}")


EXECUTOR_LAWS: dict[str, Law[MakeExecutor]] = {
    law.__name__: law
    for law in (
        runs_no_more_than_asked, generates_true_lengths, runs_many_steps_as_single_ones,
    )
}  # fmt: skip
"""The laws of executors by name. The last one is for executors whose times repeat."""


def _run(executor: Executor, case: Case) -> RunLog:
    engine = Engine(case.limits, ContinuousBatching(), executor, observer=check_conservation)
    log = simulate(engine, case.workload)
    check_conservation(engine)
    require(engine.requests.num_in_flight == 0, "the run ended with requests in flight")
    return log


class _Watch(RecordingExecutor):
    """Stands between the engine and an executor and looks at every answer."""

    def execute(self, work: Work, max_steps: int, horizon_ns: int) -> Steps:
        steps = self.inner.execute(work, max_steps, horizon_ns)
        times = steps.durations_ns
        require(1 <= len(times) <= max_steps, f"{len(times)} steps, asked for 1 to {max_steps}")
        for time_ns in times:
            require(type(time_ns) is int and time_ns > 0, f"a step takes {time_ns!r} ns")
        require(steps.overhead_ns >= 0, f"{steps.overhead_ns} ns of overhead")
        last_start_ns = work.now_ns + sum(times[:-1])
        require(
            len(times) == 1 or last_start_ns < horizon_ns,
            f"the last step starts at {last_start_ns} ns, not before {horizon_ns} ns",
        )
        decoding = set(work.decodes.members.values()) if work.shape.num_decodes else set()
        ran: set[RequestState] = decoding | {state for state, _ in work.plan.chunks}
        require(set(steps.finished) <= ran, f"{steps.finished} finish, but {ran} ran")
        require(
            len(set(steps.finished)) == len(steps.finished), f"{steps.finished}: somebody twice"
        )
        return steps
