"""What a backend hands to engines, and how far they tell to be, with stand-ins for both."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.experiments.running import backend
from schedlab.experiments.running import run as run_module
from schedlab.experiments.running.backend import SimBackend, Task, serve_on_engines
from schedlab.experiments.running.fleet import Kind
from schedlab.sim.config import KVTier
from schedlab.sim.errors import SpecError
from schedlab.sim.record.cluster_log import ClusterLog, Place
from schedlab.sim.record.copies import TierFacts
from schedlab.sim.record.log import RunLog
from schedlab.traces.trace import Trace


class Loop:
    """An engine that notes what it is given; each plan ends a request, every third by rejection."""

    def __init__(self, config, policy, executor, observer, draft_length):
        self.given = [config.name, type(policy).__name__, executor, draft_length]
        self.observer, self.num_plans = observer, 0
        self.requests = SimpleNamespace(num_finished=0, num_rejected=0)

    def plan(self):
        self.num_plans += 1
        if self.num_plans % 3:
            self.requests.num_finished += 1
        else:
            self.requests.num_rejected += 1
        if self.observer is not None:
            self.observer(self)


class Pipeline(Loop):
    """One of several batches in flight."""


def kind(name, num_engines, point):
    return Kind(name, num_engines, point, "pricing")


def point(policy, batches=1, drafts=None):
    config = SimpleNamespace(name=f"of {policy}", pipeline_parallel_size=batches)
    drafting = drafts and SimpleNamespace(draft_length=lambda: drafts)
    spec = SimpleNamespace(policy=SimpleNamespace(name=policy, knobs={}))
    return SimpleNamespace(spec=spec, config=config, speculation=drafting)


class Engines:
    """A backend whose engines make so many plans each."""

    def __init__(self, *plans):
        self.plans, self.made = plans, []

    def executors(self, kinds):
        return [f"{one.name} {i}" for one in kinds for i in range(one.num_engines)]

    def drive(self, engines, task, new_engine):
        self.made = [*engines, new_engine(1)]
        for engine, plans in zip(self.made, self.plans, strict=True):
            for _ in range(plans):
                engine.plan()
        return "log"


@pytest.fixture(autouse=True)
def loops(monkeypatch):
    monkeypatch.setattr(backend, "Engine", Loop)
    monkeypatch.setattr(backend, "PipelinedEngine", Pipeline)


KINDS = [kind("a", 2, point("fcfs")), kind("b", 1, point("sjf", 2, "three"))]


def test_engines_get_limits_policy_executor_and_draft_length_of_their_kind():
    engines = Engines(1, 1, 1, 1)
    served = serve_on_engines(engines, Task(None, KINDS, []))
    assert [type(engine) for engine in engines.made] == [Loop, Loop, Pipeline, Pipeline]
    first, second = "FirstComeFirstServed", "ShortestJobFirst"
    assert [engine.given for engine in engines.made] == [
        ["of fcfs", first, "a 0", None], ["of fcfs", first, "a 1", None],
        ["of sjf", second, "b 0", "three"], ["of sjf", second, "b 0", "three"],
    ]  # fmt: skip
    assert all(engine.observer is None for engine in engines.made)
    assert served[:2] == ("log", 4)


def test_progress_of_all_engines_is_told_each_fifty_plans_and_at_the_end():
    told = []
    served = serve_on_engines(Engines(30, 69, 2, 20), Task(None, KINDS, [], told.append))
    assert told == [50, 100, 121]
    assert served.num_plans == 121


@pytest.mark.parametrize(
    ("batches", "num_engines", "cluster", "why"),
    [
        (2, 1, None, "of one batch in flight"),
        (1, 2, None, r"engine\.data_parallel_size: .* of one engine only"),
        (1, 2, "some", "cluster: .* of one engine only"),
    ],
)
def test_steps_of_several_engines_or_batches_are_not_recorded(batches, num_engines, cluster, why):
    spec = SimpleNamespace(engine=SimpleNamespace(pipeline_parallel_size=batches), cluster=cluster)
    kinds = [kind("a", num_engines, point("fcfs"))]
    with pytest.raises(SpecError, match=why):
        serve_on_engines(Engines(), Task(spec, kinds, [], None, []))


def test_simulated_gpus_are_numbered_on_from_those_that_are_there():
    simulated = SimpleNamespace(simulated_gpu=lambda pricing, engine: (pricing, engine))
    kinds = [
        SimpleNamespace(point=simulated, pricing=price, num_engines=n)
        for price, n in (("a", 2), ("b", 1))
    ]
    gpus = SimBackend(None)
    assert gpus.executors(kinds) == [("a", 0), ("a", 1), ("b", 2)]
    assert gpus.executors(kinds[1:]) == [("b", 3)]


def test_requests_of_a_run_fit_every_engine_and_are_named_in_blocks_of_those_that_cache(
    monkeypatch,
):
    asked = []
    monkeypatch.setattr(run_module, "workload", lambda trace, **given: asked.append(given))
    slo = SimpleNamespace(ttft_ms=1.0, tpot_ms=None, e2el_ms=3.0)
    received = SimpleNamespace(received_ns=lambda at_ns, prompts: at_ns + 10**9 * prompts)
    kinds = [
        SimpleNamespace(point=SimpleNamespace(
            spec=SimpleNamespace(slo=slo), frontend=received,
            config=SimpleNamespace(
                max_model_len=length, block_size=size, enable_prefix_caching=caches
            ),
        ))
        for length, size, caches in ((300, 16, False), (200, 32, True), (400, 64, True))
    ]  # fmt: skip
    trace = Trace(
        prompt_tokens=np.array([4, 6]), output_tokens=np.array([1, 1]),
        arrival_ns=np.array([5, 9]),
    )  # fmt: skip
    run_module._arrivals(kinds, trace, None)
    kinds[0].point.frontend, slo.ttft_ms, slo.e2el_ms = None, None, None
    run_module._arrivals(kinds[:1], trace, None)
    (first, second) = asked
    assert (first["max_model_len"], first["hash_block_tokens"]) == (200, 32)
    assert first["predictor_latency_s"].tolist() == [4.0, 6.0]
    assert tuple(first["slo"]) == (1.0, None, 3.0)
    assert (second["max_model_len"], second["hash_block_tokens"]) == (300, None)
    assert second["predictor_latency_s"].tolist() == [0.0, 0.0]
    assert second["slo"] is None


def test_result_of_tiers_tells_the_size_of_each_and_not_of_the_memory_above():
    tiers = (KVTier("cpu", 30, 1e9, 1e9, 0, 0), KVTier("disk", 700, 1e9, 1e9, 0, 0))
    config = SimpleNamespace(kv_tiers=tiers, kv_block_bytes=64, block_size=4, num_blocks=5)
    log = RunLog(4, True)
    kind = SimpleNamespace(point=SimpleNamespace(config=config), num_engines=2)
    told = run_module._copies([kind], log)
    assert told["tiers"] == (TierFacts("cpu", 30, 64, 4), TierFacts("disk", 700, 64, 4))
    assert [told[name].keys() for name in ("copies", "copy_waits")] == [
        log.copies.columns().keys(), log.copies.wait_columns().keys()
    ]  # fmt: skip


def test_result_of_tiers_tells_the_bytes_of_a_block_by_engine_where_pools_differ():
    def kind(block_bytes, num_engines):
        tiers = (KVTier("cpu", 30, 1e9, 1e9, 0, 0),)
        config = SimpleNamespace(kv_tiers=tiers, kv_block_bytes=block_bytes, block_size=4)
        return SimpleNamespace(point=SimpleNamespace(config=config), num_engines=num_engines)

    def told(kinds, **fleet):
        logs = [RunLog(4, True) for _ in range(3)]
        (facts,) = run_module._copies(kinds, ClusterLog(logs, **fleet))["tiers"]
        return facts

    assert told([kind(64, 2), kind(16, 1)]) == TierFacts("cpu", 30, 64, 4, (64, 64, 16))
    assert told([kind(64, 2), kind(64, 1)]) == TierFacts("cpu", 30, 64, 4)
    places = [Place(pool, (), ()) for pool in (1, 0, 1)]
    grown = told([kind(64, 1), kind(16, 1)], places=places)
    assert grown.engine_block_bytes == (16, 64, 16)
    assert TierFacts.from_data(json.loads(json.dumps(grown.to_data()))) == grown
