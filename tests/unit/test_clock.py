"""The agenda of a fleet: instants, phases, places, and then who asked first."""

from schedlab.sim.drive.clock import COMES, ENDS, PLANS, Clock


def test_clock_goes_by_instant_phase_place_and_then_by_who_asked_first():
    clock, did = Clock(), []

    def later(name, delay_ns, phase, place=0):
        clock.at(delay_ns, phase, lambda _: did.append((name, clock.now_ns)), place)

    later("last", 20, COMES)
    later("plans", 10, PLANS)
    later("second place", 10, ENDS, 1)
    later("first", 10, ENDS)
    later("asked later", 10, ENDS)
    clock.run()
    expected = [("first", 10), ("asked later", 10), ("second place", 10), ("plans", 10)]
    assert did == [*expected, ("last", 20)]


def test_event_that_has_happened_is_used_again_at_its_new_place():
    clock, did = Clock(), []

    def end(event):
        did.append(("ends", clock.now_ns))
        assert clock.at(5, PLANS, plan, 0, event) is event

    def plan(event):
        did.append(("plans", clock.now_ns))
        assert event is first

    first = clock.at(10, ENDS, end)
    clock.at(15, ENDS, lambda event: did.append((event is first, clock.now_ns)))
    clock.run()
    assert did == [("ends", 10), (False, 15), ("plans", 15)]
