"""Prefix cache and host tier of the real engine: the simulator's decisions, and the same tokens."""

import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from schedlab.experiments.comparing.compare import compare  # noqa: E402
from schedlab.experiments.running.run import run  # noqa: E402
from schedlab.experiments.specification.loading import make_spec  # noqa: E402
from schedlab.gpu_backend.clock import ModelledClock, VirtualClock, WallClock  # noqa: E402
from schedlab.gpu_backend.executor import TorchExecutor  # noqa: E402
from schedlab.gpu_backend.host_tier import HostTier  # noqa: E402
from schedlab.gpu_backend.kv_memory import KVMemory  # noqa: E402
from schedlab.gpu_backend.named_tokens import NamedTokens  # noqa: E402
from schedlab.gpu_backend.replay import replay  # noqa: E402
from schedlab.gpu_backend.shared_pool import SharedBlockPool  # noqa: E402
from schedlab.policies import registry  # noqa: E402
from schedlab.sim.config import KVTier  # noqa: E402
from schedlab.sim.core.engine import Engine  # noqa: E402
from schedlab.sim.cost.pricing import Pricing  # noqa: E402
from schedlab.sim.errors import SchedlabError, SpecError  # noqa: E402
from schedlab.sim.request import Arrival, Request, Turn  # noqa: E402
from schedlab.testing import Case, check_executor  # noqa: E402
from tests import laws  # noqa: E402
from tests.gpu.backend import CONFIG, TINY, generated, run_real, tiny_runner  # noqa: E402
from tests.gpu.lanes import LazyLane  # noqa: E402
from tests.policy_cases import make  # noqa: E402

ROOMY = replace(CONFIG, num_blocks=400)
CACHING = replace(CONFIG, num_blocks=30, max_model_len=104, enable_prefix_caching=True)
HOST = KVTier("cpu", 40, 1e9, 1e9, load_latency_ns=300, store_latency_ns=300)


def tiered(host=HOST, **changes):
    changes = {"kv_load": "always", "kv_block_bytes": 100, **changes}
    return replace(CACHING, kv_tiers=(host,), swap_space_blocks=host.num_blocks, **changes)


MEMORY = {
    "cache": CACHING,
    "cache-and-swap": replace(
        CACHING, preemption_mode="swap", swap_space_blocks=20, kv_block_bytes=100
    ),
    "through": tiered(),
    "when-faster": tiered(kv_load="when_faster"),
    "back": tiered(replace(HOST, write="back")),
    "swap-to-tier": tiered(preemption_mode="swap"),
    "swap-without-cache": tiered(preemption_mode="swap", enable_prefix_caching=False),
    "small-and-slow": tiered(replace(HOST, num_blocks=7, store_bytes_per_s=1e7)),
}


