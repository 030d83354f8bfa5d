"""The GPU's way of launching, rehearsed without one: only copy, events and graphs are stood in.

What a graph would read is checked by running the same step eagerly on what the device buffer holds.
"""

import pytest

torch = pytest.importorskip("torch")

from schedlab.gpu_backend.graphs import DecodeGraphs, graph_buckets  # noqa: E402
from schedlab.gpu_backend.step_batch import StepBatch  # noqa: E402
from tests.gpu.backend import CONFIG, TIGHT, generated, run_real, tiny_runner  # noqa: E402
from tests.gpu.test_executor import alone, workload  # noqa: E402, F401
from tests.policy_cases import make  # noqa: E402


class Event:
    """An event of a device that is always done."""

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 0.5


class EagerGraphs:
    """Replays by running the padded step on the device buffer's contents."""

    bucket = DecodeGraphs.bucket

    def __init__(self, runner):
        self._runner = runner
        self.buckets = graph_buckets(4)
        self.replayed = set()

    def replay(self, bucket):
        self.replayed.add(bucket)
        batch = self._runner.new_batch()
        batch.pad_sequences(bucket)
        step = batch.tensors(self._runner._views)
        return self._runner.decoder.forward(step, self._runner.kv_pools)


def rehearsing_runner(config, graphs=True):
    runner = tiny_runner(config)
    runner._buffer = torch.full((runner.layout.num_bytes,), 255, dtype=torch.uint8)
    runner._views = runner.layout.views(runner._buffer)
    runner._start, runner._end = Event(), Event()
    runner._graphs = EagerGraphs(runner) if graphs else None
    layout = runner.layout
    runner.new_batch = lambda: StepBatch(layout, pinned=False)  # pinning needs CUDA
    runner.is_cuda = True
    return runner


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "config", "graphs"),
    [
        ("fcfs", CONFIG, True),
        ("fcfs", TIGHT, True),
        ("fcfs", TIGHT, False),
        ("static", CONFIG, False),  # its batches shrink by too many at once to fill a graph
        ("sarathi", CONFIG, True),
        ("sarathi", TIGHT, True),
    ],
)
def test_launching_as_on_a_gpu_gives_every_request_its_tokens(case, config, graphs, alone):  # noqa: F811
    runner = rehearsing_runner(config, graphs)
    _, executor = run_real(make(case), workload(), config, runner=runner)
    assert generated(executor, workload()) == alone
    assert any(step.was_prepared for step in executor.steps)
    assert executor.steps[0].device_ns == 500_000
    if graphs:
        # Batches beyond the largest bucket run eagerly.
        assert max(step.shape.num_decodes for step in executor.steps) > 4
        assert {4} < runner._graphs.replayed


def test_graph_buckets_are_closer_where_padding_costs_more():
    assert graph_buckets(1) == (1,)
    assert graph_buckets(8) == (1, 2, 4, 8)
    assert graph_buckets(48) == (1, 2, 4, 8, 16, 24, 32, 48)
    assert graph_buckets(130) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 130)
    assert graph_buckets(256)[-6:] == (96, 128, 160, 192, 224, 256)


def test_bucket_is_the_smallest_that_holds_the_batch():
    graphs = EagerGraphs(tiny_runner())
    assert [graphs.bucket(n) for n in (1, 3, 4, 5)] == [1, 4, 4, None]
