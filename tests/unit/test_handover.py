"""Each step of a handover by itself, with stand-ins for engines and links that note what is asked.

Runs of whole fleets (tests/unit/test_disaggregation.py) seldom meet full seats and dead engines.
"""

from collections import deque
from types import SimpleNamespace

import pytest

from schedlab.sim.drive import handover
from schedlab.sim.drive.disaggregation import Disaggregation
from schedlab.sim.drive.handover import Handover, _Delivery
from schedlab.sim.drive.local_prefill import LocalPrefill

MS = 1_000_000


class World:
    """A handover between engines 0 (prompts), 1 and 2 (answers), and all that it asks of others."""

    def __init__(self, monkeypatch, cached_tokens=0, **plan):
        self.told = []
        self.members = [self.member(index) for index in range(3)]
        self.fleet = SimpleNamespace(
            now_ns=70 * MS, members=self.members, arrivals={n: f"arrival {n}" for n in range(9)},
            serving=lambda *roles: self.serving[roles],
            expects=lambda *roles: {("decode",): self.is_expected}[roles],
            settle_soon=self.noting("settle"), retries=SimpleNamespace(fail=self.noting("fail")),
        )  # fmt: skip
        self.serving = {("decode",): self.members[1:], ("prefill", "mixed"): self.members[:1]}
        self.is_expected = False
        self.links = SimpleNamespace(
            cancel=self.noting("cancel"), joins=SimpleNamespace(num_layers=4),
            kv_alone_ns=lambda sender, receiver, tokens: tokens * 0.25 * MS,
            send_kv=self.noting("send", SimpleNamespace(num_bytes=4321)),
        )  # fmt: skip
        self.router = SimpleNamespace(engine_is_gone=self.noting("gone"))
        plan = Disaggregation((), self.router, **plan)
        self.handover = Handover.__new__(Handover)
        for name, value in {
            "_fleet": self.fleet, "_links": self.links, "_router": self.router,
            "_plan": plan, "_local": LocalPrefill(self.fleet, plan), "_under_way": {},
            "_unplaced": [], "_queues": {1: deque(), 2: deque()}, "transfers": [],
        }.items():  # fmt: skip
            setattr(self.handover, name, value)
        told = {"take_back": 0, "call_off": 0, "reserve": cached_tokens, "arrive": 0}
        for name, answer in told.items():
            monkeypatch.setattr(handover.reception, name, self.noting(name, answer))
        monkeypatch.setattr(handover, "note_sent", self.noting("sent"))
        monkeypatch.setattr(
            handover, "as_received",
            lambda state, config: SimpleNamespace(id=state.id, of=state, config=config),
        )  # fmt: skip

    def noting(self, name, answer=None):
        return lambda *given: self.told.append((name, *given)) or answer

    def member(self, index):
        server = SimpleNamespace(
            interrupt=self.noting(f"interrupt {index}"), wake=self.noting(f"wake {index}")
        )
        requests = SimpleNamespace(num_seated=0, delivered=self.noting(f"delivered {index}"))
        live = SimpleNamespace(
            segment=f"steps of {index}", has_changed=self.noting(f"changed {index}"),
            **{name: self.noting(f"{name} {index}") for name in ("count", "queue", "unqueue")},
        )  # fmt: skip
        return SimpleNamespace(
            index=index, server=server, live=live,
            known=SimpleNamespace(name=f"known {index}", backlog_tokens=100 * index + 50),
            engine=SimpleNamespace(
                kv=None, requests=requests,
                config=SimpleNamespace(most_resident=3, name=f"limits {index}"),
            ),
        )  # fmt: skip

    def delivery(self, number, *, computed=True, counted_by=None, receiver=None, moving=None):
        state = SimpleNamespace(id=number, request=f"request {number}")
        one = _Delivery(state, self.members[0], 60 * MS, 100, 40, computed, counted_by)
        one.receiver, one.moving = receiver, moving
        if moving is not None:
            one.received = f"received {number}"
        self.handover._under_way[number] = one
        if receiver is None:
            self.handover._unplaced.append(one)
        elif moving is None:
            self.handover._queues[receiver.index].append(one)
        return one


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


@pytest.mark.parametrize("is_counted", [False, True])
def test_request_is_kept_where_its_prompt_was_computed_if_there_is_a_seat(world, is_counted):
    sender = world.members[0]
    one = world.delivery(5, counted_by=sender if is_counted else None)
    sender.engine.requests.num_seated = 3
    assert world.handover._keep(one) is False
    assert (world.told, list(world.handover._under_way)) == ([], [5])
    sender.engine.requests.num_seated = 2
    assert world.handover._keep(one) is True
    assert world.handover._under_way == {}
    sent = [] if is_counted else [("sent", "request 5", sender.live, sender.known)]
    assert world.told == [
        ("interrupt 0",), ("take_back", sender.engine.requests, one.sent, "arrival 5", 70 * MS),
        *sent, ("wake 0",),
    ]  # fmt: skip
    early = world.delivery(6, computed=False)
    sender.engine.requests.num_seated = 3
    world.told.clear()
    assert world.handover._keep(early) is True, "it is looked at again when it is computed"
    assert (world.told, world.handover._under_way) == ([], {})


