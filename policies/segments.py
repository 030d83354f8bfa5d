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


class Choice:
    """Who of the segments may run.

    Attributes
    ----------
    num_run : int
        How many segments, the first of them.
    taken : dict of int to int
        How many from the entry of each of them, the first there; those that take none left out.
    held : dict of int to list of RequestState
        Who of those inside of each of them may not, if any: more are at a stage than may.
    num_new : int
        How many of those who wait in the queue may come as well.
    steps : int
        For how many steps the same may run, if all of them do and nothing happens.
    until_ns : int
        When the time is over that the first of a segment waits for others, which stays; or FOREVER.
    """

    __slots__ = ("held", "num_new", "num_run", "steps", "taken", "until_ns")

    def __init__(
        self,
        num_run: int,
        taken: dict[int, int],
        held: dict[int, list[RequestState]],
        num_new: int,
        steps: int,
        until_ns: int,
    ) -> None:
        self.num_run = num_run
        self.taken = taken
        self.held = held
        self.num_new = num_new
        self.steps = steps
        self.until_ns = until_ns


class Segment:
    """The running requests of one segment.

    Those inside move on together, but for some who are held back, so their stages, how long their
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
    held : list of RequestState
        Who of them did not take part when the others ran last.
    num_inside : int
        How many they are.
    num_steps : int
        Steps that they took since they were sorted.
    passes_at : int
        What `num_steps` will be when the first of them come to the end; FOREVER if none does.
    most_at_stage : int
        More than so many are at no stage; it may be too many, see `beyond`.
    since_ns : int
        When all of them had run last: the earliest of such times.
    entry_since_ns : int
        The same of those at the entry, or FOREVER; -1 if it is to be found by `find_since`.
    """

    __slots__ = (
        "_end", "_inside", "_others_ran_ns", "at_stage", "entry", "entry_since_ns", "held",
        "most_at_stage", "num_inside", "num_steps", "passes_at", "since_ns",
    )  # fmt: skip

    def __init__(self, end: int = FOREVER) -> None:
        self._end = end
        self.entry: list[RequestState] = []
        self.at_stage: dict[int, list[RequestState]] = {}
        self.held: list[RequestState] = []
        self.num_inside = 0
        self.num_steps = 0
        self.passes_at = FOREVER
        self.since_ns = FOREVER
        self._others_ran_ns = 0  # of who are not held, while some are
        self._inside: list[RequestState] | None = []
        self.entry_since_ns = FOREVER
        self.most_at_stage = 0

    def put(self, states: list[RequestState], stage: int) -> None:
        """Let requests in at the first stage of those inside."""
        at, at_stage, count = stage - self.num_steps, self.at_stage, len(states)
        self.num_inside += count
        self._inside = None
        if at in at_stage:
            there = at_stage[at]
            there += states
            there.sort(key=seat_number)  # who is held there may have come before or after
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
        self._inside = None
        self._find_first()
        return states

    def _find_first(self) -> None:
        """Find who comes to the end first, after some have left."""
        self.passes_at = FOREVER
        if self._end < FOREVER:
            for at in self.at_stage:
                self.passes_at = self._end - at
                break

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
        if self.entry_since_ns > since_ns:
            self.entry_since_ns = since_ns

    def take(self, count: int, stage: int) -> None:
        """Let the first so many at the entry in, at the stage with which the segment begins."""
        entry = self.entry
        self.put(entry[:count], stage)
        del entry[:count]
        self.entry_since_ns = -1 if entry else FOREVER

    def remove_from_entry(self, state: RequestState) -> bool:
        """Let one out who is at the entry; False if it is not."""
        if state not in self.entry:
            return False
        self.entry.remove(state)
        self.entry_since_ns = -1
        return True

    def hold(self, states: list[RequestState], num_steps: int, now_ns: int) -> None:
        """Hold some back while the others take steps from here, up to now.

        Their stages, by steps from here, come that much later.
        """
        here, at_stage = self.num_steps, self.at_stage
        for state in states:
            at = state.num_output_tokens - here
            at_stage[at].remove(state)
            if not at_stage[at]:
                del at_stage[at]
        for state in states:
            there = at_stage.setdefault(state.num_output_tokens - here - num_steps, [])
            insort(there, state, key=seat_number)
        self.at_stage = dict(sorted(at_stage.items(), reverse=True))
        self._inside = None
        self.most_at_stage = max(map(len, at_stage.values()), default=0)
        self._find_first()
        self.held, self._others_ran_ns = states, now_ns

    def note_runs(self, ran_ns: dict[RequestState, int]) -> None:
        """Write down when those inside ran, if they did since they were sorted."""
        if not self.num_steps:
            return
        last_ns = self._others_ran_ns if self.held else self.since_ns
        for state in self.inside():
            if state not in self.held:
                ran_ns[state] = last_ns

    def find_since(self, ran_ns: dict[RequestState, int]) -> int:
        """Return since when somebody waits at the entry, or FOREVER."""
        self.entry_since_ns = min(map(ran_ns.__getitem__, self.entry), default=FOREVER)
        return self.entry_since_ns

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
        self._inside = None
        return True

    def beyond(self, group: int) -> list[RequestState]:
        """Return who of those inside is at a stage behind `group` others; no prompt, at stage 0."""
        if self.most_at_stage > group:
            self.most_at_stage = max(map(len, self.at_stage.values()), default=0)
        states: list[RequestState] = []
        if self.most_at_stage > group:
            for at, there in self.at_stage.items():
                if at + self.num_steps:
                    states += there[group:]
        return states

    def inside(self) -> list[RequestState]:
        """Return all inside."""
        if self._inside is None:  # a segment that stops goes on with the same
            self._inside = list(chain.from_iterable(self.at_stage.values()))
        return self._inside


