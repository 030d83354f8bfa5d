"""Lanes that copy as late, or as early, as they may, for tests of who waits for copies."""

import time


class LazyLane:
    """Carries a copy out when somebody waits for it, and not before."""

    def __init__(self):
        self._work = []
        self.times = []

    def order(self, work, after=()):
        self._work.append((work, list(after)))
        return _Ticket(self, len(self._work) - 1)

    def carry_out(self, number):
        while len(self.times) <= number:
            work, after = self._work[len(self.times)]
            for ticket in after:
                ticket.wait()
            begun_ns = time.perf_counter_ns()
            work()
            self.times.append((begun_ns, time.perf_counter_ns()))


class _Ticket:
    def __init__(self, lane, number):
        self._lane, self._number = lane, number

    def is_done(self):
        return len(self._lane.times) > self._number

    def wait(self, timeout_s=None):
        self._lane.carry_out(self._number)
        return True

    def times_ns(self):
        return self._lane.times[self._number]


class EagerLane:
    """Carries a copy out when it is ordered, behind those that come before it."""

    def __init__(self):
        self._lane = LazyLane()

    def order(self, work, after=()):
        ticket = self._lane.order(work, after)
        ticket.wait()
        return ticket
