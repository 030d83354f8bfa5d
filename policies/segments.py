"""Segments of output length: who is at the entry of each, and who inside.

Classes of their own, which the compiled core has: they look at each running request.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from itertools import chain

from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RUNS, RequestState, seat_number


class Segment:
    """The running requests of one segment.

    Those inside move on together as long as all of them run, so their stages, how long their
    answers are so far, are told from the steps they took.

    Parameters
    ----------
    end : int
        The output length at which it ends; FOREVER if it does not.

    Attributes
    ----------
    entry : list of RequestState
        Those whose answer is as long as the segment begins with, in the order of their admission.
    at_stage : dict of int to list of RequestState
        All others of it, by stage less `num_steps`, the last stage first; at each in the order of
        their admission.
    num_inside : int
        How many they are.
    num_steps : int
        Steps that all of them took since they were sorted.
    passes_at : int
        What `num_steps` will be when the first of them come to the end; FOREVER if none does.
    most_at_stage : int
        More than so many are at no stage; it may be too many, see `exceeds`.
    since_ns : int
        When all of them ran last; before the first step, the earliest of such times.
    """

    __slots__ = (
        "_end", "_since_ns_at_entry", "at_stage", "entry", "most_at_stage", "num_inside",
        "num_steps", "passes_at", "since_ns",
    )  # fmt: skip

    def __init__(self, end: int = FOREVER) -> None:
        self._end = end
        self.entry: list[RequestState] = []
        self.at_stage: dict[int, list[RequestState]] = {}
        self.num_inside = 0
        self.num_steps = 0
        self.passes_at = FOREVER
        self.since_ns = FOREVER
        self._since_ns_at_entry = -1  # worked out when it is asked for; -1 if it is not
        self.most_at_stage = 0

    def put(self, states: list[RequestState], stage: int) -> None:
        """Let requests in, in the order of their admission, at the first stage of those inside."""
        at, at_stage, count = stage - self.num_steps, self.at_stage, len(states)
        self.num_inside += count
        if at in at_stage:
            there = at_stage[at]
            there += states
            count = len(there)
        else:
            if not at_stage and self._end < FOREVER:
                self.passes_at = self._end - at
            at_stage[at] = states
        if count > self.most_at_stage:
            self.most_at_stage = count

    def pass_from(self, stage: int) -> list[RequestState]:
        """Let those out who are at a stage."""
        states = self.at_stage.pop(stage - self.num_steps, [])
        self.num_inside -= len(states)
        self._find_first()
        return states

    def _find_first(self) -> None:
        """Find who comes to the end first, after some have left."""
        self.passes_at = FOREVER
        if self.at_stage and self._end < FOREVER:
            self.passes_at = self._end - next(iter(self.at_stage))

    def wait(
        self, states: list[RequestState], ran_ns: dict[RequestState, int], since_ns: int
    ) -> None:
        """Let requests wait at the entry that ran until now, and write down when that was."""
        entry = self.entry
        for state in states:
            ran_ns[state] = since_ns
            if entry:
                insort(entry, state, key=seat_number)
            else:
                entry.append(state)
        if self._since_ns_at_entry > since_ns:
            self._since_ns_at_entry = since_ns

    def take(self, count: int, stage: int) -> None:
        """Let the first so many at the entry in, who are at a stage by now."""
        self.put(self.entry[:count], stage)
        del self.entry[:count]
        self._since_ns_at_entry = -1

    def remove_from_entry(self, state: RequestState) -> bool:
        """Let one out who is at the entry; False if it is not."""
        if state not in self.entry:
            return False
        self.entry.remove(state)
        self._since_ns_at_entry = -1
        return True

    def since_ns_at_entry(self, ran_ns: dict[RequestState, int], but: int = 0) -> int:
        """Return since when somebody waits at the entry, the first so many left out; or FOREVER.

        A request waits since it ran last, or if it never did, had its seat.
        """
        since_ns = self._since_ns_at_entry
        if since_ns < 0 or but:
            since_ns = FOREVER
            for state in self.entry[but:]:
                ran = ran_ns.get(state, state.first_scheduled_ns)
                if ran < since_ns:
                    since_ns = ran
            if not but:
                self._since_ns_at_entry = since_ns
        return since_ns

    def remove(self, state: RequestState, stage: int) -> bool:
        """Let one out who is at a stage; False if it is not."""
        at = stage - self.num_steps
        there = self.at_stage.get(at, [])
        if state not in there:
            return False
        there.remove(state)
        if not there:
            del self.at_stage[at]
            self._find_first()
        self.num_inside -= 1
        return True

    def exceeds(self, group: int) -> bool:
        """Whether more of those inside, if any, are at a stage; prompts at stage 0 do not count."""
        if self.most_at_stage > group:
            self.most_at_stage = max(map(len, self.at_stage.values()), default=0)
        if self.most_at_stage <= group:
            return False
        here = self.num_steps
        return any([len(states) > group for at, states in self.at_stage.items() if at + here])

    def at_most(self, group: int) -> list[RequestState]:
        """Return the first `group` at each stage, and all of stage 0."""
        chosen: list[RequestState] = []
        for at, states in self.at_stage.items():
            chosen += states[:group] if at + self.num_steps else states
        return chosen

    def inside(self) -> list[RequestState]:
        """Return all inside."""
        return list(chain.from_iterable(self.at_stage.values()))


class Segments:
    """The running requests by segment, and since when each waits.

    They are sorted once, and then kept from plan to plan as long as those inside of a segment all
    run or all wait, and nobody comes or goes but new requests and finished ones. After anything
    else they are sorted anew: that costs more, and is the same.

    Parameters
    ----------
    edges : sequence of int
        Where segments end; longer answers stay in the last.

    Attributes
    ----------
    each : list of Segment
        In their order.
    is_kept : bool
        Whether all are where the plans so far have brought them.
    num_run : int
        While they are kept, how many segments took part in the last plan that decoded, the first.
    come : list of int
        While they are kept, to whose entry somebody came by that plan, by number.
    ran_ns : dict of RequestState to int
        When requests ran last; of those inside `Segment.since_ns` knows better after its first
        step.
    """

    __slots__ = (
        "_follows", "_gone", "_num_running", "_plan", "_slots", "_taken", "come", "each", "edges",
        "is_kept", "num_run", "ran_ns",
    )  # fmt: skip

    def __init__(self, edges: Sequence[int]) -> None:
        self.edges = edges
        self.each: list[Segment] = []
        self.is_kept = False
        self.num_run = 0
        self.come: list[int] = []
        self.ran_ns: dict[RequestState, int] = {}
        self._num_running = 0
        self._plan: BatchPlan | None = None  # by which exactly those run that were chosen
        self._taken: list[int] = []  # of each segment that runs then how many from its entry
        self._follows = False  # whether the engine lets them be followed
        self._gone: list[RequestState] = []
        # Of each length the number of its segment, or -1 - that if it begins there; as far as
        # anybody was as long.
        self._slots: list[int] = []

    def came(self, state: RequestState, now_ns: int) -> None:
        """Let a request that ran on another engine wait at its entry from now on."""
        self._leave_off()
        self.ran_ns[state] = now_ns

    def ended(self, state: RequestState) -> None:
        """Learn that a request runs here no more."""
        self.ran_ns.pop(state, None)
        self._gone.append(state)

    def find(self, view: EngineView) -> None:
        """Sort those who run, unless they are where they are known to be."""
        self._plan = None
        if self.is_kept:
            if len(view.running) == self._num_running and not self._gone:
                return
            self._leave_off()
        self._sort(view)

    def run_by(self, plan: BatchPlan, taken: list[int]) -> None:
        """Learn that a plan runs all inside of the first segments, and some of their entries.

        Parameters
        ----------
        plan : BatchPlan
            It runs nobody else but new requests. Of other plans nothing is told.
        taken : list of int
            Of each of these segments how many from its entry, the first of them.
        """
        if self._follows:
            self._plan, self._taken = plan, taken

    def move_on(self, plan: BatchPlan, num_steps: int, now_ns: int) -> None:
        """Follow those who ran for some steps of a plan, up to now."""
        if plan is self._plan and self._follow(plan, num_steps, now_ns):
            self.is_kept = True
        else:
            self._leave_off()
            self.ran_ns.update(dict.fromkeys(plan.decoding(), now_ns))
            self.ran_ns.update([(state, now_ns) for state, _ in plan.chunks])
        self._plan = None
        if self._gone:  # of whom the plan still tells
            for state in self._gone:
                self.ran_ns.pop(state, None)
            self._gone.clear()

    def _follow(self, plan: BatchPlan, num_steps: int, now_ns: int) -> bool:
        """Move on whom a plan was to run; False if not all are where they were thought to be."""
        if not plan.decodes:
            return False  # nobody moved on
        taken, edges, each = self._taken, self.edges, self.each
        new: list[RequestState] = []
        if plan.chunks:
            new = [state for state, _ in plan.chunks]
        if plan.admitted and not all([state in new for state in plan.admitted]):
            return False  # somebody came back who decodes
        for state in self._gone:
            if state not in new and not self._remove(state, state.num_output_tokens - num_steps):
                return False
        prompts = each[0].at_stage.get(-each[0].num_steps)
        if prompts is not None:
            if not all([state in new for state in prompts]):
                return False
            self._num_running -= len(each[0].pass_from(0))
        self.num_run = len(taken)
        self.come = come = []
        # From the last on, so that nobody is taken who comes to an entry only now.
        for i in range(len(taken) - 1, -1, -1):
            segment = each[i]
            segment.num_steps += num_steps
            segment.since_ns = now_ns
            if taken[i]:
                segment.take(taken[i], edges[i - 1] + num_steps)
            if segment.num_steps == segment.passes_at:
                each[i + 1].wait(segment.pass_from(edges[i]), self.ran_ns, now_ns)
                come.append(i + 1)
        return not new or self._let_in([s for s in new if s.status is RUNS], now_ns)

    def _let_in(self, new: list[RequestState], now_ns: int) -> bool:
        """Take up those of whose prompts something was computed; False if one starts over."""
        edges, each = self.edges, self.each
        self._num_running += len(new)
        prompts = [state for state in new if not state.is_decoding]
        for state in new:
            if state in prompts:
                continue
            if state.num_output_tokens != 1:
                return False
            if edges[0] == 1 and len(edges) > 1:
                each[1].wait([state], self.ran_ns, now_ns)
                self.come.append(1)
            else:
                each[0].put([state], 1)
        if prompts:
            each[0].put(prompts, 0)
        return True

    def _remove(self, state: RequestState, stage: int) -> bool:
        """Forget a request that ran at a stage; False if it was not there."""
        slot = self._slot(stage)
        number = slot if slot >= 0 else -1 - slot
        if number >= len(self._taken):
            return False
        segment = self.each[number]
        if slot >= 0:
            was_there = segment.remove(state, stage)
        else:
            was_there = segment.remove_from_entry(state)
            self._taken[number] -= was_there
        self._num_running -= was_there
        return was_there

    def _leave_off(self) -> None:
        """Write down when everyone ran; who runs is sorted anew before the next plan."""
        if self.is_kept:
            for segment in self.each:
                if segment.num_steps:
                    self.ran_ns.update(dict.fromkeys(segment.inside(), segment.since_ns))
        self.is_kept = False
        self._plan = None

    def _slot(self, length: int) -> int:
        """Return the number of a length's segment, or ``-1 -`` that if it begins there."""
        edges, slots = self.edges, self._slots
        for n in range(len(slots), length + 1):
            number = min(bisect_right(edges, n), len(edges) - 1)
            begins = number > 0 and n == edges[number - 1]
            slots.append(-1 - number if begins else number)
        return slots[length]

    def _sort(self, view: EngineView) -> None:
        running = view.running
        lengths = view.output_tokens(running)
        if any([state.num_output_tokens for state in view.prefilling]):  # computed again: at 0
            prompts = set(view.prefilling)
            lengths = [
                0 if state in prompts else n for state, n in zip(running, lengths, strict=True)
            ]
        slots, ran_ns = self._slots, self.ran_ns
        self._slot(max(lengths, default=0))
        self._num_running = len(running)
        self._follows = view.is_in_step
        self.each = each = [Segment(edge) for edge in self.edges[:-1]]
        each.append(Segment())
        at_length: dict[int, list[RequestState]] = {}
        for state, length in zip(running, lengths, strict=True):
            there = at_length.get(length)
            if there is None:
                at_length[length] = [state]
            else:
                there.append(state)
        for length in sorted(at_length, reverse=True):
            slot = slots[length]
            if slot < 0:
                each[-1 - slot].entry = at_length[length]
            else:
                each[slot].put(at_length[length], length)
        for segment in each:
            since_ns = [ran_ns.get(s, s.first_scheduled_ns) for s in segment.inside()]
            segment.since_ns = min(since_ns, default=FOREVER)

    def least_since_ns(self, first: int) -> int:
        """Return since when the first in a segment, or in one behind it, waits; or FOREVER."""
        least_ns, ran_ns = FOREVER, self.ran_ns
        for i in range(first, len(self.each)):
            segment = self.each[i]
            if segment.num_inside and segment.since_ns < least_ns:
                least_ns = segment.since_ns
            if segment.entry:
                since_ns = segment.since_ns_at_entry(ran_ns)
                if since_ns < least_ns:
                    least_ns = since_ns
        return least_ns

    def stays_timed_out(self, first: int, taken: Sequence[int], waited_until_ns: int) -> bool:
        """Whether a segment that runs on a time-out will also in the steps to come.

        Who runs waits anew; who stays at an entry has waited as long as before. What is so of a
        segment is so of those before it, which wait for the same requests and more.

        Parameters
        ----------
        first : int
            Its number.
        taken : sequence of int
            Of each segment that runs how many from its entry, the first of them.
        waited_until_ns : int
            Who waits since then has waited for too long.
        """
        for i in range(first, len(taken)):
            segment = self.each[i]
            if len(segment.entry) > taken[i]:
                since_ns = segment.since_ns_at_entry(self.ran_ns, taken[i])
                if since_ns <= waited_until_ns:
                    return True
        return False
