"""When copies beside the steps are told to be done, by tickets and a clock of paper."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

from schedlab.gpu_backend import kv_memory
from schedlab.gpu_backend.executor import TorchExecutor
from schedlab.gpu_backend.kv_memory import KVMemory
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.kv_bytes import Copy, CopyTime
from schedlab.sim.request import DONE, Status

LIMITS = EngineConfig(num_blocks=8, max_model_len=32, block_size=4)


class Ticket:
    def __init__(self, begun_ns, ended_ns, is_done=True):
        self.times = begun_ns, ended_ns
        self.done = is_done
        self.waits = []

    def is_done(self):
        return self.done

    def wait(self, timeout_s=None):
        self.waits.append(timeout_s)
        self.done = True
        return self.done

    def times_ns(self):
        return self.times


class Tier:
    """Gives the tickets it was told to, and writes down what it is asked."""

    def __init__(self):
        self.tickets, self.log, self.reading = [], [], {}
        self.places = SimpleNamespace(evict=lambda names: None)

    def swap_in(self, request_id, blocks):
        self.log.append(("in", request_id, len(blocks)))
        return self.tickets.pop(0)

    def swap_out(self, request_id, blocks):
        self.log.append(("out", request_id, len(blocks)))
        return self.tickets.pop(0)

    def forget(self, request_id):
        self.log.append(("forget", request_id))

    def settle(self):
        self.log.append("settle")


class Clock:
    """Lets a wait pass, which takes as long as it is told."""

    times_copies = True

    def __init__(self):
        self.takes_ns = 0
        self.passed = []

    def let_pass(self, wait):
        self.passed.append(wait)
        wait()
        return self.takes_ns


@pytest.fixture
def machine(monkeypatch):
    """The machine's clock: tickets tell times of it."""
    found = SimpleNamespace(at_ns=5_000)
    paper = SimpleNamespace(perf_counter_ns=lambda: found.at_ns)
    monkeypatch.setattr(kv_memory, "time", paper)
    return found


@pytest.fixture
def memory(machine):
    sequences = SimpleNamespace(sit=lambda request, seat: None)
    made = KVMemory(SimpleNamespace(), LIMITS, Clock(), sequences, None)
    made._host = Tier()
    return made


def order(memory, number, ticket, now_ns, is_load=False, request_id=3):
    memory._host.tickets.append(ticket)
    if not memory.pool.holds(request_id):
        memory.pool.grow(request_id, 9)
    state = SimpleNamespace(id=request_id, request=None, num_computed_tokens=9)
    memory.copy(number, Copy(is_load, 2, state=state), now_ns)


def test_copy_is_told_by_the_engines_clock_at_its_end_and_once(memory, machine):
    order(memory, 7, Ticket(5_300, 6_000), now_ns=100)
    machine.at_ns = 6_500
    assert memory.done(1_099) == []
    assert memory.done(1_100) == [CopyTime(7, 400, 1_100)]
    assert memory.done(9_000) == []
    assert memory._clock.passed == []
    assert memory._host.log == [("out", 3, 2)]


def test_copy_that_began_before_it_was_ordered_begins_with_its_order(memory, machine):
    order(memory, 1, Ticket(4_000, 4_500), now_ns=100)
    assert memory.done(100) == [CopyTime(1, 100, 100)]


def test_engine_ahead_of_real_time_lets_the_difference_pass(memory, machine):
    waiting = Ticket(5_100, 6_000, is_done=False)
    order(memory, 1, waiting, now_ns=100)
    machine.at_ns = 5_200
    # By the engine's clock 1,000,200 ns have passed since the order, by the machine's 200.
    assert memory.done(100 + 1_000_200) == [CopyTime(1, 200, 1_100)]
    assert waiting.waits == [pytest.approx(1e-3)]
    # A copy that is done is not waited for, nor is one that the machine's clock is ahead of.
    order(memory, 2, Ticket(5_250, 5_300), now_ns=300)
    late = Ticket(0, 0, is_done=False)
    order(memory, 3, late, now_ns=1_000_000)
    assert [one.number for one in memory.done(1_000_000)] == [2]
    assert late.waits == []


def test_host_blocks_of_a_swap_are_free_when_its_copy_back_is_done_and_not_before(memory, machine):
    order(memory, 1, Ticket(5_100, 5_200), now_ns=100)
    order(memory, 2, Ticket(5_200, 5_900), now_ns=100, is_load=True)
    assert [one.number for one in memory.done(500)] == [1]
    assert memory._host.log == [("out", 3, 2), ("in", 3, 2)]
    assert [one.number for one in memory.done(1_000)] == [2]
    assert memory._host.log[2:] == [("forget", 3)]


def test_copy_that_links_say_is_done_is_waited_for(memory, machine):
    ticket = Ticket(0, 0, is_done=False)
    order(memory, 1, ticket, now_ns=100, is_load=True)
    memory.finish(1)
    memory.finish(1)
    assert ticket.waits == [None]
    assert memory._host.log[-1] == ("forget", 3)


