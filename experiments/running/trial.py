"""Try a policy from outside on the first requests of a run, before its numbers are believed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import chain, islice

from schedlab.policies.policy import Policy
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import Executor, SimExecutor
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.errors import PolicyLied, Stalled
from schedlab.sim.request import Arrival, Request
from schedlab.testing.laws import difference
from schedlab.testing.policy import KeyWatch

MAX_PLANS = 20_000
"""A trial ends after so many plans, which is a second or two, however long the answers are."""


MAX_WATCHED = 1_000
"""Plans of a trial before which the order of the queue is held against the keys."""


CROWD = 1_000
"""How many times as fast requests are sent again where two of them seldom waited."""

_CROWDED_PLANS = 200


class Watched:
    """Hands requests on, and looks when they are served whether they are as they were.

    Parameters
    ----------
    arrivals : iterable of Arrival
        Those that are handed on.
    num_requests : int
        At how many of them, the first ones, it looks.
    who : sequence of str
        What others than the policy were given them.
    """

    def __init__(self, arrivals: Iterable[Arrival], num_requests: int, who: Sequence[str]) -> None:
        self._arrivals = arrivals
        self._num_requests = num_requests
        self._who = who
        self._seen: list[tuple[Request, Request]] = []

    def __iter__(self) -> Iterator[Arrival]:
        """Return the arrivals one after the other."""
        rest = iter(self._arrivals)
        return chain(self._noted(rest), rest)

    def _noted(self, arrivals: Iterator[Arrival]) -> Iterator[Arrival]:
        """Yield the arrivals that are looked at."""
        for arrival in islice(arrivals, self._num_requests - len(self._seen)):
            self._seen.append((replace(arrival.request), arrival.request))
            yield arrival

    def check(self) -> None:
        """Raise PolicyLied if a request was written to."""
        for before, after in self._seen:
            _require_unchanged(" or ".join(self._who), before, after)


class _Enough(Exception):  # noqa: N818 - not an error
    pass


def try_policy(
    name: str,
    make_policy: Callable[[], Policy],
    make_executor: Callable[[], SimExecutor],
    config: EngineConfig,
    arrivals: Callable[[], Iterable[Arrival]],
    num_requests: int,
    max_concurrency: int | None = None,
) -> None:
    """Run the first requests twice, planning every step and skipping ahead, and compare.

    The first time its keys are watched: they must sort, and stay where they are unless the policy
    says that they move. Where two requests seldom wait, order shows little, so a few plans are made
    again with requests that come `CROWD` times as fast. Requests must come out of a run as they
    went in.

    Parameters
    ----------
    name : str
        What a message calls the policy.
    make_policy, make_executor, arrivals : callable
        Give a fresh one for each of the two runs.
    config : EngineConfig
        The limits of the run to come.
    num_requests : int
        How many requests to try; fewer if they take more than `MAX_PLANS` plans.
    max_concurrency : int, optional
        As in `simulate`.

    Raises
    ------
    PolicyLied
        If a key is None, NaN, of another kind than others, or moves unsaid, if a plan is not what
        was promised, if it writes to a request, if two runs are not the same, or if skipping ahead
        changes the run; names the policy, the step and what differs.
    PolicyError, Stalled
        If the policy misbehaves in another way.
    """

    def run(
        limits: EngineConfig, stop: Callable[[Engine], bool], watch: int = 0, faster: int = 1
    ) -> Engine:
        def observe(engine: Engine) -> None:
            if stop(engine):
                raise _Enough

        executor: Executor = make_executor()
        made = make_policy()
        key_watch = KeyWatch(made, watch) if watch else None
        engine = Engine(limits, key_watch or made, executor, observer=observe)
        sent = _crowded(list(islice(arrivals(), num_requests)), faster)
        as_sent = [replace(arrival.request) for arrival in sent]
        try:
            simulate(engine, sent, max_concurrency if faster == 1 else None)
        except _Enough:
            pass
        except Stalled:
            # A policy may wait for more requests than the trial has; a run that stalls says so.
            pass
        except PolicyLied as error:
            crowd = f", sent {CROWD} times as fast" if faster > 1 else ""
            raise PolicyLied(f"{tried}{crowd}, step {engine.log.num_steps}: {error}") from error
        if key_watch and faster == 1 and _is_worth_a_crowd(key_watch, sent):
            run(limits, lambda e: e.num_plans >= _CROWDED_PLANS, _CROWDED_PLANS, CROWD)
        for arrival, before in zip(sent, as_sent, strict=True):
            _require_unchanged(tried, before, arrival.request)
        return engine

    tried = (
        f"policy {name}, tried on the first {num_requests} requests "
        "(engine.trial_requests: 0 tries nothing)"
    )
    # With one batch in flight, where a plan can be held against what was promised before.
    config = replace(config, pipeline_parallel_size=1)
    proving = replace(config, check_horizon=True)
    checked = run(proving, lambda e: e.num_plans >= MAX_PLANS, MAX_WATCHED)
    if not config.fast_forward or config.check_horizon:
        return  # the run to come skips nothing
    end_ns = checked.now_ns
    ahead = run(config, lambda e: e.now_ns >= end_ns)
    change = difference(checked.log, ahead.log, ("by single steps", "ahead"))
    if change is None:
        return
    again = run(proving, lambda e: e.num_plans >= MAX_PLANS)
    differs = difference(checked.log, again.log, ("in one run", "in the next"))
    if differs is not None:
        raise PolicyLied(
            f"{tried}: two runs are not the same ({differs}); draw random numbers from a generator "
            "that the constructor seeds"
        )
    raise PolicyLied(
        f"{tried}: skipping ahead changes the run at {change}; the policy promises more than "
        "it keeps, or a hook looks at the progress of other requests"
    )


def _crowded(sent: list[Arrival], faster: int) -> list[Arrival]:
    """Return arrivals that come so many times as fast."""
    if faster == 1 or not sent:
        return sent
    first_ns = sent[0].request.arrival_ns
    crowded = []
    for arrival in sent:
        request = arrival.request
        at_ns = first_ns + (request.arrival_ns - first_ns) // faster
        ready_ns = at_ns + arrival.ready_ns - request.arrival_ns
        crowded.append(
            replace(arrival, request=replace(request, arrival_ns=at_ns), ready_ns=ready_ns)
        )
    return crowded


def _is_worth_a_crowd(watch: KeyWatch, sent: list[Arrival]) -> bool:
    """Say whether too few queues were seen; requests of a session follow from answers instead."""
    return watch.num_looked_at < _CROWDED_PLANS and len(sent) > 1 and sent[0].turn is None


def _require_unchanged(tried: str, before: Request, after: Request) -> None:
    for field in fields(Request):
        was, now = getattr(before, field.name), getattr(after, field.name)
        if was is not now and was != now:
            raise PolicyLied(
                f"{tried}: request {before.id} was changed: {field.name} from {was!r} to {now!r}; "
                "a request belongs to the trace, keep what you know of it in the class"
            )