def test_requests_whose_sender_died_are_lost_and_those_of_a_receiver_choose_anew(world):
    sender, receiver, other = world.members
    moving = world.delivery(1, receiver=receiver, counted_by=receiver, moving="KV 1")
    queued = world.delivery(2, receiver=receiver, counted_by=receiver)
    unplaced = world.delivery(3)
    early = world.delivery(4, computed=False)
    assert world.handover.died(receiver) == []
    assert world.told == [("gone", 1), ("cancel", "KV 1"), ("settle", receiver)]
    assert world.handover._unplaced == [unplaced, early, moving, queued]
    assert list(world.handover._queues) == [2]
    for one in (moving, queued):
        assert (one.counted_by, one.receiver, one.received, one.moving) == (None,) * 4
    # They find places at the other one; then the sender dies.
    for one, kv in ((moving, "KV"), (queued, None)):
        world.handover._unplaced.remove(one)
        one.receiver, one.moving = other, kv
        one.received = None if kv is None else "received"
    world.handover._queues[2].append(queued)
    world.told.clear()
    lost = world.handover.died(sender)
    assert lost == [moving.sent, queued.sent, unplaced.sent], "the engine has the other still"
    assert (world.handover._under_way, world.handover._unplaced) == ({}, [])
    assert list(world.handover._queues[2]) == []
    assert world.told == [
        ("gone", 0), ("count 2", "request 1", -1), ("cancel", "KV"), ("interrupt 2",),
        ("call_off", other.engine.requests, "received"), ("wake 2",), ("settle", other),
        ("count 2", "request 2", -1), ("unqueue 2", queued.sent), ("settle", other),
        ("settle", sender),
    ]  # fmt: skip


def test_kv_is_sent_so_that_it_never_waits_for_a_layer_and_is_there_when_all_of_it_is(world):
    sender, receiver, _ = world.members
    one = world.delivery(5, receiver=receiver)
    world.handover._begin(one, receiver)
    # The last layer of 40 tokens in four takes 2.5 ms, from 60 ms on; all 100 tokens take 25.
    assert one.received.config is receiver.engine.config
    reserved = ("reserve", receiver.engine.requests, one.received, "arrival 5", 100, 70 * MS)
    *before, (name, *given, done, wait_ns) = world.told
    assert before == [("interrupt 1",), reserved, ("changed 1", "steps of 1")]
    assert (name, given, wait_ns) == ("send", [sender, receiver, 100], 0)
    world.told.clear()
    world.fleet.now_ns = 90 * MS
    done()
    assert world.told == [
        ("interrupt 0",), ("interrupt 1",), ("delivered 0", 5),
        ("arrive", receiver.engine.requests, one.received, 90 * MS), ("wake 0",), ("wake 1",),
    ]  # fmt: skip
    assert world.handover._under_way == {}
    assert [tuple(one) for one in world.handover.transfers] == [
        (5, 0, 60 * MS, 70 * MS, 90 * MS, 4321)
    ]
    # A prompt that is computed at 110 ms: 112.5 - 25 ms is 87.5, and it is 80 now.
    world.fleet.now_ns = 80 * MS
    later = world.delivery(6, receiver=receiver)
    later.ready_ns = 110 * MS
    world.handover._begin(later, receiver)
    assert world.told[-1][-1] == 7.5 * MS


@pytest.mark.parametrize(
    ("cached", "sent", "wait_ms"),
    # Of the last 40 tokens, or of the fewer that are sent, a layer in four goes after 110 ms.
    [(0, 100, 40 + 2.5 - 25), (48, 52, 40 + 2.5 - 13), (80, 20, 40 + 1.25 - 5), (100, 0, 40)],
)
def test_kv_that_is_there_is_neither_sent_nor_waited_for(monkeypatch, cached, sent, wait_ms):
    world = World(monkeypatch, cached)
    sender, receiver, _ = world.members
    one = world.delivery(5, receiver=receiver)
    one.ready_ns = 110 * MS
    world.handover._begin(one, receiver)
    name, *given, _, wait_ns = world.told[-1]
    assert (name, given, wait_ns) == ("send", [sender, receiver, sent], wait_ms * MS)


