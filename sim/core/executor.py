"""What carries a plan out: the protocol, and the simulated GPU behind it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import Final

from mypy_extensions import mypyc_attr

from schedlab.sim.core.decode_batch import DecodeBatch
from schedlab.sim.core.kv_bytes import KVBytes
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.segment import IS_COMPILED, StepTimes
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.cost.step_spread import Scatter
from schedlab.sim.request import Request, RequestState

_FEW_STEPS: Final = 8
_FEW_DECODES: Final = 6


@mypyc_attr(free_list_len=1)
class Work:
    """One plan, ready to be executed.

    Attributes
    ----------
    now_ns : int
        When its first step starts.
    plan : BatchPlan
        What is done in each step.
    shape : BatchShape
        What the first step costs by.
    decodes : DecodeBatch
        Exactly the requests that decode, if ``shape.num_decodes`` is not zero.
    ready_ns : int
        When the tokens are known that it computes, if it is planned before; -1 where a step is
        planned with all of them known.
    """

    __slots__ = ("decodes", "now_ns", "plan", "ready_ns", "shape")

    def __init__(
        self,
        now_ns: int,
        plan: BatchPlan,
        shape: BatchShape,
        decodes: DecodeBatch,
        ready_ns: int = -1,
    ) -> None:
        self.now_ns = now_ns
        self.plan = plan
        self.shape = shape
        self.decodes = decodes
        self.ready_ns = ready_ns


@mypyc_attr(free_list_len=1, acyclic=True)
class Steps:
    """What an executor did.

    Attributes
    ----------
    durations_ns : list of int
        One entry a step, at least one; scheduling overhead included.
    times : StepTimes or None
        What gives them, as long as nobody has asked for them one by one.
    num_steps : int
        How many they are.
    overhead_ns : int
        Scheduling overhead in each of them.
    finished : list of RequestState
        Requests whose last token came out at the end of the last step.
    stages_ns : list of int or None
        What each stage of a pipeline spends on the only step, if there are several.
    """

    __slots__ = ("_durations_ns", "_num_steps", "finished", "overhead_ns", "stages_ns", "times")

    def __init__(
        self,
        durations_ns: list[int],
        overhead_ns: int,
        finished: list[RequestState],
        stages_ns: list[int] | None = None,
        times: StepTimes | None = None,
        num_steps: int = 0,
    ) -> None:
        self._durations_ns = durations_ns
        self.stages_ns = stages_ns
        self.overhead_ns = overhead_ns
        self.finished = finished
        self.times = times
        self._num_steps = num_steps  # while they are not written down

    @property
    def durations_ns(self) -> list[int]:
        """What each step takes."""
        times = self.times
        if times is not None:
            self._durations_ns = times.durations_ns(self._num_steps)
            self.times = None
        return self._durations_ns

    @durations_ns.setter
    def durations_ns(self, durations_ns: list[int]) -> None:
        self._durations_ns = durations_ns
        self.times = None

    @property
    def num_steps(self) -> int:
        """How many they are."""
        return self._num_steps if self.times is not None else len(self._durations_ns)

    @property
    def total_ns(self) -> int:
        """What they take together."""
        if self.times is not None:
            return self.times.total_ns(self._num_steps)
        durations_ns = self._durations_ns
        return durations_ns[0] if len(durations_ns) == 1 else total(durations_ns)

    def keep(self, num_steps: int) -> None:
        """Forget all but the first so many; nobody finishes in the last of these."""
        if self.times is not None:
            self._num_steps = num_steps
        else:
            del self._durations_ns[num_steps:]
        self.finished = []


def total(of_steps: list[int]) -> int:
    """Add up a number of each step; of few, compiled code looks no function up for it."""
    if len(of_steps) > _FEW_STEPS:
        return sum(of_steps)
    added = 0
    for number in of_steps:
        added += number
    return added


@mypyc_attr(allow_interpreted_subclasses=True)
class Executor:
    """Runs steps, and alone knows when a request has generated its last token.

    Those of all backends derive from it, so that compiled code calls them directly.
    """

    kv_bytes: KVBytes | None = None
    """Who holds what KV blocks contain, where blocks must be told apart: with a prefix cache or
    tiers on a real GPU. A simulated one has no bytes."""
    reads_extremes: bool = True
    """Whether it needs the smallest context, and the largest in a step of decodes alone."""
    prices_never_fall: bool = False
    """Whether a step with a longer chunk is never estimated to take less."""

    def add(self, request: Request, output_tokens: int) -> None:
        """Learn of a request and its true output length (a real backend ignores EOS)."""
        raise NotImplementedError

    def joined(self, states: Collection[RequestState], decodes: DecodeBatch) -> None:
        """Learn that requests are about to enter the decode batch."""
        raise NotImplementedError

    def look_ahead(self, state: RequestState) -> None:
        """Set the track of a request with drafts that is in no batch: what comes of them."""
        raise NotImplementedError

    def execute(self, work: Work, max_steps: int, horizon_ns: int) -> Steps:
        """Run up to `max_steps` steps of the same plan.

        Every step after the first must start before `horizon_ns`. The run ends with the step in
        which the first request finishes. More than one step is only asked of decode-only plans.
        """
        raise NotImplementedError

    def cut(self, num_steps: int) -> None:
        """Learn that of the steps executed last only the first `num_steps` take place."""
        raise NotImplementedError

    def released(self, state: RequestState) -> None:
        """Learn that a request gives up its KV memory: preempted, or finished and not held.

        What it has computed still counts.
        """
        raise NotImplementedError

    def swapped_out(self, state: RequestState) -> None:
        """Copy a request's KV to host memory before it is released."""
        raise NotImplementedError

    def swapped_in(self, state: RequestState) -> None:
        """Copy a request's KV back into memory of its own, before it is computed on."""
        raise NotImplementedError

    def remove(self, state: RequestState) -> None:
        """Forget a request that finished or was rejected; a held one still has its memory."""
        raise NotImplementedError

    def output_tokens(self, request: Request) -> int:
        """Return the true output length of a request that was added and not removed yet.

        For the log and for allocators that reserve, never for policies. It generates no more than
        its `max_tokens` of them.
        """
        raise NotImplementedError

    def estimate_step_ns(self, shape: BatchShape, num_steps: int = 1) -> int:
        """Estimate a step, or the longest of so many like it, for policies that plan by time."""
        raise NotImplementedError

    def chunk_pricer(self, shape: BatchShape, context_tokens: int) -> Callable[[int], int]:
        """Return what `estimate_step_ns` says of a step with one more prefill, by its tokens."""
        return lambda tokens: self.estimate_step_ns(shape.with_chunk(tokens, context_tokens))


