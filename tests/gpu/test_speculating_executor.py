"""Drafts by look-up on the real backend: the same answers, in fewer steps."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.gpu_backend.clock import ModelledClock
from schedlab.gpu_backend.executor import TorchExecutor
from schedlab.gpu_backend.named_tokens import NamedTokens
from schedlab.gpu_backend.prompt_lookup import look_up
from schedlab.gpu_backend.speculating_executor import SpeculatingExecutor
from schedlab.policies import registry
from schedlab.sim.config import KVTier
from schedlab.sim.core.audit import check_conservation
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.plan_log import RecordingExecutor
from schedlab.sim.core.speculative_executor import SpeculativeExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.request import Arrival, Request
from schedlab.sim.result import RunResult
from schedlab.sim.speculation.drafters import NgramDrafter
from schedlab.sim.speculation.recording import RecordedAcceptance, write_drafts
from tests import laws
from tests.gpu.backend import CONFIG, TIGHT, generated, tiny_runner, variant
from tests.gpu.test_kv_tiers import MEMORY, ROOMY, session, workload
from tests.laws import LinearCost
from tests.policy_cases import make

FEW_WORDS = variant(vocab_size=5)
"""A model that repeats itself, so that look-ups find what it will say."""


TIERED = replace(
    TIGHT, preemption_mode="swap", swap_space_blocks=40, kv_block_bytes=100,
    kv_tiers=(KVTier("cpu", 40, 1e9, 1e9, 300, 300),),
)  # fmt: skip


def requests(n=12, seed=0, gap_ns=40_000):
    rng = np.random.default_rng(seed)
    made = []
    for i in range(n):
        request = Request(
            id=i, arrival_ns=i * gap_ns, prompt_tokens=int(rng.integers(2, 40)), max_tokens=60
        )
        made.append(Arrival(request, int(rng.integers(1, 60)), request.arrival_ns))
    return made


def served(executor, config, policy="fcfs", arrivals=None):
    """Run a workload; return answers by request."""
    engine = Engine(
        config,
        registry.make(policy) if isinstance(policy, str) else policy,
        executor,
        observer=getattr(executor, "check", None),
    )
    log = simulate(engine, arrivals or requests())
    check_conservation(engine)
    return engine, log


def speculating(config, temperature=0.0, drafter=None):
    runner = tiny_runner(config, FEW_WORDS, temperature)
    pricing = Pricing(LinearCost())
    return SpeculatingExecutor(
        runner, config, ModelledClock(pricing), estimate_step_ns=pricing.estimate_ns, seed=3,
        modelled_drafter=drafter,
    )  # fmt: skip


def replaying(real, config, path, drafter=None):
    """Return a simulation of the drafts that were verified on the device, which are kept there."""
    write_drafts(path, real.drafts)
    acceptance = RecordedAcceptance(path)
    return RecordingExecutor(
        SpeculativeExecutor(Pricing(LinearCost()), config, acceptance, drafter or NgramDrafter(0.0))
    )


def alone(work, prompt_ids=None):
    """Return what requests generate without drafts where nothing is shared or evicted."""
    executor = TorchExecutor(
        tiny_runner(ROOMY, FEW_WORDS), ROOMY, ModelledClock(Pricing(LinearCost())), seed=3,
        prompt_ids=prompt_ids or NamedTokens(3, FEW_WORDS.shape.vocab_size, ROOMY.block_size),
    )  # fmt: skip
    served(executor, ROOMY, arrivals=work)
    return generated(executor, work)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("limits", [CONFIG, TIGHT], ids=["roomy", "tight"])
def test_answers_with_drafts_are_those_without_in_fewer_steps(limits, temperature):
    runner = tiny_runner(limits, FEW_WORDS, temperature)
    plain = TorchExecutor(runner, limits, ModelledClock(Pricing(LinearCost())), seed=3)
    served(plain, limits)
    with_drafts = speculating(replace(limits, num_speculative_tokens=3), temperature)
    served(with_drafts, replace(limits, num_speculative_tokens=3))
    for one in requests():
        assert (
            plain.generated(one.request.id).tolist()
            == with_drafts.generated(one.request.id).tolist()
        )
    accepted = sum(a for drafts in with_drafts.drafts.values() for _, a in drafts)
    drafted = sum(d for drafts in with_drafts.drafts.values() for d, _ in drafts)
    assert 50 < accepted < drafted
    assert len(with_drafts.steps) < len(plain.steps)


SLOWLY = NgramDrafter(3e-7)
"""Drafts that take their time, so that estimates without them are noticed."""


@pytest.mark.parametrize("case", ["fair_batching", "qoserve", "magnus", "fastserve"])
def test_policy_that_plans_by_step_times_is_told_the_same_of_drafts_on_the_device(case, tmp_path):
    policy = make(case)
    config = CONFIG.for_policy(policy.pauses, policy.seats_loaded)
    config = replace(config, num_speculative_tokens=3)
    work = [
        replace(a, request=replace(a.request, predicted_tokens=float(a.output_tokens)))
        for a in requests(gap_ns=900)
    ]
    real = speculating(config, drafter=SLOWLY)
    device = RecordingExecutor(real)
    _, log = served(device, config, make(case), work)
    simulated = replaying(real, config, tmp_path / "drafts.jsonl", SLOWLY)
    _, told = served(simulated, replace(config, fast_forward=False), make(case), work)
    assert real.num_estimates > 0
    assert laws.difference(told, log, ("simulated", "real")) is None
    assert [(s.tokens, s.preempted) for s in device.steps] == [
        (s.tokens, s.preempted) for s in simulated.steps
    ]


@pytest.mark.parametrize("drafter", [None, SLOWLY])
def test_estimate_of_a_step_with_drafts_is_that_of_the_simulation(drafter):
    config = replace(CONFIG, num_speculative_tokens=3)
    real = speculating(config, drafter=drafter)
    simulated = SpeculativeExecutor(
        Pricing(LinearCost()), config, None, drafter or NgramDrafter(0.0)
    )
    shape = BatchShape(3, 60, 25, decode_context_min_tokens=15, rows_sampled=3, draft_tokens=7)
    for asked in (shape, shape.with_chunk(9, 12), BatchShape(0, 0, 0, ((5, 0),), rows_sampled=1)):
        assert real.estimate_step_ns(asked, 1) == simulated.estimate_step_ns(asked, 1)
    assert real.estimate_step_ns(shape, 4) == simulated.estimate_step_ns(shape, 4)
    in_real, in_simulated = real.chunk_pricer(shape, 12), simulated.chunk_pricer(shape, 12)
    assert [in_real(n) for n in (1, 8, 30)] == [in_simulated(n) for n in (1, 8, 30)]
    undrafted = replace(shape, draft_tokens=0)
    assert real.estimate_step_ns(shape) > real.estimate_step_ns(undrafted)


@pytest.mark.parametrize("limits", [CONFIG, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("policy", ["fcfs", "srtf"])
def test_simulation_of_recorded_drafts_takes_the_steps_of_the_device(tmp_path, limits, policy):
    config = replace(limits, num_speculative_tokens=3)
    arrivals = [
        replace(a, request=replace(a.request, predicted_tokens=float(a.output_tokens)))
        for a in requests()
    ]
    real = speculating(config)
    device = RecordingExecutor(real)
    served(device, config, policy, arrivals)
    simulated = replaying(real, config, tmp_path / "drafts.jsonl")
    served(simulated, replace(config, fast_forward=False), policy, arrivals)
    assert [(s.tokens, s.preempted) for s in device.steps] == [
        (s.tokens, s.preempted) for s in simulated.steps
    ]


def test_last_verification_of_an_answer_tells_of_what_was_accepted_behind_its_end():
    config = replace(CONFIG, num_speculative_tokens=3)

    def verified(output_tokens):
        work = [
            Arrival(Request(id=0, arrival_ns=0, prompt_tokens=9, max_tokens=60), output_tokens, 0)
        ]
        executor = speculating(config)
        served(executor, config, arrivals=work)
        return executor.drafts[0]

    whole, came, cut_short = verified(60), 1, 0
    for i, (_, accepted) in enumerate(whole[:-1]):
        # One that ends at the first token of a verification is verified like one that goes on.
        assert verified(came + 1) == whole[: i + 1]
        came += accepted + 1
        cut_short += accepted > 0
    assert cut_short > 2


def test_requests_with_drafts_that_are_swapped_to_a_tier_go_on_where_they_were():
    work = requests(gap_ns=900)
    plain = TorchExecutor(
        tiny_runner(CONFIG, FEW_WORDS), CONFIG, ModelledClock(Pricing(LinearCost())), seed=3
    )
    served(plain, CONFIG, arrivals=work)
    config = replace(TIERED, num_speculative_tokens=3)
    with_drafts = speculating(config)
    _, log = served(with_drafts, config, arrivals=work)
    assert log.copies.columns()["is_swap"].sum() > 4
    for one in work:
        generated = with_drafts.generated(one.request.id).tolist()
        assert generated == plain.generated(one.request.id).tolist()


SHARED = ["cache", "cache-and-swap", "through", "back", "swap-to-tier", "disk-back", "two-disks"]


@pytest.mark.parametrize("memory", SHARED)
@pytest.mark.parametrize("case", ["fcfs", "fastserve"])
def test_drafts_on_shared_blocks_change_neither_answers_nor_steps(memory, case, tmp_path):
    policy = make(case)
    config = MEMORY[memory].for_policy(policy.pauses, policy.seats_loaded)
    config = replace(config, num_speculative_tokens=3)
    work, real = workload(1, num_requests=12), speculating(config)
    device = RecordingExecutor(real)
    _, log = served(device, config, case, work)
    assert generated(real, work) == alone(work)
    assert log.requests()["num_preemptions"].sum() > 0
    assert log.requests()["cached_tokens"].sum() > 50
    assert sum(accepted for drafts in real.drafts.values() for _, accepted in drafts) > 50
    simulated = replaying(real, config, tmp_path / "drafts.jsonl")
    _, told = served(simulated, replace(config, fast_forward=False), case, work)
    assert laws.difference(told, log, ("simulated", "real")) is None
    assert [(s.tokens, s.preempted) for s in device.steps] == [
        (s.tokens, s.preempted) for s in simulated.steps
    ]


@pytest.mark.parametrize("memory", ["cache", "through", "back"])
def test_later_turns_begin_with_answers_that_were_drafted(memory):
    config = replace(MEMORY[memory], num_blocks=26, num_speculative_tokens=3)
    work = [a for i in range(5) for a in session(3 * i, 500 * i, 1_000 * i)]
    real = speculating(config)
    _, log = served(real, config, arrivals=work)
    prompts = real.sequences._prompt_ids
    assert generated(real, work) == alone(work, prompts)
    rows = log.requests()
    found = dict(zip(rows["id"].tolist(), rows["prefix_hit_tokens"].tolist(), strict=True))
    # A first turn has a prompt of 7 tokens and an answer of 9, the last of them without KV.
    assert sum(found[i] >= 12 for i in found if i % 3 == 1) >= 3


def test_requests_with_drafts_that_are_swapped_go_on_where_they_were():
    work = requests(gap_ns=900)
    config = replace(
        TIGHT, preemption_mode="swap", swap_space_blocks=26, kv_block_bytes=100,
        num_speculative_tokens=3,
    )  # fmt: skip
    with_drafts = speculating(config)
    _, log = served(with_drafts, config, arrivals=work)
    plain = TorchExecutor(
        tiny_runner(CONFIG, FEW_WORDS), CONFIG, ModelledClock(Pricing(LinearCost())), seed=3
    )
    served(plain, CONFIG, arrivals=work)
    assert log.requests()["num_preemptions"].sum() > 3
    assert generated(with_drafts, work) == generated(plain, work)


def test_look_up_continues_the_longest_of_the_last_tokens_that_stood_before():
    tokens = np.array([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], dtype=np.int32)
    assert look_up(tokens, 2, 1, 4).tolist() == [9, 2]  # of three tokens, not of 2, 3 alone
    assert look_up(tokens, 2, 1, 2).tolist() == [9, 2]  # the first of two places
    assert look_up(tokens, 20, 1, 4).tolist() == [9, 2, 3, 8, 1, 2, 3]
    assert look_up(tokens, 3, 4, 4).tolist() == []
    assert look_up(np.array([7, 7, 7], dtype=np.int32), 5, 1, 4).tolist() == [7]
    assert look_up(np.array([7], dtype=np.int32), 5, 1, 4).tolist() == []


def test_run_on_the_device_keeps_its_drafts_for_the_simulation(tmp_path):
    data = {
        "name": "drafts", "model": "schedlab-tiny", "hardware": "cpu", "backend": "real",
        "policy": "fcfs", "real": {"clock": "modelled"},
        "engine": {
            "dtype": "fp32", "num_gpu_blocks_override": 64, "block_size": 4, "max_num_seqs": 4,
            "max_num_batched_tokens": 64, "max_model_len": 128,
            "speculation": {
                "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1,
                "request_s": 0.001,
            },
        },
        "workload": {
            "prompt_tokens": {"distribution": "uniform", "low": 2, "high": 30},
            "output_tokens": {"distribution": "uniform", "low": 1, "high": 60},
            "num_requests": 10, "request_rate": 100,
        },
    }  # fmt: skip
    measured = run(make_spec(data))
    measured.save(tmp_path / "real")
    recording = {"recording": str(tmp_path / "real" / "drafts.jsonl")}
    data |= {"backend": "sim"}
    data["engine"]["speculation"]["acceptance"] = recording
    simulated = run(make_spec(data))
    assert len(set(simulated.requests["finish_ns"])) > 5
    assert simulated.requests["finish_ns"].tolist() == measured.requests["finish_ns"].tolist()
    assert RunResult.load(tmp_path / "real").drafts == measured.drafts
    assert sum(drafted for drafts in measured.drafts.values() for drafted, _ in drafts) > 20