def test_overhead_comes_after_what_is_waited_for_layers(monkeypatch):
    world = World(monkeypatch, overhead_ns=3 * MS)
    _, receiver, _ = world.members
    one = world.delivery(5, receiver=receiver)
    for ready_ms, wait_ms in ((60, 0), (110, 40 + 2.5 - 25)):
        one.ready_ns = ready_ms * MS
        world.handover._begin(one, receiver)
        assert world.told[-1][-1] == (wait_ms + 3) * MS


@pytest.mark.parametrize("keeps", [False, True])
def test_router_chooses_among_those_that_answer_in_order_of_requests(monkeypatch, keeps):
    world = World(monkeypatch, keeps_when_full=keeps)
    sender, _, second = world.members
    late, soon = world.delivery(7), world.delivery(2, counted_by=sender)
    asked = []

    def choose(router, request, engines):
        asked.append((router, request, [one.name for one in engines]))
        return 2

    monkeypatch.setattr(handover, "chosen", choose)
    monkeypatch.setattr(handover, "has_room", lambda receiver, *_: receiver is second)
    monkeypatch.setattr(Handover, "_begin", lambda self, *given: world.told.append(given))
    chosen = world.handover._place()
    among = ["known 2"] if keeps else ["known 1", "known 2"]
    assert asked == [(world.router, f"request {n}", among) for n in (2, 7)]
    sent = [("sent", f"request {n}", second.live, second.known) for n in (2, 7)]
    counted = ("count 0", "request 2", -1)
    begun = [[(one, second)] if keeps else [] for one in (soon, late)]
    taken = begun if keeps else [[("queue 2", one.sent)] for one in (soon, late)]
    assert world.told == [sent[0], counted, *taken[0], sent[1], *taken[1]]
    assert [one.counted_by for one in (soon, late)] == [second, second]
    assert [one.receiver for one in (soon, late)] == [second, second]
    assert chosen == (set() if keeps else {2})
    assert list(world.handover._queues[2]) == ([] if keeps else [soon, late])
    assert world.handover._unplaced == []


def test_request_goes_on_where_it_was_promised_though_nobody_else_is_sent_there(monkeypatch):
    world = World(monkeypatch, local_uncached_tokens=9)
    sender, first, _ = world.members
    world.handover._local._promised[2] = first
    promised, other = world.delivery(2, counted_by=sender), world.delivery(3)
    world.serving["decode",], world.is_expected = [], True  # it drains
    assert world.handover._place() == {1}
    assert world.told == [("count 0", "request 2", -1), ("queue 1", promised.sent)]
    assert (promised.receiver, promised.counted_by) == (first, first)
    assert world.handover._unplaced == [other]


def test_request_goes_on_elsewhere_if_where_it_was_promised_is_no_room_and_it_need_not_wait(
    monkeypatch,
):
    world = World(monkeypatch, local_uncached_tokens=9, keeps_when_full=True)
    sender, first, second = world.members
    world.fleet.arrivals[2] = SimpleNamespace(request="request 2")
    world.handover._local._promised[2] = first
    one = world.delivery(2, counted_by=sender)
    monkeypatch.setattr(handover, "chosen", lambda *_: 2)
    monkeypatch.setattr(handover, "has_room", lambda receiver, *_: receiver is second)
    monkeypatch.setattr(Handover, "_begin", lambda self, *given: world.told.append(given))
    world.handover._place()
    assert world.told == [
        ("count 1", "request 2", -1), ("settle", first),
        ("sent", "request 2", second.live, second.known), ("count 0", "request 2", -1),
        (one, second),
    ]  # fmt: skip


@pytest.mark.parametrize(("keeps", "is_expected"), [(False, False), (False, True), (True, False)])
def test_requests_that_nobody_can_go_on_with_wait_are_kept_or_given_up(
    monkeypatch, keeps, is_expected
):
    world = World(monkeypatch, keeps_when_full=keeps)
    sender = world.members[0]
    world.serving["decode",], world.is_expected = [], is_expected
    counted, early = world.delivery(3, counted_by=sender), world.delivery(4, computed=False)
    sender.engine.requests.num_seated = 3  # nobody can be kept
    assert world.handover._place() == set()
    if is_expected:
        assert (world.handover._unplaced, world.told) == ([counted, early], [])
    elif keeps:
        assert (world.handover._unplaced, list(world.handover._under_way)) == ([counted], [3])
    else:
        assert (world.handover._unplaced, world.handover._under_way) == ([], {})
        why = "no engine is left that could go on"
        assert world.told == [
            ("count 0", "request 3", -1), ("interrupt 0",), ("delivered 0", 3), ("wake 0",),
            ("fail", counted.sent, why, sender),
        ]  # fmt: skip
