"""What is queued on CUDA streams, and in what order: written down by a stand-in for the device."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from schedlab.gpu_backend import copy_lane  # noqa: E402
from schedlab.gpu_backend.copy_lane import StreamLane, StreamTicket, ThreadLane  # noqa: E402
from schedlab.gpu_backend.graphs import DecodeGraphs  # noqa: E402
from schedlab.gpu_backend.step_batch import StepBatch, StepLayout  # noqa: E402


class Device:
    """Writes down what is asked of `torch.cuda`; streams and events have numbers."""

    def __init__(self):
        self.log = []
        self.streams = 0
        self.events = 0

    def stream(self):
        self.streams += 1
        return Stream(self.log, self.streams)

    def event(self, enable_timing):
        assert enable_timing
        self.events += 1
        return Event(self.log, self.events)

    @contextmanager
    def inside(self, *what):
        self.log.append(("enter", *what))
        yield
        self.log.append(("leave", *what))


class Stream:
    def __init__(self, log, number):
        self.log, self.number = log, number

    def __repr__(self):
        return f"stream {self.number}"

    def wait_stream(self, other):
        self.log.append((self.number, "waits for stream", other.number))

    def wait_event(self, event):
        self.log.append((self.number, "waits for event", event.number))

    def record_event(self):
        self.log.append((self.number, "records"))
        return Event(self.log, self.number)

    def synchronize(self):
        self.log.append(("host waits for stream", self.number))


class Event:
    """Happens at the millisecond of its number."""

    def __init__(self, log, number):
        self.log, self.number = log, number
        self.queries = []

    def record(self):
        self.log.append(("event", self.number))

    def synchronize(self):
        self.log.append(("host waits for event", self.number))

    def query(self):
        return self.queries.pop(0)

    def elapsed_time(self, end):
        return float(end.number - self.number)


@pytest.fixture
def device(monkeypatch):
    device = Device()
    here = Stream(device.log, 0)
    fakes = {
        "Stream": lambda *_: device.stream(), "current_stream": lambda *_: here,
        "Event": device.event, "stream": lambda one: device.inside(one.number),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: device.log.append("replay")),
        "graph": lambda graph, pool: device.inside("capture", pool),
        "graph_pool_handle": lambda: "pool", "synchronize": lambda: device.log.append("wait"),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake, raising=False)
    return device


def test_copy_is_queued_behind_what_was_computed_and_behind_the_copies_named(device):
    lane = StreamLane(torch.device("cuda"))
    first = lane.order(lambda: device.log.append("copy"))
    lane.order(lambda: device.log.append("copy after"), [first])
    assert device.log == [
        (1, "waits for stream", 0), ("enter", 1), ("event", 1), "copy", ("event", 2), ("leave", 1),
        (1, "waits for stream", 0), (1, "waits for event", 2),
        ("enter", 1), ("event", 3), "copy after", ("event", 4), ("leave", 1),
    ]  # fmt: skip


def test_thread_copies_on_a_stream_of_its_own_behind_what_was_computed_before_the_order(device):
    lane = ThreadLane(torch.device("cuda"))
    first = lane.order(lambda: device.log.append("copy"))
    first.wait()
    ThreadLane(torch.device("cuda")).order(lambda: device.log.append("back"), [first]).wait()
    assert device.log == [
        (0, "records"), ("host waits for event", 0),
        ("enter", 1), "copy", ("leave", 1), ("host waits for stream", 1),
        (0, "records"), ("host waits for event", 0),
        ("enter", 2), "back", ("leave", 2), ("host waits for stream", 2),
    ]  # fmt: skip


def test_copy_is_done_when_its_end_is_and_its_times_are_told_by_the_clock_of_the_host(
    device, monkeypatch
):
    begun, ended = device.event(True), device.event(True)
    ticket = StreamTicket(begun, ended)
    ended.queries = [False, True]
    assert not ticket.is_done()
    assert ticket.is_done()
    clock = SimpleNamespace(perf_counter_ns=lambda: 10_000_000)
    monkeypatch.setattr(copy_lane, "time", clock)
    # The event that is over now is the third: two and one milliseconds after the others.
    assert ticket.times_ns() == (8_000_000, 9_000_000)
    assert device.log == [("event", 3), ("host waits for event", 3)]


def test_host_waits_for_a_copy_as_long_as_it_says(device, monkeypatch):
    ended = device.event(True)
    ticket = StreamTicket(device.event(True), ended)
    slept_s = []
    clock = SimpleNamespace(
        perf_counter=lambda: sum(slept_s), sleep=lambda seconds: slept_s.append(seconds)
    )
    monkeypatch.setattr(copy_lane, "time", clock)
    ended.queries = [False] * 10
    assert not ticket.wait(2.5 * copy_lane._POLL_S)
    assert len(slept_s) == 3
    ended.queries = [False, True]
    assert ticket.wait(1.0)
    assert len(slept_s) == 4
    assert ticket.wait()
    assert device.log == [("host waits for event", 1)]


class Decoder:
    """Writes down what each step is made of."""

    def __init__(self, log):
        self.log = log

    def forward(self, step, kv_pools):
        assert torch.is_inference_mode_enabled()
        self.log.append(("forward", step))
        return len(step.tokens), kv_pools


def test_graphs_are_captured_from_the_largest_batch_down_each_run_before(device):
    layout = StepLayout(max_tokens=8, max_num_seqs=4, max_blocks=3)
    batch, buffer = StepBatch(layout, pinned=False), torch.zeros(layout.num_bytes).byte()
    # What an earlier step left there.
    batch.max_query_tokens = 5
    batch.num_seqs = 3
    batch.block_tables[:] = 7
    graphs = DecodeGraphs(
        Decoder(device.log), "pools", layout.views(buffer), batch, buffer, (1, 2, 4)
    )
    steps = [entry[1] for entry in device.log if entry[0] == "forward"]
    assert [len(step.context_lens) for step in steps] == [4, 4, 4, 2, 2, 2, 1, 1, 1]
    for step in steps:
        size = len(step.context_lens)
        assert step.max_query_tokens == 1
        assert step.context_lens.tolist() == [1] * size
        assert step.slots.tolist() == [-1] * size
        assert step.block_tables.tolist() == [[0] * 3] * size
        assert step.query_start.tolist() == list(range(size + 1))
        assert step.tokens.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert [entry if entry[0] != "forward" else "forward" for entry in device.log[:11]] == [
        (1, "waits for stream", 0), ("enter", 1), "forward", "forward", ("leave", 1),
        (0, "waits for stream", 1), "wait",
        ("enter", "capture", "pool"), "forward", ("leave", "capture", "pool"),
        (2, "waits for stream", 0),
    ]  # fmt: skip
    assert [graphs.bucket(n) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, None]
    assert graphs.replay(2) == (2, "pools")
    assert device.log[-1] == "replay"