class Segments:
    """The running requests by segment, and since when each waits.

    They are sorted once, and then kept from plan to plan as long as it is known who runs, and
    nobody comes or goes but new requests and finished ones. After anything else they are sorted
    anew: that costs more, and is the same.

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
    holding : list of int
        Of these segments, who held somebody back in it, by number.
    ran_ns : dict of RequestState to int
        When requests ran last; of those inside `Segment.since_ns` knows better after its first
        step.
    """

    __slots__ = (
        "_chosen", "_follows", "_gone", "_has_prompts", "_num_running", "_plan", "_slots",
        "_stalled", "_stalled_from", "come", "each", "edges", "holding", "is_kept", "num_run",
        "ran_ns",
    )  # fmt: skip

    def __init__(self, edges: Sequence[int]) -> None:
        self.edges = edges
        self.each: list[Segment] = []
        self.is_kept = False
        self.num_run = 0
        self.come: list[int] = []
        self.holding: list[int] = []
        self.ran_ns: dict[RequestState, int] = {}
        self._num_running = 0
        self._plan: BatchPlan | None = None  # by which exactly those run that were chosen
        self._chosen = Choice(0, {}, {}, 0, 1, FOREVER)
        self._follows = False  # whether the engine lets them be followed
        self._has_prompts = False  # at stage 0
        self._gone: list[RequestState] = []
        # What `least_since_ns` said of the segments from one on, or -1, while none of them has run
        # since: who came there later waits for less long.
        self._stalled_from, self._stalled = -1, (FOREVER, 0)
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

    def run_by(self, plan: BatchPlan, chosen: Choice) -> None:
        """Learn that a plan runs those who were chosen, and nobody else but new requests.

        Of other plans nothing is told.
        """
        if self._follows:
            self._plan, self._chosen = plan, chosen

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
        if plan.num_decodes <= 0:
            return False  # nobody moved on
        chosen, edges, each = self._chosen, self.edges, self.each
        new = [state for state, _ in plan.chunks] if plan.chunks else []
        for state in plan.admitted:
            if state not in new:
                return False  # somebody came back who decodes
        for state in self._gone:
            if state not in new and not self._remove(state, state.num_output_tokens - num_steps):
                return False
        if self._has_prompts:
            if not all([state in new for state in each[0].at_stage[-each[0].num_steps]]):
                return False
            self._num_running -= len(each[0].pass_from(0))
            self._has_prompts = False
        self.num_run = chosen.num_run
        if chosen.num_run > self._stalled_from:
            self._stalled_from = -1
        self.come = come = []
        if chosen.taken:
            for i, count in chosen.taken.items():
                if count:  # they have not ended
                    each[i].take(count, edges[i - 1])
        held = chosen.held or self.holding
        if held:
            self._hold(num_steps, now_ns)
        for i in range(chosen.num_run):
            segment = each[i]
            segment.num_steps = steps = segment.num_steps + num_steps
            segment.since_ns = now_ns
            if steps == segment.passes_at:
                each[i + 1].wait(segment.pass_from(edges[i]), self.ran_ns, now_ns)
                come.append(i + 1)
        if held:
            for i in self.holding:
                since_ns = [self.ran_ns.get(s, s.first_scheduled_ns) for s in each[i].held]
                each[i].since_ns = min(since_ns)
        return not new or self._let_in(new, now_ns)

    def _hold(self, num_steps: int, now_ns: int) -> None:
        """Hold back whom the plan does not run of segments that it does, and nobody else there."""
        each, held = self.each, self._chosen.held
        for i in held:
            each[i].note_runs(self.ran_ns)
        for i in self.holding:
            if i < self.num_run:
                each[i].held = []
        for i, states in held.items():
            each[i].hold(states, num_steps, now_ns)
        self.holding = [i for i in self.holding if i >= self.num_run] + list(held)

    def _let_in(self, new: list[RequestState], now_ns: int) -> bool:
        """Take up those of whose prompts something was computed; False if one starts over.

        Who has his only token already is gone.
        """
        edges, each = self.edges, self.each
        prompts: list[RequestState] = []
        for state in new:
            if state.status is not RUNS:
                continue
            self._num_running += 1
            if not state.is_decoding:
                prompts.append(state)
            elif state.num_output_tokens != 1:
                return False
            elif edges[0] == 1 and len(edges) > 1:
                each[1].wait([state], self.ran_ns, now_ns)
                if 1 not in self.come:
                    self.come.append(1)
            else:
                each[0].put([state], 1)
        if prompts:
            each[0].put(prompts, 0)
            self._has_prompts = True
        return True

    def _remove(self, state: RequestState, stage: int) -> bool:
        """Forget a request that ran at a stage; False if it was not there."""
        slot = self._slot(stage)
        number = slot if slot >= 0 else -1 - slot
        chosen = self._chosen
        if number >= chosen.num_run:
            return False
        segment = self.each[number]
        if slot >= 0:
            was_there = segment.remove(state, stage)
        else:
            was_there = segment.remove_from_entry(state)
            if was_there:
                chosen.taken[number] -= 1
        self._num_running -= was_there
        return was_there

    def _leave_off(self) -> None:
        """Write down when everyone ran; who runs is sorted anew before the next plan."""
        if self.is_kept:
            for segment in self.each:
                segment.note_runs(self.ran_ns)
        self.is_kept = False
        self._plan = None

    def _slot(self, length: int) -> int:
        """Return the number of a length's segment, or ``-1 -`` that if it begins there."""
        edges, slots = self.edges, self._slots
        while len(slots) <= length:
            n = len(slots)
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
        self._stalled_from = -1
        self.holding = []
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
                each[-1 - slot].entry_since_ns = -1
                for state in at_length[length]:  # it waits since it ran last, or had its seat
                    ran_ns.setdefault(state, state.first_scheduled_ns)
            else:
                each[slot].put(at_length[length], length)
        self._has_prompts = 0 in each[0].at_stage
        for segment in each:
            since_ns = [ran_ns.get(s, s.first_scheduled_ns) for s in segment.inside()]
            segment.since_ns = min(since_ns, default=FOREVER)

    def least_since_ns(self, first: int) -> tuple[int, int]:
        """Return since when the first in a segment, or in one behind it, waits, and in which.

        FOREVER, and that segment, if nobody is there.
        """
        if first == self._stalled_from:
            return self._stalled
        least_ns, at, i = FOREVER, first, first
        for segment in self.each[first:]:
            if segment.num_inside and segment.since_ns < least_ns:
                least_ns, at = segment.since_ns, i
            if segment.entry:
                since_ns = segment.entry_since_ns
                if since_ns < 0:
                    since_ns = segment.find_since(self.ran_ns)
                if since_ns < least_ns:
                    least_ns, at = since_ns, i
            i += 1
        self._stalled_from = first if least_ns < FOREVER else -1
        self._stalled = least_ns, at
        return least_ns, at

    def stays_timed_out(self, first: int, chosen: Choice, waited_until_ns: int) -> bool:
        """Whether a segment that runs on a time-out will also in the steps to come.

        Who runs waits anew; who stays at an entry has waited as long as before. What is so of a
        segment is so of those before it, which wait for the same requests and more.

        Parameters
        ----------
        first : int
            Its number.
        chosen : Choice
            Who runs.
        waited_until_ns : int
            Who waits since then has waited for too long.
        """
        ran_ns = self.ran_ns
        for i in range(first, chosen.num_run):
            for state in self.each[i].entry[chosen.taken.get(i, 0) :]:
                if ran_ns[state] <= waited_until_ns:  # most often so of the first
                    return True
        return False