def workload(seed=0, num_requests=10, gaps_ns=(0, 700, 900, 3_000)):
    """Draw requests that begin with some of three documents, and perhaps go on alone."""
    draw, now_ns, work = random.Random(seed), 0, []
    for i in range(num_requests):
        now_ns += draw.choice(gaps_ns)
        document, num_blocks = 100 * draw.randint(0, 2), draw.randint(0, 12)
        own = draw.randint(1, 15)
        names = [document + k for k in range(num_blocks)]
        names += [10_000 + 100 * i + k for k in range(own // 4)]
        work.append(
            laws.arrival(
                i, now_ns, 4 * num_blocks + own, draw.randint(1, 30), priority=draw.randint(0, 2),
                predicted_tokens=float(draw.randint(1, 30)), prefix_hash_ids=tuple(names),
            )
        )  # fmt: skip
    return work


def alone(work, temperature=0.0, prompt_ids=None):
    """Return what requests generate where nothing is shared, evicted, stored or loaded."""
    prompt_ids = prompt_ids or NamedTokens(0, TINY.shape.vocab_size, CONFIG.block_size)
    runner = tiny_runner(ROOMY, temperature=temperature)
    _, executor = run_real("fcfs", work, ROOMY, runner=runner, prompt_ids=prompt_ids)
    return generated(executor, work)


def run_tiered(policy, work, config, clock=None, lane=None, temperature=0.0, **options):
    runner = tiny_runner(config, temperature=temperature)
    if lane is not None and config.kv_tiers:
        runner.lanes = [(lane(), lane()) for _ in config.kv_tiers]
    estimate = Pricing(laws.LinearCost()).estimate_ns
    if not config.enable_prefix_caching:
        options["prompt_ids"] = NamedTokens(0, TINY.shape.vocab_size, config.block_size)
    return run_real(
        policy, work, config, clock, runner=runner, estimate_step_ns=estimate, **options
    )


@pytest.fixture(scope="module")
def expected():
    tokens = alone(workload())
    assert len({tuple(t) for t in tokens.values()}) == len(tokens)
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "lane"),
    [
        pytest.param(name, lane, id=f"{name}-{'lazy' if lane else 'thread'}")
        for name, config in MEMORY.items()
        for lane in (None, LazyLane)
        if lane is None or config.kv_tiers  # else nothing goes by a lane
    ],
)
@pytest.mark.parametrize("case", ["fcfs", "srtf", "fastserve"])
def test_engine_with_real_tiers_decides_as_simulated_and_changes_no_token(
    case, memory, lane, expected
):
    policy = make(case)
    config = MEMORY[memory].for_policy(policy.pauses, policy.seats_loaded)
    simulated = laws.run(make(case), workload(), config)
    real, executor = run_tiered(policy, workload(), config, lane=lane)
    assert laws.difference(simulated, real, ("simulated", "real")) is None
    for name, column in simulated.copies.columns().items():
        assert column.tolist() == real.copies.columns()[name].tolist()
    assert generated(executor, workload()) == expected
    assert real.requests()["num_preemptions"].sum() > 0, "memory was not short"
    copies = real.copies.columns()
    if config.kv_tiers and memory not in ("when-faster", "small-and-slow"):
        assert copies["is_load"].sum() > 0, "nothing was loaded"
    assert copies["is_swap"].any() == ("swap-" in memory)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "case", "changes"),
    [
        (0, "fastserve", {"preemption_mode": "swap"}),
        (2, "ltr", {}),
        (6, "ltr", {}),
        (7, "fastserve", {}),
    ],
)
def test_preempted_request_finds_its_own_blocks_whoever_else_is_given_some(
    seed, case, changes, monkeypatch
):
    """Others take blocks between the plan that gives a request its own back, and its step."""
    work, found_again = workload(seed, num_requests=16), []
    hold_own, policy = SharedBlockPool.hold_own, make(case)

    def watched(pool, request_id, num_own):
        found_again.append(request_id)
        hold_own(pool, request_id, num_own)

    monkeypatch.setattr(SharedBlockPool, "hold_own", watched)
    limits = replace(tiered(**changes), max_num_seqs=3, max_num_batched_tokens=17)
    limits = limits.for_policy(policy.pauses, policy.seats_loaded)
    _, executor = run_tiered(make(case), work, limits)
    assert generated(executor, work) == alone(work)
    assert found_again, "nobody had blocks left behind"


def test_random_sampling_is_the_same_with_tiers():
    work = workload(1)
    log, executor = run_tiered("fcfs", work, MEMORY["through"], temperature=1.0)
    assert log.copies.columns()["is_load"].sum() > 0
    assert generated(executor, work) == alone(work, temperature=1.0)
    assert generated(executor, work) != alone(work)


@pytest.mark.parametrize("write", ["through", "back"])
def test_loaded_block_has_the_bytes_that_it_had_when_it_was_stored(write, monkeypatch):
    stored, loads, compared = {}, [], 0
    config = tiered(replace(HOST, write=write, store_bytes_per_s=1e8))
    runner = tiny_runner(config)
    runner.lanes = [(LazyLane(), LazyLane())]

    def contents(block):
        return torch.stack([pool[block] for pair in runner.kv_pools for pool in pair]).clone()

    store, load, finish = HostTier.store, HostTier.load, KVMemory.finish

    def watched_store(self, names, blocks):
        stored.update({n: contents(b) for n, b in zip(names, blocks.tolist(), strict=True)})
        return store(self, names, blocks)

    def watched_load(self, names, blocks):
        loads.append((list(names), blocks.tolist(), ticket := load(self, names, blocks)))
        return ticket

    def watched_finish(self, number):
        nonlocal compared
        finish(self, number)
        for names, blocks, ticket in [one for one in loads if one[2].is_done()]:
            for name, block in zip(names, blocks, strict=True):
                assert torch.equal(contents(block), stored[name])
                compared += 1
            loads.remove((names, blocks, ticket))

    monkeypatch.setattr(HostTier, "store", watched_store)
    monkeypatch.setattr(HostTier, "load", watched_load)
    monkeypatch.setattr(KVMemory, "finish", watched_finish)
    run_real("fcfs", workload(), config, runner=runner)
    assert compared > 10
    assert not loads