@mypyc_attr(acyclic=True)
class _Answer:
    """The answer of a request that the executor was told of.

    Attributes
    ----------
    output_tokens : int
        Its true length.
    length : int
        How many tokens have been generated when it ends.
    is_whole : bool
        Whether all of it comes out here, even where of others one token does.
    due_step : int
        The count of decode steps at which it is complete; -1 while nobody knows.
    listed_step : int
        The count of decode steps at which it is looked at next: then, or sooner; FOREVER if at
        none.
    turn : int
        Answers that are complete at the same step end in the order of this.
    state : RequestState or None
        The request, once it decodes.
    """

    __slots__ = (
        "due_step", "is_whole", "length", "listed_step", "output_tokens", "state", "turn",
    )  # fmt: skip

    def __init__(self, output_tokens: int, max_tokens: int) -> None:
        self.output_tokens = output_tokens
        self.length = output_tokens if output_tokens < max_tokens else max_tokens
        self.is_whole = False
        self.due_step = -1
        self.listed_step = FOREVER
        self.turn = -1
        self.state: RequestState | None = None


def _turn(answer: _Answer) -> int:
    return answer.turn


@mypyc_attr(allow_interpreted_subclasses=True)
class SimExecutor(Executor):
    """A GPU that takes as long as a cost model says.

    Parameters
    ----------
    pricing : Pricing
        What steps take; counts those that are executed.

    Attributes
    ----------
    most_tokens : int
        So many more tokens come out of a request that begins to decode here, even if its answer
        goes on: 1 where prompts alone are computed. Not of those that `add_whole` told of.
    decodes_single_tokens : bool
        Whether a step is priced with chunks of one token as decodes.
    slowness : float
        Every step takes so many times as long as it is priced; who estimates steps does not know.
    scatter : Scatter or None
        By how much single steps differ from their price, if they do; nobody knows that beforehand.
    writes_late : bool
        Whether successive steps are only added up when they begin, and written down one by one
        when they have ended: sooner done where this is compiled, and later where it is not.
    """

    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        self.prices_never_fall = pricing.never_falls
        self.reads_extremes = pricing.cost_model.reads_extremes
        self.most_tokens = FOREVER
        self.decodes_single_tokens = False
        self.slowness = 1.0
        self.scatter: Scatter | None = None
        self.writes_late = IS_COMPILED
        self._has_overhead = pricing.overhead != SchedulingOverhead()
        self._num_steps = 0
        self._last_shape = BatchShape(0, 0, 0)
        self._last_num_steps = 0
        self._answers: dict[int, _Answer] = {}
        # Answers by the count of decode steps at which they are looked at next. Whoever was paused
        # meanwhile is complete later and listed anew when met, not each time that it goes on; who
        # is out of the batch is dropped, until it joins again.
        self._due: dict[int, list[_Answer]] = {}
        self._due_steps: list[int] = []
        self._num_turns = 0
        # Which of these is the next, and an answer that is complete then, found when so many had
        # left the batch; -1 = look for it.
        self._soonest = FOREVER
        self._next: _Answer | None = None
        self._num_departures = -1
        self._last_step_ns = 1
        self._first_step_ns = int(pricing.overhead.first_step_s * 1e9 + 0.5)

    def add(self, request: Request, output_tokens: int) -> None:
        """Learn of a request and its true output length."""
        self._answers[request.id] = _Answer(output_tokens, request.max_tokens)

    def add_whole(self, request: Request, output_tokens: int) -> None:
        """Learn of a request of which more than `most_tokens` come out here: all."""
        self.add(request, output_tokens)
        self._answers[request.id].is_whole = True

    def has_whole(self, request: Request) -> bool:
        """Whether `add_whole` told of a request."""
        return self._answers[request.id].is_whole

    def output_tokens(self, request: Request) -> int:
        """Return the true output length; see `Executor.output_tokens`."""
        return self._answers[request.id].output_tokens

    def joined(self, states: Collection[RequestState], decodes: DecodeBatch) -> None:
        """Schedule the ends of requests on the clock of the decode batch."""
        answers, steps, turn = self._answers, decodes.steps, self._num_turns
        is_bounded = self.most_tokens < FOREVER
        last = steps + self.most_tokens if is_bounded else FOREVER
        for state in states:  # with `_tokens_left` and `_end_at`, written out: many come and go
            answer = answers[state.id]
            step = steps + answer.length - state._generated
            if is_bounded and step > last and not answer.is_whole:
                step = last
            answer.state = state
            if answer.due_step != step:
                answer.due_step = step
                answer.turn = turn
                turn += 1
            if answer.listed_step >= step:
                if answer.listed_step > step:
                    self._list(answer)
                if step < self._soonest:
                    self._soonest, self._next = step, answer
            elif step <= self._soonest:  # it is to be listed there
                self._num_departures = -1
        self._num_turns = turn

    def _end_at(self, state: RequestState, step: int) -> None:
        """Schedule the end of a request that is about to join, by the count of decode steps."""
        answer = self._answers[state.id]
        answer.state = state
        if answer.due_step != step:
            answer.due_step = step
            answer.turn = self._num_turns
            self._num_turns += 1
        if answer.listed_step >= step:
            if answer.listed_step > step:
                self._list(answer)
            if step < self._soonest:
                self._soonest, self._next = step, answer
        elif step <= self._soonest:
            self._num_departures = -1

    def _list(self, answer: _Answer) -> None:
        """Let an answer be looked at when it is complete."""
        answer.listed_step = step = answer.due_step
        due = self._due.get(step)
        if due is None:
            self._due[step] = [answer]
            heappush(self._due_steps, step)
        else:
            due.append(answer)

    def look_ahead(self, state: RequestState) -> None:
        """Refuse: see `SpeculativeExecutor`."""
        raise NotImplementedError("this executor does not speculate")

    def _tokens_left(self, state: RequestState) -> int:
        answer = self._answers[state.id]
        left = answer.length - state.num_output_tokens
        return left if left <= self.most_tokens or answer.is_whole else self.most_tokens

    def _length(self, state: RequestState) -> int:
        """Return how many tokens a request has generated when it ends."""
        return self._answers[state.id].length

    def execute(self, work: Work, max_steps: int, horizon_ns: int) -> Steps:
        """Price up to `max_steps` steps; see `Executor.execute`."""
        now_ns, plan, shape, decodes = work.now_ns, work.plan, work.shape, work.decodes
        pricing = self.pricing
        steps_to_finish = 0
        if shape.num_decodes:
            steps_to_finish = self._next_finish(decodes) - decodes.steps
            if steps_to_finish < max_steps:
                max_steps = steps_to_finish
        if max_steps > 1:
            # A guess is enough: a segment cut short here is simply continued by the next plan.
            within = max(0, horizon_ns - now_ns) // self._last_step_ns + 2
            if within < max_steps:
                max_steps = within
        overhead_ns = pricing.overhead_ns(shape) if self._has_overhead else 0
        if self.decodes_single_tokens:
            shape = shape.with_single_tokens_decoded()
        durations: list[int] = []
        times = None
        if max_steps > 1 and not overhead_ns:
            times = self._unwritten(shape)
        if times is not None:
            self._last_step_ns = times.step_ns(max_steps - 1)
            if horizon_ns < FOREVER:
                max_steps, _ = times.begun_before(max_steps, horizon_ns - now_ns)
        else:
            durations = self._durations_ns(shape, decodes, max_steps)
            if (
                self.scatter is not None
                or overhead_ns
                or self.slowness != 1.0
                or self._first_step_ns
                or (max_steps > 1 and horizon_ns < FOREVER)
            ):
                durations = self._adjusted(durations, shape, now_ns, horizon_ns, overhead_ns)
            else:
                self._last_step_ns = durations[-1]
            max_steps = len(durations)
        self._last_shape, self._last_num_steps = shape, max_steps
        self._num_steps += max_steps
        if pricing.can_be_outside:
            self._count_outside(shape, max_steps)
        finished: list[RequestState] = []
        if max_steps == steps_to_finish:
            finished = self._due_in(decodes, decodes.steps + steps_to_finish)
        if plan.chunks:
            answers, most_tokens = self._answers, self.most_tokens
            for state, n in plan.chunks:  # as what is asked of who is in no batch, written out
                if state.request.prompt_tokens + state._generated - state._computed == n:
                    answer = answers[state.id]
                    left = answer.length - state._generated
                    if left <= 1 or (most_tokens <= 1 and not answer.is_whole):
                        finished.append(state)
        return Steps(durations, overhead_ns, finished, None, times, max_steps)

    def _unwritten(self, shape: BatchShape) -> StepTimes | None:
        """Return what steps take from this one on, if nothing else comes to their price."""
        step_times = self.pricing.step_times
        if step_times is None or not self.writes_late or self.scatter is not None:
            return None
        if self._first_step_ns or self.slowness != 1.0:
            return None
        return step_times(shape)

    def _adjusted(
        self,
        durations: list[int],
        shape: BatchShape,
        now_ns: int,
        horizon_ns: int,
        overhead_ns: int,
    ) -> list[int]:
        """Return what each priced step takes, of those that begin before the horizon."""
        if self.scatter is not None:
            has_prompts = bool(shape.chunks)
            durations = self.scatter.scattered(durations, self._num_steps, has_prompts)
        if overhead_ns:
            durations = [d + overhead_ns for d in durations]
        if self.slowness != 1.0:
            durations = [max(1, int(d * self.slowness + 0.5)) for d in durations]
        self._last_step_ns = durations[-1]
        if self._first_step_ns:
            durations[0] += self._first_step_ns
            self._first_step_ns = 0
        if len(durations) > 1 and horizon_ns < FOREVER:
            start_ns = now_ns
            for i, duration in enumerate(durations):
                if start_ns >= horizon_ns and i:
                    del durations[i:]
                    break
                start_ns += duration
        return durations

    def _durations_ns(self, shape: BatchShape, decodes: DecodeBatch, num_steps: int) -> list[int]:
        """Price successive steps, without overhead."""
        return self.pricing.step_ns(shape, num_steps)

    def _count_outside(self, shape: BatchShape, num_steps: int) -> None:
        """Count those of some steps, the first of those priced last, that nobody has measured."""
        self.pricing.carried_out(shape, num_steps)

    def pass_tokens(self, more_tokens: int = 0) -> list[int]:
        """Return the new tokens of each pass that the step executed last makes through a model.

        Parameters
        ----------
        more_tokens : int
            Tokens by which it is padded beside its own.
        """
        return [self._last_shape.num_new_tokens + more_tokens]

    def idle_tokens(self) -> int:
        """Count the tokens of the batch that is computed for nobody while others have work."""
        return 1

    def idle_pass_tokens(self, num_tokens: int) -> list[int]:
        """Return the new tokens of each pass of a batch for nobody, padded to so many."""
        return [num_tokens]

    def longer_among_ns(self, met_tokens: Sequence[int], more_tokens: int = 0) -> int:
        """Return how much longer the step executed last takes where experts are shared.

        It is counted anew as one with so many tokens of all engines that share them.

        Parameters
        ----------
        met_tokens : sequence of int
            New tokens of all engines, its own among them, in each pass.
        more_tokens : int
            Tokens by which it is padded beside its own, to the size of the others.
        """
        shape, step_ns = self._last_shape, self.pricing.step_ns
        padding_tokens = shape.padding_tokens + more_tokens
        among = replace(shape, gathered_tokens=met_tokens[0], padding_tokens=padding_tokens)
        self.pricing.meet(shape, among)
        return step_ns(among, 1)[0] - step_ns(shape, 1)[0]

    def _next_finish(self, decodes: DecodeBatch) -> int:
        """Return the count of decode steps at which the next member of the batch finishes."""
        if decodes.size <= _FEW_DECODES:  # where most are paused, they lie before
            answers, soonest = self._answers, -1
            for i in decodes.members:
                due_step = answers[i].due_step
                if due_step < soonest or soonest < 0:
                    soonest = due_step
            return soonest
        if self._num_departures != decodes.num_departures:
            following = self._next
            if (
                self._num_departures < 0
                or following is None
                or following.due_step != self._soonest
                or following.state is None
                or following.state._batch is not decodes
            ):
                self._soonest = self._look_for_next(decodes)
            self._num_departures = decodes.num_departures
        return self._soonest

    def _look_for_next(self, decodes: DecodeBatch) -> int:
        """Return the first count of decode steps at which a member is listed that finishes then."""
        while True:
            step = self._due_steps[0]
            due = self._due[step]
            for answer in due:
                if answer.due_step == step:
                    state = answer.state
                    if state is not None and state._batch is decodes:
                        self._next = answer
                        return step
            heappop(self._due_steps)
            del self._due[step]
            for answer in due:
                if answer.listed_step != step:
                    continue
                state = answer.state
                if state is not None and state._batch is decodes:
                    self._list(answer)
                else:
                    answer.listed_step, answer.due_step = FOREVER, -1

    def _due_in(self, decodes: DecodeBatch, step: int) -> list[RequestState]:
        due: Collection[_Answer]
        if decodes.size <= _FEW_DECODES:
            due = [self._answers[i] for i in decodes.members]
        else:
            due = self._due[step]
            if len(due) > 1:
                due = dict.fromkeys(due)  # who left and came back may be in it twice
        if len(due) > 1:
            due = sorted(due, key=_turn)
        found: list[RequestState] = []
        for answer in due:
            state = answer.state
            if answer.due_step == step and state is not None and state._batch is decodes:
                found.append(state)
        return found

    def cut(self, num_steps: int) -> None:
        """Count the steps behind the first `num_steps` as not executed."""
        self.pricing.cut(self._last_shape, self._last_num_steps, num_steps)
        self._num_steps -= self._last_num_steps - num_steps
        self._last_num_steps = num_steps

    def released(self, state: RequestState) -> None:
        """Do nothing: simulated memory is counted by the engine alone."""

    def swapped_out(self, state: RequestState) -> None:
        """Do nothing: the cost model charges the bytes of the step."""

    def swapped_in(self, state: RequestState) -> None:
        """Do nothing: the cost model charges the bytes of the step."""

    def remove(self, state: RequestState) -> None:
        """Forget a request that finished or was rejected."""
        answer = self._answers.pop(state.id, None)
        if answer is not None:
            answer.due_step, answer.state = -1, None

    def estimate_step_ns(self, shape: BatchShape, num_steps: int = 1) -> int:
        """Price a step, or the longest of so many like it, scheduling overhead included."""
        return self.pricing.estimate_ns(shape, num_steps)

    def chunk_pricer(self, shape: BatchShape, context_tokens: int) -> Callable[[int], int]:
        """Return what prices a step by a chunk of it, what else is in it added up once."""
        return self.pricing.chunk_pricer(shape, context_tokens)