def test_engine_that_can_only_wait_waits_for_the_first_copy_that_ends(memory, machine):
    for number, ended_ns in ((1, 5_900), (2, 5_400)):
        order(memory, number, Ticket(5_100, ended_ns), now_ns=100)
    order(memory, 3, Ticket(0, 0, is_done=False), now_ns=100)
    assert memory.wait_for_copy(200) == 500
    assert memory.wait_for_copy(600) == 601, "not in the past"
    assert memory._clock.passed == []


def test_engine_that_can_only_wait_while_no_copy_is_done_looks_again(memory, machine):
    tickets = [Ticket(0, 0, is_done=False), Ticket(0, 0, is_done=False)]
    for number, ticket in enumerate(tickets):
        order(memory, number, ticket, now_ns=100)
    memory._clock.takes_ns = 40
    assert memory.wait_for_copy(200) == 240
    assert [ticket.waits for ticket in tickets] == [[kv_memory._TURN_S]] * 2
    for ticket in tickets:
        ticket.done = False
    memory._clock.takes_ns = 0
    assert memory.wait_for_copy(200) == 201


def test_step_waits_for_copies_of_the_blocks_that_it_writes_and_of_no_others(memory, machine):
    def slowly():
        machine.at_ns += 30

    tickets = {block: Ticket(0, 0) for block in (1, 2, 5)}
    for ticket in tickets.values():
        ticket.wait = lambda ticket=ticket: (ticket.waits.append(None), slowly())
    memory.before_step(np.array([4, 9]))
    assert memory._host.log == [], "nobody reads"
    memory._host.reading = tickets
    # Slots 4 and 11 are of blocks 1 and 2; a negative one is of none.
    memory.before_step(np.array([4, 11, -1, 14]))
    assert memory._host.log == ["settle"]
    assert [len(tickets[block].waits) for block in (1, 2, 5)] == [1, 1, 0]
    assert memory.take_wait_ns() == 60
    assert memory.take_wait_ns() == 0


# -- what an executor says of requests -----------------------------------------------------------


class Log:
    """Writes down every call, and answers with what it is told."""

    def __init__(self, log, name, **answers):
        self._log, self._name, self._answers = log, name, answers

    def __getattr__(self, method):
        def called(*args):
            self._log.append((f"{self._name}.{method}", *args))
            return self._answers.get(method)

        return called


def executor(has_tiers=False, has_memory=True):
    log = []
    made = TorchExecutor.__new__(TorchExecutor)
    made._builder = Log(log, "builder")
    made.pool = Log(log, "pool", holds=True, seat=4, grow=5, blocks="abcd")
    made.sequences = Log(log, "sequences")
    made.runner = SimpleNamespace(swap=Log(log, "swap"))
    made.kv_bytes = Log(log, "memory") if has_memory else None
    made._held, made._has_tiers, made._block_size = {3: "held"}, has_tiers, 4
    return made, log


STATE = SimpleNamespace(
    id=3, request="request", num_computed_tokens=9, num_tokens=10, status=Status.HELD
)


def test_request_that_is_swapped_in_has_memory_for_what_is_computed_and_is_told_of():
    made, log = executor()
    made.swapped_in(STATE)
    assert log == [
        ("memory.loaded", STATE), ("pool.grow", 3, 9), ("sequences.sit", "request", 5),
        ("pool.blocks", 3), ("swap.swap_in", 3, "abcd"),
    ]  # fmt: skip


def test_request_without_memory_leaves_its_tokens_and_names_what_is_computed():
    made, log = executor()
    made.released(STATE)
    assert log == [
        ("builder.drop", STATE), ("pool.holds", 3), ("pool.seat", 3),
        ("sequences.leave", "request", 4, 10), ("pool.release", 3, 9),
    ]  # fmt: skip
    assert made._held == {}


def test_request_that_is_removed_is_forgotten_everywhere():
    made, log = executor()
    made.remove(STATE)
    gone = [("sequences.forget", "request"), ("swap.forget", 3)]
    assert log == [*gone, ("memory.forget", 3)]
    made, log = executor(has_memory=False)
    made.remove(STATE)
    assert log == gone


def test_request_whose_memory_is_kept_gives_up_its_seat_when_it_is_answered():
    made, log = executor()
    kept = SimpleNamespace(**{**vars(STATE), "status": DONE})
    made.remove(kept)
    left = [("pool.seat", 3), ("sequences.leave", "request", 4, 10), ("memory.keep", kept)]
    gone = [("sequences.forget", "request"), ("swap.forget", 3), ("memory.forget", 3)]
    assert [call for call in log if call[0] != "pool.holds"] == left + gone


@pytest.mark.parametrize("has_tiers", [False, True])
def test_swapping_out_is_left_to_tiers_where_there_are_any(has_tiers):
    made, log = executor(has_tiers)
    made.swapped_out(STATE)
    # Nine tokens fill three blocks of four; it holds one more.
    out = [("pool.blocks", 3), ("swap.swap_out", 3, "abc")]
    assert log == ([] if has_tiers else out)