def session(first_id, at_ns, base, num_turns=3):
    """Write down a conversation whose prompts quote all that was said before, and 7 tokens."""
    arrivals, said = [], 0
    for turn in range(num_turns):
        prompt, output = said + 7 + turn, 9
        names = tuple(range(base, base + (prompt + output) // 4))
        request = Request(
            first_id + turn, at_ns, prompt, 1 << 20, session=str(base),
            prefix_hash_ids=names[: prompt // 4],
        )  # fmt: skip
        parents = (first_id + turn - 1,) if turn else ()
        arrivals.append(Arrival(request, output, at_ns, Turn(parents, 2_000, names[prompt // 4 :])))
        said = prompt + output
    return arrivals


@pytest.mark.parametrize("memory", ["cache", "through", "back", "swap-to-tier"])
def test_later_turns_find_what_was_answered_to_earlier_ones(memory):
    config = replace(MEMORY[memory], num_blocks=26)
    work = [a for i in range(5) for a in session(3 * i, 500 * i, 1_000 * i)]
    simulated = laws.run(registry.make("fcfs"), work, config)
    real, executor = run_tiered("fcfs", work, config, lane=LazyLane)
    assert laws.difference(simulated, real, ("simulated", "real")) is None
    rows = real.requests()
    by_id = dict(zip(rows["id"].tolist(), rows["prefix_hit_tokens"].tolist(), strict=True))
    if config.kv_tiers:  # 16 tokens of the first turn: its last one has no KV, so 12 are found
        assert sum(by_id[i] >= 12 for i in by_id if i % 3 == 1) >= 3
    prompts = executor.sequences._prompt_ids
    for turn in work:
        if turn.turn.parents:
            before = turn.turn.parents[0]
            heard = executor.generated(before).tolist()
            prompt = prompts(work[before].request).tolist()
            quoted = prompts(turn.request).tolist()
            full = (len(prompt) + len(heard) - 1) // 4 * 4
            assert quoted[:full] == (prompt + heard)[:full]
    assert generated(executor, work) == alone(work, prompt_ids=prompts)


def test_answers_that_go_by_one_name_and_differ_are_refused():
    def turn(i, name):
        request = Request(i, 0, 8, 1 << 20, session=str(i), prefix_hash_ids=(10 * i, 10 * i + 1))
        return Arrival(request, 9, 0, Turn((), 0, (name, name + 1)))

    with pytest.raises(SchedlabError, match="two different blocks the name 50"):
        run_tiered("fcfs", [turn(0, 50), turn(1, 50)], CACHING)
    run_tiered("fcfs", [turn(0, 50), turn(1, 60)], CACHING)


def test_prompts_of_somebody_else_cannot_go_on_with_answers():
    prompts = NamedTokens(0, TINY.shape.vocab_size, 4)
    with pytest.raises(SchedlabError, match="named_tokens"):
        run_tiered("fcfs", session(0, 0, 0), CACHING, prompt_ids=lambda request: prompts(request))


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["through", "back", "swap-to-tier", "small-and-slow"])
@pytest.mark.parametrize("lane", [None, LazyLane], ids=["thread", "lazy"])
def test_copies_by_the_virtual_clock_take_the_time_that_they_take(memory, lane, expected):
    config, work = MEMORY[memory], workload()
    log, executor = run_tiered("fcfs", work, config, VirtualClock(), lane)
    laws.check(log, work, config, may_wait=True)
    assert generated(executor, work) == expected
    copies = log.copies.columns()
    assert (copies["issued_ns"] <= copies["start_ns"]).all()
    assert (copies["start_ns"] <= copies["done_ns"]).all()
    assert len(copies["id"]) > 0


def test_request_by_the_wall_clock_is_computed_on_when_its_copy_is_done():
    names = tuple(range(10))
    work = [
        laws.arrival(0, 0, 41, 2, prefix_hash_ids=names),
        laws.arrival(1, 20_000_000, 90, 2, prefix_hash_ids=tuple(range(100, 122))),
        laws.arrival(2, 40_000_000, 45, 2, prefix_hash_ids=names),
    ]
    config, clock = tiered(), WallClock()
    executor = TorchExecutor(
        tiny_runner(config), config, clock, estimate_step_ns=Pricing(laws.LinearCost()).estimate_ns
    )
    log = replay(Engine(config, registry.make("fcfs"), executor), work, clock)
    laws.check(log, work, config, may_wait=True)
    copies, requests = log.copies.columns(), log.requests()
    assert copies["is_load"].tolist()[-1] == 1
    assert copies["num_blocks"].tolist()[-1] > 0
    assert 40_000_000 <= copies["issued_ns"][-1] <= copies["done_ns"][-1]
    assert copies["done_ns"][-1] <= requests["first_scheduled_ns"][2]
    assert generated(executor, work) == alone(work)


@pytest.mark.slow
def test_executor_with_tiers_keeps_the_laws_of_executors():
    cases = [
        Case(tuple(workload(seed, num_requests=6)), memory)
        for seed, memory in enumerate([MEMORY["through"], MEMORY["back"], MEMORY["swap-to-tier"]])
    ]

    def executor(case):
        pricing = Pricing(laws.LinearCost())
        return TorchExecutor(
            tiny_runner(case.limits), case.limits, ModelledClock(pricing),
            estimate_step_ns=pricing.estimate_ns,
        )  # fmt: skip

    check_executor(executor, cases=cases)


def test_step_waits_for_copies_of_the_blocks_that_it_overwrites_and_no_others():
    config = tiered(replace(HOST, store_bytes_per_s=1e3), num_blocks=26)  # 1 s for ten blocks
    runner = tiny_runner(config)
    runner.lanes = [(out := LazyLane(), LazyLane())]
    num_stored = []
    work = [
        laws.arrival(0, 0, 41, 2, prefix_hash_ids=tuple(range(10))),
        laws.arrival(1, 100_000, 9, 2, prefix_hash_ids=(100, 101)),
        laws.arrival(2, 200_000, 85, 1, prefix_hash_ids=tuple(range(200, 221))),
    ]
    log, _ = run_real(
        "fcfs", work, config, runner=runner, observer=lambda _: num_stored.append(len(out.times))
    )
    assert num_stored[:4] == [0, 0, 0, 0], "who is given other blocks waits for nobody"
    assert num_stored[4] >= 1, "who is given these waits for their copy"
    assert log.copies.wait_columns()["wait_ns"].tolist()[0] > 900_000_000


def experiment(engine=None, **keys):
    """Write down conversations on the tiny model, on the real backend by the modelled clock."""
    return make_spec(
        {
            "name": "tiers", "model": "schedlab-tiny", "hardware": "cpu", "backend": "real",
            "engine": {
                "dtype": "fp32", "max_num_seqs": 4, "max_num_batched_tokens": 64,
                "max_model_len": 256, "num_gpu_blocks_override": 24, "enable_prefix_caching": True,
                "kv_offload": {
                    "load": "always",
                    "tiers": [{"name": "cpu", "num_blocks": 60, "link": "pcie-4"}],
                },
                **(engine or {}),
            },
            "workload": {
                "session_rate": 20.0,
                "sessions": {
                    "count": 8, "turns": 3, "new_tokens": 30, "output_tokens": 9,
                    "think_s": {"distribution": "fixed", "seconds": 0.3},
                },
            },
            "real": {"clock": "modelled"},
            **keys,
        }
    )  # fmt: skip


def test_experiment_on_the_real_backend_has_the_hits_of_the_simulated_one():
    real = run(experiment()).metrics()
    simulated = run(experiment(backend="sim")).metrics()
    assert real == pytest.approx(simulated, nan_ok=True)
    assert real["tier_hit_tokens"] > 0


@pytest.mark.slow
def test_experiment_by_the_wall_clock_loads_what_was_stored():
    result = run(experiment(real={"clock": "wall"}))
    metrics = result.metrics()
    assert metrics["tier_hit_tokens"] > 0
    assert metrics["mean_load_wait_s"] > 0
    assert len(result.requests["id"]) == 24


@pytest.mark.slow
def test_comparison_finds_that_both_backends_decide_alike_with_tiers():
    spec = experiment(backend="sim", real={"clock": "virtual", "repeats": 1})
    (found,) = compare(spec, lambda *what: None)
    assert found.is_checked
    assert found.modelled_difference is None


def test_tier_larger_than_the_host_is_refused_by_its_key(monkeypatch):
    monkeypatch.setattr("schedlab.gpu_backend.device.free_bytes", lambda device: 2**20)
    tiers = [{"name": "cpu", "gib": 0.5, "link": "pcie-4"}]
    message = r"engine\.kv_offload\.tiers\[0\]: cpu takes 0\.50 GiB .* has 0\.00 GiB free"
    with pytest.raises(SpecError, match=message):
        run(experiment({"kv_offload": {"tiers": tiers}}))
