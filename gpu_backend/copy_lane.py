"""One direction of copies beside the steps: a thread of its own, or a CUDA stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Protocol

import torch

_POLL_S = 20e-6


class Ticket(Protocol):
    """A copy that was ordered."""

    def is_done(self) -> bool:
        """Whether its last byte is there."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done, not for longer than `timeout_s`; return whether it is."""

    def times_ns(self) -> tuple[int, int]:
        """Return when it began and ended, as `time.perf_counter_ns` counts; only when done."""


class Lane(Protocol):
    """Carries copies out one after the other, in the order in which they are ordered."""

    def order(self, work: Callable[[], None], after: Sequence[Ticket] = ()) -> Ticket:
        """Do `work` beside the caller, behind all that was ordered before and behind `after`."""


def open_lane(device: torch.device) -> Lane:
    """Return a lane for copies between a device and the host's memory."""
    return StreamLane(device) if device.type == "cuda" else ThreadLane()


class ThreadLane:
    """A thread that copies; torch lets others run meanwhile, and so does a file.

    It waits for the copies that come before its own by itself, which a stream could not if a
    file is written by one of them: the engine's thread would have to wait. So with a file among
    the tiers all lanes are threads, also where the device is a GPU.

    Parameters
    ----------
    device : torch.device, optional
        Where copies begin or end, if that is a GPU: the thread has a stream of its own there, and
        a copy is done when that stream is. What it copies was computed, by the current stream,
        before it was ordered.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-copies")
        self._device = device if device is not None and device.type == "cuda" else None
        self._stream = None if self._device is None else torch.cuda.Stream(self._device)

    def order(self, work: Callable[[], None], after: Sequence[Ticket] = ()) -> Ticket:
        """Hand work to the thread; see `Lane.order`."""
        do = work if self._stream is None else self._on_stream(work, self._stream)

        def carry_out() -> tuple[int, int]:
            for ticket in after:
                ticket.wait()
            begun_ns = time.perf_counter_ns()
            do()
            return begun_ns, time.perf_counter_ns()

        return ThreadTicket(self._thread.submit(carry_out))

    def _on_stream(self, work: Callable[[], None], stream: torch.cuda.Stream) -> Callable[[], None]:
        computed = torch.cuda.current_stream(self._device).record_event()

        def do() -> None:
            computed.synchronize()
            with torch.cuda.stream(stream):
                work()
            stream.synchronize()

        return do


class ThreadTicket:
    """A copy in a thread; an error there is raised by whoever asks."""

    def __init__(self, future: Future[tuple[int, int]]) -> None:
        self._future = future

    def is_done(self) -> bool:
        """Whether its last byte is there."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done; see `Ticket.wait`."""
        try:
            self._future.result(timeout_s)
        except FutureTimeoutError:
            return False
        return True

    def times_ns(self) -> tuple[int, int]:
        """Return when it began and ended."""
        return self._future.result()


class StreamLane:
    """A CUDA stream; what it copies was computed, by the current stream, before it was ordered."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def order(self, work: Callable[[], None], after: Sequence[Ticket] = ()) -> Ticket:
        """Queue work on the stream; see `Lane.order`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for ticket in after:
            assert isinstance(ticket, StreamTicket)
            self._stream.wait_event(ticket.ended)
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            begun.record()
            work()
            ended.record()
        return StreamTicket(begun, ended)


class StreamTicket:
    """A copy on a stream, between two events."""

    def __init__(self, begun: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self.begun = begun
        self.ended = ended

    def is_done(self) -> bool:
        """Whether its last byte is there."""
        return bool(self.ended.query())

    def wait(self, timeout_s: float | None = None) -> bool:
        """Let the host wait until it is done; see `Ticket.wait`."""
        if timeout_s is None:
            self.ended.synchronize()
            return True
        until_s = time.perf_counter() + timeout_s
        while not self.ended.query():
            if time.perf_counter() >= until_s:
                return False
            time.sleep(_POLL_S)
        return True

    def times_ns(self) -> tuple[int, int]:
        """Return when it began and ended, by an event that is over now."""
        now = torch.cuda.Event(enable_timing=True)
        now.record()
        now.synchronize()
        now_ns = time.perf_counter_ns()
        return tuple(  # type: ignore[return-value]
            now_ns - int(event.elapsed_time(now) * 1e6) for event in (self.begun, self.ended)
        )
