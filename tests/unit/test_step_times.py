"""Steps that are added up when they begin, and written down when they have ended."""

import struct
from dataclasses import replace
from random import Random

import pytest
from librt.strings import BytesWriter

from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.cost.roofline import RooflineCostModel
from schedlab.sim.cost.segment import StepTimes
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.models import model
from tests import laws
from tests.laws import arrival

CONFIG = EngineConfig(
    num_blocks=400, max_model_len=800, block_size=16, max_num_seqs=6, max_num_batched_tokens=64
)

COST = RooflineCostModel(Deployment(model("llama-3-8b"), gpu("a100-80gb")))


def priced_by_hand(base, ramp, per_token, least, context):
    read = per_token * context
    cost = base + ramp + read if read > ramp else base + 2 * read
    return max(int(max(cost, least) + 0.5), 1)


def test_times_asked_for_together_are_those_asked_for_one_by_one():
    met = set()
    for seed in range(60):
        draw = Random(seed)
        base, per_token = draw.choice([0.0, 3.25, 700.5]), draw.choice([0.0, 0.5, 2.125])
        ramp, least = draw.choice([0.0, 40.0, 900.0]), draw.choice([0.0, 60.0, 800.0])
        context, grows, n = draw.randrange(1, 400), draw.randrange(0, 9), draw.randrange(1, 200)
        times = StepTimes(base, ramp, per_token, least, context, grows)
        each = [priced_by_hand(base, ramp, per_token, least, context + grows * i) for i in range(n)]
        assert times.durations_ns(n) == [times.step_ns(i) for i in range(n)] == each
        assert times.total_ns(n) == sum(each)
        rows = BytesWriter()
        times.write(n, rows)
        assert list(struct.unpack(f"<{n}q", rows.getvalue())) == each
        starts = [sum(each[:i]) for i in range(n)]
        for at_ns in (-5, 0, 1, starts[n // 2], starts[n // 2] + 1, starts[-1], sum(each), 10**9):
            begun = max(sum(start < at_ns for start in starts), 1)
            assert times.begun_before(n, at_ns) == (begun, sum(each[:begun]))
        met.add((per_token * context > ramp, each[0] == int(least + 0.5), n >= 128))
    assert len(met) >= 7


@pytest.mark.parametrize("name", ["a100-80gb", "rtx4090"])
def test_times_of_the_roofline_are_those_of_single_steps(name):
    cost = RooflineCostModel(Deployment(model("llama-3-8b"), gpu(name)))
    step_times = cost.step_times_pricer()
    for num_decodes, context in ((1, 3), (1, 4000), (7, 700), (64, 64), (200, 90_000)):
        shape = BatchShape(num_decodes, context, context // num_decodes, rows_sampled=num_decodes)
        written = cost.step_ns(shape, 9)
        assert step_times(shape).durations_ns(9) == written
        assert written == [
            cost.step_ns(shape.with_contexts(context + num_decodes * i, 0, 0), 1)[0]
            for i in range(9)
        ]
    assert step_times(BatchShape(1, 50, 50, chunks=((4, 0),), rows_sampled=1)) is None
    assert step_times(BatchShape(1, 50, 50, swapped_bytes=7, rows_sampled=1)) is None
    staged = Deployment(model("llama-3-8b"), gpu(name), pipeline_parallel_size=2)
    assert RooflineCostModel(staged).step_times_pricer() is None


def served(name, writes_late, ahead=True, slowness=1.0, **keys):
    """Return the log of a run, and how many segments it has."""
    draw = Random(7)
    work = [
        arrival(i, i * 30_000_000, draw.randrange(1, 150), draw.randrange(1, 60)) for i in range(14)
    ]

    def executor(pricing):
        made = SimExecutor(pricing)
        made.writes_late, made.slowness = writes_late, slowness
        return made

    commits = []
    limits = replace(CONFIG, fast_forward=ahead)
    log = laws.run(
        registry.make(name), work, limits, COST, make_executor=executor, observer=commits.append,
        **keys,
    )  # fmt: skip
    return log, len(commits)


@pytest.mark.parametrize("name", ["fcfs", "fastserve", "vtc"])
def test_steps_written_late_are_those_written_at_once(name):
    ways = [
        {}, {"drive": laws.cut_at_arrivals}, {"overhead": SchedulingOverhead(base_s=1e-3)},
        {"overhead": SchedulingOverhead(first_step_s=0.2)}, {"slowness": 1.3},
    ]  # fmt: skip
    for keys in ways:
        by_step, _ = served(name, writes_late=False, ahead=False, **keys)
        at_once, num_segments = served(name, writes_late=False, **keys)
        late, num_late = served(name, writes_late=True, **keys)
        assert num_late == num_segments < by_step.num_steps
        for other in (at_once, late):
            assert laws.difference(by_step, other, ("by step", "ahead")) is None
            assert laws.signature(by_step) == laws.signature(other)


def test_executor_writes_late_only_what_nothing_is_added_to():
    work = [arrival(0, 0, 30, 40)]

    def unwritten(**changes):
        seen = []

        class Watching(SimExecutor):
            def execute(self, work, max_steps, horizon_ns):
                for key, value in changes.items():
                    setattr(self, key, value)
                steps = super().execute(work, max_steps, horizon_ns)
                seen.append(steps.times is not None)
                return steps

        laws.run(registry.make("fcfs"), work, CONFIG, COST, make_executor=Watching)
        return any(seen)

    assert unwritten(writes_late=True)
    assert not unwritten(writes_late=False)
    assert not unwritten(writes_late=True, slowness=2.0)
