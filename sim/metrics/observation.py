"""What is measured of a run: all of it, a window of it, or a class of its requests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.metrics.latencies import Latencies, seen_column
from schedlab.sim.metrics.step_lengths import StepLengths
from schedlab.sim.metrics.step_totals import StepTotals, step_totals
from schedlab.sim.metrics.weighted import WeightedSample
from schedlab.sim.record.columns import (
    Bools,
    Columns,
    Floats,
    Ints,
    Pairs,
    batches,
    completed,
    pairs,
    rows_of,
    whole_numbers,
)
from schedlab.sim.record.sessions import has_sessions, session_columns

if TYPE_CHECKING:
    from schedlab.sim.result import RunResult

_NS_PER_MS = 1e6
_NS_PER_S = 1_000_000_000


class Observation:
    """The measured part of a run; metrics see nothing else of it.

    Parameters
    ----------
    result : RunResult
        The run; its window, if it has one, is what is measured.
    chosen : ndarray of bool, shape (requests of the run,), optional
        Of which requests; of all if absent. Rates are over the same time as those of all
        requests, so that classes add up.

    Attributes
    ----------
    requests : mapping of str to ndarray
        Those that arrive inside the window, however long they stay.
    leaving : mapping of str to ndarray
        Those that finish inside it, as their clients see it, whenever they arrived: what a rate
        counts. In a steady system those that are cut off at one end make up for those at the
        other.
    window : Window or None
        The span of time that is measured, half-open; None if it is the whole run.
    kv_capacity_tokens, num_engines : int
        Size of the KV cache of each engine, and how many engines there are.
    engines : tuple of EngineFacts
        What the engines of a fleet are; empty if nobody said.
    tiers : tuple of TierFacts
        Memory below the GPU's of each engine, the nearest first; empty if there is none.
    copies, copy_waits : mapping of str to ndarray
        All copies to and from there, and the steps that waited for some.
    statistics : dict of str to dict of str to float
        Latency to what is known of its distribution; kept by `sim.metrics.distributions`.
    """

    def __init__(self, result: RunResult, chosen: Bools | None = None) -> None:
        self._result = result
        self._chosen = chosen
        self.window = result.window
        self.kv_capacity_tokens = result.kv_capacity_tokens
        self.num_engines = result.num_engines
        self.engines = result.engines
        self.tiers = result.tiers
        self.copies, self.copy_waits = result.copies, result.copy_waits
        self.statistics: dict[str, dict[str, float]] = {}
        rows = result.requests if chosen is None else rows_of(result.requests, chosen)
        self.requests = self.leaving = rows
        if self.window is not None:
            self.requests = rows_of(rows, self.window.holds(whole_numbers(rows, "arrival_ns")))
            finish_ns = whole_numbers(rows, seen_column(rows, "finish"))
            self.leaving = rows_of(rows, self.window.holds(finish_ns))

    def column(self, name: str) -> np.ndarray:
        """Return a column of all requests of the run, also of those outside the window.

        Raises
        ------
        SpecError
            If there is no such column.
        """
        if name not in self._result.requests:
            raise SpecError(f"column: no {name!r}; {nearest(name, self._result.requests)}")
        return self._result.requests[name]

    @cached_property
    def sessions(self) -> Columns:
        """One row a session whose first request is one of `requests`; none without sessions."""
        table, first = self._all_sessions
        return rows_of(table, np.isin(first, self._ids(self.requests)))

    @property
    def leaving_sessions(self) -> Columns:
        """The same of those whose last answer comes inside the window, as `leaving`."""
        table, first = self._all_sessions
        if self._chosen is not None:
            table = rows_of(table, np.isin(first, self._ids(self._result.requests)[self._chosen]))
        if self.window is None or not table:
            return table
        return rows_of(table, self.window.holds(whole_numbers(table, "finish_ns")))

    @cached_property
    def _all_sessions(self) -> tuple[Columns, Ints]:
        """One row a session of the run, and the id of the first request of each."""
        everyone = self._result.requests
        if not has_sessions(everyone):
            return {}, np.zeros(0, dtype=np.int64)
        table = session_columns(everyone)
        first = np.concatenate([[0], np.cumsum(whole_numbers(table, "num_requests"))[:-1]])
        return table, self._ids(everyone)[first]

    def only_where(self, column: str, value: object) -> Observation:
        """Return what is measured of the requests that have a value in a column; NaN is one.

        Raises
        ------
        SpecError
            If there is no such column, or no such value can be in it.
        """
        values = self.column(column)
        if np.issubdtype(values.dtype, np.number) and isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise SpecError(f"value: {column} holds numbers, not {value!r}") from None
        return self.only(np.isnan(values) if value != value else values == value)

    def only(self, chosen: Bools) -> Observation:
        """Return what is measured of a class of requests.

        Parameters
        ----------
        chosen : ndarray of bool, shape (requests of the run,)
            Who is in it; told by a `column`.
        """
        return Observation(self._result, chosen if self._chosen is None else chosen & self._chosen)

    @cached_property
    def completed(self) -> Bools:
        """Whether each of `requests` got its answer."""
        return completed(self.requests)

    @cached_property
    def latencies(self) -> Latencies:
        """TTFT, TPOT, ... of each of `requests` in ms; NaN where there is none."""
        return Latencies(self.requests)

    @cached_property
    def duration_s(self) -> float:
        """Length of the window, or last finish - first arrival; 0 if nothing finished."""
        if self.window is not None:
            return self.window.duration_s
        everyone = self._result.requests
        finish_ns = whole_numbers(everyone, seen_column(everyone, "finish"))[completed(everyone)]
        if not len(finish_ns):
            return 0.0
        return float(finish_ns.max() - whole_numbers(everyone, "arrival_ns").min()) / _NS_PER_S

    @cached_property
    def begin_ns(self) -> int:
        """When the time that `duration_s` is of begins."""
        if self.window is not None:
            return self.window.begin_ns
        arrival_ns = whole_numbers(self._result.requests, "arrival_ns")
        return int(arrival_ns.min()) if len(arrival_ns) else 0

    @cached_property
    def first_arrival_ns(self) -> int:
        """When the first of `requests` arrives; 0 if there is none."""
        arrival_ns = whole_numbers(self.requests, "arrival_ns")
        return int(arrival_ns.min()) if len(arrival_ns) else 0

    @property
    def token_gaps(self) -> Pairs:
        """All gaps between tokens of one completed request, pooled: (gap in ns, how many)."""
        return pairs(self._gap_table)

    @cached_property
    def gap_sample(self) -> WeightedSample:
        """The same in ms, as a list whose statistics are known."""
        return WeightedSample(self._gap_batches, per=_NS_PER_MS)

    def _gap_batches(self) -> Iterator[Pairs]:
        yield from map(pairs, batches(self._gap_table))

    @cached_property
    def _gap_table(self) -> Columns:
        are_all = self.window is None and self._chosen is None
        return self._result.log.token_gaps(self._answered(self.requests, are_all))

    @property
    def token_counts(self) -> Pairs:
        """Tokens seen inside the window, of whatever request: (time in ns, how many)."""
        pieces = list(self.token_count_batches())
        if len(pieces) == 1:
            return pieces[0]
        times_ns, tokens = zip(*pieces, strict=True)
        return np.concatenate(times_ns), np.concatenate(tokens)

    def token_count_batches(self, answered: bool = False) -> Iterator[Pairs]:
        """Yield `token_counts` some steps at a time, in order of time.

        Parameters
        ----------
        answered : bool
            Whether to leave out what requests got that were not completed, before or after.
        """
        yield from self._counted(self._answered_count_table if answered else self._count_table)

    def piece_count_batches(self) -> Iterator[Pairs]:
        """Yield as `token_count_batches` of completed requests, but pieces of their streams.

        Who gets several tokens in one step, as drafts are right, gets them in one piece.
        """
        log = self._result.log
        if "accepted_tokens" not in log.steps():  # nobody speculates
            yield from self.token_count_batches(answered=True)
        else:
            yield from self._counted(log.token_times_of_all().counts(self._answered_ids, True))

    def _counted(self, table: Columns) -> Iterator[Pairs]:
        """Yield when clients see what is counted at the ends of steps, as far as it is measured."""
        for made_ns, tokens in map(pairs, batches(table)):
            times_ns = self._seen_ns(made_ns)
            if self.window is not None:
                inside = self.window.holds(times_ns)
                yield times_ns[inside], tokens[inside]
            else:
                yield times_ns, tokens

    @cached_property
    def _count_table(self) -> Columns:
        ids = None if self._chosen is None else self._ids(self._result.requests)[self._chosen]
        return self._result.log.token_counts(ids)

    @cached_property
    def _answered_count_table(self) -> Columns:
        ids = self._answered_ids
        return self._count_table if ids is None else self._result.log.token_counts(ids)

    @cached_property
    def _answered_ids(self) -> Ints | None:
        """Who of the requests got the answer, inside the window or not; None if all did."""
        everyone = self._result.requests
        rows = everyone if self._chosen is None else rows_of(everyone, self._chosen)
        return self._answered(rows, self._chosen is None)

    def _seen_ns(self, made_ns: Ints) -> Ints:
        """Return when clients see tokens that come out of the engine at some times."""
        if self._seen_by_end is None:
            return made_ns
        ends_ns, seen_ns = self._seen_by_end
        return seen_ns[np.searchsorted(ends_ns, made_ns)]

    @cached_property
    def _seen_by_end(self) -> Pairs | None:
        """The ends of steps and when their tokens are seen; None without a front end."""
        frontend = self._result.frontend
        if frontend is None:
            return None
        counts = pairs(self._result.log.token_counts())
        return counts[0], frontend.seen_ns(counts[0], counts)

    def _answered(self, requests: Columns, are_all: bool) -> Ints | None:
        """Return who of some requests got the answer; None if tokens of all requests are theirs."""
        is_done = completed(requests)
        if are_all and not np.any(whole_numbers(requests, "generated_tokens")[~is_done]):
            return None
        return self._ids(requests)[is_done]

    def token_times(self, request_id: int, *, seen: bool = True) -> Ints:
        """Return when the client saw each token of a request, in ns.

        Parameters
        ----------
        request_id : int
            Which.
        seen : bool
            False for when they came out of the engine, which is another time behind a front end.
        """
        made_ns = self._result.log.token_times(request_id)
        return self._seen_ns(made_ns) if seen else made_ns

    @cached_property
    def preemptions(self) -> Columns:
        """One row a preemption of one of `requests`: id, evicted_ns, resumed_ns."""
        table = self._result.log.preemptions()
        return rows_of(table, np.isin(table["id"], self._ids(self.requests)))

    @property
    def steps(self) -> Columns:
        """One row a step that starts inside the window, as `sim.record.steps.StepTable` has them.

        Raises
        ------
        SpecError
            Of a class: the engine serves all requests together.
        """
        steps = self._all_steps
        if self.window is None:
            return steps
        return rows_of(steps, self.window.holds(whole_numbers(steps, "start_ns")))

    def step_batches(self) -> Iterator[Columns]:
        """Yield `steps` some at a time, in order of their start; of a long run not all are held."""
        for some in batches(self._all_steps):
            if self.window is None:
                yield some
            else:
                yield rows_of(some, self.window.holds(whole_numbers(some, "start_ns")))

    @cached_property
    def step_totals(self) -> StepTotals:
        """What the metrics of the engine need of `steps`."""
        return step_totals(self.step_batches())

    @cached_property
    def engine_busy_ns(self) -> Floats:
        """For how long each engine had steps in flight in the time that `duration_s` is of.

        Steps that begin before it or end after it count for what lies inside.
        """
        begin_ns, num = self.begin_ns, self.num_engines
        end_ns = begin_ns + round(self.duration_s * _NS_PER_S)
        busy_ns, lengths = np.zeros(num), StepLengths()
        for some in batches(self._all_steps):
            start_ns = np.clip(lengths.starts_ns(some), begin_ns, end_ns)
            took_ns = np.clip(whole_numbers(some, "end_ns"), begin_ns, end_ns) - start_ns
            engine = whole_numbers(some, "engine") if "engine" in some else np.zeros_like(took_ns)
            busy_ns += np.bincount(engine, weights=took_ns, minlength=num)
        return busy_ns

    @cached_property
    def _all_steps(self) -> Columns:
        if self._chosen is not None:
            raise SpecError("steps serve all requests together: they are not told of a class")
        return self._result.log.steps()

    @property
    def step_ns(self) -> Floats:
        """How long each of `steps` took."""
        steps = self.steps
        start_ns = whole_numbers(steps, "start_ns")
        return (whole_numbers(steps, "end_ns") - start_ns).astype(np.float64)

    @staticmethod
    def _ids(requests: Columns) -> Ints:
        return whole_numbers(requests, "id")
