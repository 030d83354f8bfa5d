"""Each stage of a live migration by itself, with stand-ins for engines and links."""

from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.sim.drive import migration
from schedlab.sim.drive.migration import Migration, MigrationPlan, _Move, _Phase
from schedlab.sim.errors import PolicyError
from schedlab.sim.request import Status

MS = 1_000_000


class State(SimpleNamespace):
    """A request, each equal to itself alone."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class World:
    """Engines 0 and 1, and all that a migration between them asks of others."""

    def __init__(self, monkeypatch, **plan):
        self.told = []
        self.source, self.target = self.members = [self.member(index) for index in range(2)]
        self.pairs, self.victim, self.has_room, self.can_grow = [], 0, True, True
        migrator = SimpleNamespace(
            pairs=lambda places: self.pairs, victim=lambda decoding: self.chosen(decoding)
        )  # fmt: skip
        self.migration = Migration.__new__(Migration)
        fleet = SimpleNamespace(
            now_ns=70 * MS, arrivals={5: "arrival 5"}, settle_soon=self.noting("settle")
        )  # fmt: skip
        links = SimpleNamespace(send_kv=self.sent, cancel=self.noting("cancel"))
        for name, value in {
            "_fleet": fleet, "_links": links, "_leaving": {}, "_entering": {}, "moves": [],
            "_had_tokens": {},
            "_plan": MigrationPlan(migrator, every_ns=9, last_stage_blocks=2, max_stages=3),
        }.items():  # fmt: skip
            setattr(self.migration, name, value)
        for name in ("reserve", "extend", "arrive", "call_off"):
            monkeypatch.setattr(migration.reception, name, self.noting(name))
        monkeypatch.setattr(migration, "has_room", lambda target, tokens: self.has_room)
        monkeypatch.setattr(migration, "_can_grow", lambda *given: self.can_grow)
        monkeypatch.setattr(migration, "as_received", lambda state, config: (state.id, config))

    def noting(self, name, answer=None):
        return lambda *given: self.told.append((name, *given)) or answer

    def chosen(self, decoding):
        self.told.append(("victim", [state.id for state in decoding]))
        return self.victim

    def sent(self, source, target, tokens, done):
        self.done = done
        self.told.append(("send", source.index, target.index, tokens))
        return SimpleNamespace(num_bytes=10 * tokens)

    def member(self, index):
        server = SimpleNamespace(
            interrupt=self.noting(f"interrupt {index}"), wake=self.noting(f"wake {index}")
        )
        requests = SimpleNamespace(
            running={}, in_pipeline={}, delivered=self.noting(f"delivered {index}"),
            withdraw=self.noting("withdraw"),
        )  # fmt: skip
        return SimpleNamespace(
            index=index, server=server, is_stepping=False, is_up=True, is_draining=False,
            live=SimpleNamespace(count=self.noting(f"count {index}")),
            engine=SimpleNamespace(
                requests=requests, config=SimpleNamespace(block_size=16, name=f"limits {index}")
            ),
        )  # fmt: skip

    def runs(self, number, outputs, computed=100, decodes=True):
        state = State(
            id=number, num_output_tokens=outputs, num_computed_tokens=computed,
            is_decoding=decodes, status=Status.RUNNING, num_preemptions=4,
            request=f"request {number}", served_ns=333,
        )  # fmt: skip
        self.source.engine.requests.running[number] = state
        return state

    def move(self, **more):
        one = _Move(self.source, self.target)
        for name, value in more.items():
            setattr(one, name, value)
        self.migration._leaving[0] = self.migration._entering[1] = one
        return one


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def test_request_that_got_a_token_since_it_last_moved_is_chosen_and_sent_whole(world):
    world.runs(3, 7), world.runs(4, 9, decodes=False), world.runs(6, 8)
    one = world.runs(5, 8)
    world.migration._had_tokens.update({3: 7, 5: 7, 6: 9})
    move = world.move()
    world.migration.settle({0, 1})
    reserved = ("reserve", world.target.engine.requests, move.received, "arrival 5", 100, 70 * MS)
    assert world.told == [("victim", [5]), ("interrupt 1",), reserved, ("send", 0, 1, 100)]
    assert (move.state, move.num_preemptions, move.start_ns) == (one, 4, 70 * MS)
    assert move.received == (5, world.target.engine.config)
    assert (move.phase, move.sent_tokens, move.sent_bytes, move.num_stages) == (
        _Phase.COPIES, 100, 1000, 1,
    )  # fmt: skip
    assert world.migration.is_moving
    world.told.clear()
    world.done()
    assert (move.phase, move.moving) == (_Phase.COPIED, None)
    assert world.told == [("interrupt 0",), ("settle", world.source)]
    assert not world.migration.is_moving


@pytest.mark.parametrize("why", ["none", "down", "draining", "no room", "nobody", "in pipeline"])
def test_move_is_given_up_where_nobody_is_chosen_or_the_target_takes_nobody(world, why):
    world.runs(5, 8), world.runs(6, 8)
    world.victim = None if why == "none" else 1
    world.target.is_up = why != "down"
    world.target.is_draining = why == "draining"
    world.has_room = why != "no room"
    if why in ("nobody", "in pipeline"):
        world.source.engine.requests.running.clear()
    if why == "in pipeline":
        world.source.engine.requests.in_pipeline[9] = "a batch"
    move = world.move()
    world.migration._choose(move)
    is_kept = why == "in pipeline"  # some are back when the oldest batch is
    assert (0 in world.migration._leaving, 1 in world.migration._entering) == (is_kept, is_kept)
    assert [name for name, *_ in world.told] == ([] if why in ("nobody", "in pipeline")
                                                 else ["victim"])  # fmt: skip
    assert move.state is None


@pytest.mark.parametrize(
    ("more_tokens", "changes", "outcome"),
    [
        # Two blocks of 16 are the last; of more there are three stages in all.
        (32, {"num_stages": 3}, "last"), (33, {"num_stages": 2}, "stage"),
        (33, {"num_stages": 3}, "off"), (0, {"num_stages": 1}, "last"),
        (32, {"num_stages": 1, "num_preemptions": 3}, "off"),
        (32, {"status": Status.FINISHED}, "off"),
        (32, {"is_decoding": False}, "off"), (32, {"room": False}, "off"),
    ],
)  # fmt: skip
def test_stage_sends_what_was_computed_since_the_last_and_the_last_stops_the_request(
    world, more_tokens, changes, outcome
):
    state = world.runs(5, 8, computed=100 + more_tokens)
    received = SimpleNamespace(id=5)
    move = world.move(
        phase=_Phase.COPIED, state=state, received=received, sent_tokens=100, sent_bytes=1000,
        num_stages=changes.get("num_stages", 1),
        num_preemptions=changes.get("num_preemptions", 4),
    )  # fmt: skip
    state.status = changes.get("status", Status.RUNNING)
    state.is_decoding = changes.get("is_decoding", True)
    world.can_grow = changes.get("room", True)
    world.source.is_stepping = True
    world.migration.settle({0})
    assert world.told == [], "it stops between two steps"
    world.source.is_stepping = False
    world.source.engine.requests.in_pipeline[state] = "a batch"
    world.migration.settle({0})
    world.source.engine.requests.in_pipeline.clear()
    world.source.engine.requests.in_pipeline[9] = "a batch"  # of others, for whom it does not wait
    world.migration.settle({1})
    requests = world.target.engine.requests
    if outcome == "off":
        world.migration.settle({0})
        assert world.told == [
            ("interrupt 1",), ("call_off", requests, received), ("wake 1",),
            ("settle", world.target),
        ]  # fmt: skip
        assert (world.migration._leaving, world.migration._entering) == ({}, {})
        return
    world.told.clear()
    world.migration.settle({0})
    stops = [("withdraw", state, 70 * MS), ("wake 0",), ("settle", world.source)]
    assert world.told == [
        ("interrupt 1",), ("extend", requests, received, more_tokens),
        *(stops if outcome == "last" else []), ("send", 0, 1, more_tokens),
    ]  # fmt: skip
    assert (move.sent_tokens, move.sent_bytes) == (100 + more_tokens, 1000 + 10 * more_tokens)
    assert move.num_stages == changes.get("num_stages", 1) + 1
    if outcome == "stage":
        assert (move.phase, move.stop_ns) == (_Phase.COPIES, -1)
        return
    assert (move.phase, move.stop_ns) == (_Phase.STOPPED, 70 * MS)
    assert vars(received) == {
        "id": 5, "_generated": 8, "served_ns": 333, "_seated_ns": 70 * MS
    }  # fmt: skip


def test_request_goes_on_where_all_its_kv_is_and_the_move_is_told(world):
    received = SimpleNamespace(id=5, num_output_tokens=8, request="request 5")
    move = world.move(
        phase=_Phase.STOPPED, received=received, start_ns=11, stop_ns=22, sent_bytes=4321,
        num_stages=3,
    )  # fmt: skip
    world.migration._arrives(move)
    assert world.told == [
        ("interrupt 0",), ("interrupt 1",), ("delivered 0", 5),
        ("arrive", world.target.engine.requests, received, 70 * MS), ("count 0", "request 5", -1),
        ("count 1", "request 5", 1), ("wake 0",), ("wake 1",), ("settle", world.source),
    ]  # fmt: skip
    assert [tuple(one) for one in world.migration.moves] == [(5, 0, 1, 11, 22, 70 * MS, 4321, 3)]
    assert world.migration._had_tokens == {5: 8}
    assert (world.migration._leaving, world.migration._entering) == ({}, {})


@pytest.mark.parametrize("phase", [_Phase.WAITS, _Phase.COPIES, _Phase.STOPPED])
@pytest.mark.parametrize("who", ["source", "target"])
def test_moves_of_an_engine_that_died_end_and_who_had_stopped_is_lost(world, phase, who):
    state = world.runs(5, 8)
    waits = phase is _Phase.WAITS
    world.move(
        phase=phase, state=None if waits else state, received=None if waits else "received",
        moving=None if waits else "KV",
    )  # fmt: skip
    lost = world.migration.died(getattr(world, who))
    stopped = phase is _Phase.STOPPED
    assert lost == ([state] if stopped else [])
    expected = [] if waits else [("cancel", "KV")]
    if who == "source" and not waits:
        expected += [
            ("interrupt 1",), ("call_off", world.target.engine.requests, "received"), ("wake 1",),
            ("settle", world.target),
        ]  # fmt: skip
    if who == "target" and stopped:
        expected += [
            ("interrupt 0",), ("delivered 0", 5), ("count 0", "request 5", -1), ("wake 0",),
            ("settle", world.source),
        ]  # fmt: skip
    assert world.told == expected
    assert (world.migration._leaving, world.migration._entering) == ({}, {})
    assert world.migration.died(getattr(world, who)) == []


def test_pair_is_made_of_engines_that_neither_send_nor_receive_yet(world):
    third = world.member(2)
    members = [world.source, world.target, third]
    world.pairs = [(0, 1), (0, 2), (2, 1), (1, 0)]
    world.migration._pair(members)
    assert {at: (one.source.index, one.target.index) for at, one in
            world.migration._leaving.items()} == {0: (0, 1), 1: (1, 0)}  # fmt: skip
    assert set(world.migration._entering) == {0, 1}
    assert world.told == [
        ("interrupt 0",), ("settle", world.source), ("interrupt 1",), ("settle", world.target),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((0, 2), r"named \(0, 2\), which is no pair of different places 0 to 1"),
        ((1, 1), r"named \(1, 1\), which is no pair"), ((0,), r"named \(0,\), which"),
        ([0, 1], r"named \[0, 1\], which"), ((-1, 0), r"named \(-1, 0\), which"),
        ((1, 0), "named place 0 to go to, which drains"),
        ((0.0, 1.0), r"named \(0\.0, 1\.0\), which"), ((False, 1), r"named \(False, 1\), which"),
        (7, "named 7, which is no pair"),
    ],
)  # fmt: skip
def test_pair_that_cannot_be_is_the_migrators_fault(world, pair, message):
    world.pairs = [(0, 1), pair]
    places = [SimpleNamespace(is_draining=draining) for draining in (True, False)]
    with pytest.raises(PolicyError, match=f"migrator SimpleNamespace: .*{message}"):
        world.migration._asked(places)
    for world.pairs in ([(0, 1)], iter([(0, 1)]), ((np.int64(0), np.int8(1)),)):
        assert world.migration._asked(places) == [(0, 1)], "also of a generator"


@pytest.mark.parametrize("answer", [None, 5])
def test_answer_that_is_no_list_of_pairs_is_the_migrators_fault(world, answer):
    world.pairs = answer
    with pytest.raises(
        PolicyError, match=rf"pairs\(\) returned {answer}, which is no list of pairs"
    ):
        world.migration._asked([])


@pytest.mark.parametrize("answer", [-1, 2, 0.0, True, "0", np.int64(2)])
def test_victim_that_is_no_place_is_the_migrators_fault(world, answer):
    decoding = [world.runs(5, 8), world.runs(6, 8)]
    world.victim = answer
    with pytest.raises(
        PolicyError, match=r"victim\(\) returned .* neither None nor a place 0 to 1"
    ):
        world.migration._choose(world.move())
    world.victim = np.int64(1)
    assert world.migration._victim(decoding) is decoding[1]


@pytest.mark.parametrize("hook", ["pairs", "victim"])
@pytest.mark.parametrize("error", [ValueError("boo"), SystemExit("boo")], ids=repr)
def test_hook_of_a_migrator_that_raises_is_told_with_its_line(world, hook, error):
    class Raises:
        def pairs(self, candidates):
            raise error

        victim = pairs

    world.migration._plan = MigrationPlan(Raises(), every_ns=9)
    world.runs(5, 8)
    said = (
        rf"migrator Raises: {hook}\(\) raised {type(error).__name__}: boo \(test_migration_st.*:\d"
    )
    with pytest.raises(PolicyError, match=said):
        world.migration._asked([]) if hook == "pairs" else world.migration._choose(world.move())
