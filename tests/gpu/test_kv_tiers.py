"""Prefix cache and tiers of the real engine: the simulator's decisions, and the same tokens."""

import errno
import gc
import os
import random
from dataclasses import replace
from pathlib import Path

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
from tests.gpu.backend import (  # noqa: E402
    CONFIG,
    TINY,
    files_in,
    generated,
    run_real,
    tiny_runner,
)
from tests.gpu.lanes import EagerLane, LazyLane  # noqa: E402
from tests.policy_cases import make  # noqa: E402

ROOMY = replace(CONFIG, num_blocks=400)
CACHING = replace(CONFIG, num_blocks=30, max_model_len=104, enable_prefix_caching=True)
HOST = KVTier("cpu", 40, 1e9, 1e9, load_latency_ns=300, store_latency_ns=300)
SMALL = replace(HOST, num_blocks=7)
DISK = KVTier("disk", 60, 5e8, 3e8, load_latency_ns=400, store_latency_ns=500)


def tiered(host=HOST, *below, **changes):
    changes = {"kv_load": "always", "kv_block_bytes": 100, **changes}
    return replace(CACHING, kv_tiers=(host, *below), swap_space_blocks=host.num_blocks, **changes)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def back(tier):
    return replace(tier, write="back")


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
TINY_HOST = replace(HOST, num_blocks=5)
ON_DISK = {
    "disk": tiered(SMALL, DISK),
    "disk-back": tiered(SMALL, back(DISK)),
    "all-back": tiered(back(TINY_HOST), back(DISK)),
    "back-over-through": tiered(back(TINY_HOST), DISK),
    "disk-small-and-slow": tiered(SMALL, replace(back(DISK), num_blocks=9, store_bytes_per_s=2e7)),
    "two-disks": tiered(SMALL, replace(back(DISK), num_blocks=6), back(replace(DISK, name="slow"))),
    "two-disks-through": tiered(SMALL, replace(DISK, num_blocks=6), replace(DISK, name="slow")),
    "swap-over-disk": tiered(replace(HOST, num_blocks=8), back(DISK), preemption_mode="swap"),
}
MEMORY |= ON_DISK


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
    executor.wait_for_copies()
    assert real.requests()["num_preemptions"].sum() > 0, "memory was not short"
    copies = real.copies.columns()
    if config.kv_tiers and memory not in ("when-faster", "small-and-slow"):
        assert copies["is_load"].sum() > 0, "nothing was loaded"
    assert copies["is_swap"].any() == ("swap-" in memory)
    if memory in ON_DISK and memory != "disk-small-and-slow":
        loaded_from = set(copies["tier"][copies["is_load"] == 1].tolist())
        assert loaded_from - {0}, "a disk gave nothing back"
        assert case == "fcfs" or len(config.kv_tiers) - 1 in loaded_from


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "case", "changes"),
    [
        (14, "fastserve", {"preemption_mode": "swap"}),
        (2, "ltr", {}),
        (12, "ltr", {}),
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


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fcfs", "fastserve"])
@pytest.mark.parametrize("memory", ON_DISK)
def test_disk_that_copies_late_below_a_host_that_copies_at_once_changes_no_token(
    memory, case, expected
):
    """What leaves the host for the disk is about to be overwritten there."""
    policy = make(case)
    config = MEMORY[memory].for_policy(policy.pauses, policy.seats_loaded)
    lanes = iter([EagerLane] * 2 + [LazyLane] * 4)
    _, executor = run_tiered(make(case), workload(), config, lane=lambda: next(lanes)())
    assert generated(executor, workload()) == expected


@pytest.mark.parametrize("memory", ["through", slow("disk-back"), slow("two-disks-through")])
def test_random_sampling_is_the_same_with_tiers(memory):
    work = workload(1)
    log, executor = run_tiered("fcfs", work, MEMORY[memory], temperature=1.0)
    copies = log.copies.columns()
    assert (copies["tier"][copies["is_load"] == 1] > 0).any() == (memory in ON_DISK)
    assert generated(executor, work) == alone(work, temperature=1.0)
    assert generated(executor, work) != alone(work)


@pytest.mark.parametrize(
    ("memory", "tier"),
    [
        ("through", 0),
        ("back", 0),
        slow("disk", 1),
        slow("disk-back", 1),
        slow("all-back", 1),
        slow("two-disks", 2),
    ],
)
def test_loaded_block_has_the_bytes_that_it_had_when_it_was_stored(memory, tier, monkeypatch):
    stored, loads, compared = {}, [], []
    tiers = [replace(tier, store_bytes_per_s=1e8) for tier in MEMORY[memory].kv_tiers]
    config = replace(MEMORY[memory], kv_tiers=tuple(tiers))
    runner = tiny_runner(config)
    runner.lanes = [(LazyLane(), LazyLane()) for _ in tiers]

    def contents(block):
        return torch.stack([pool[block] for pair in runner.kv_pools for pool in pair]).clone()

    store, copy, finish = HostTier.store, KVMemory.copy, KVMemory.finish
    set_aside = SharedBlockPool.set_aside

    def watched_store(self, names, blocks):
        for name, block in zip(names, blocks.tolist(), strict=True):
            stored.setdefault(name, []).append(contents(block))  # computed anew, it is rounded anew
        return store(self, names, blocks)

    def watched_set_aside(self, request_id, count):
        loads.append(blocks := set_aside(self, request_id, count))
        return blocks

    def watched_copy(self, number, order, now_ns):
        copy(self, number, order, now_ns)
        if order.is_load:
            to_come[number] = order.place, order.names, loads.pop().tolist()

    def watched_finish(self, number):
        finish(self, number)
        place, names, blocks = to_come.pop(number, (0, (), ()))
        for name, block in zip(names, blocks, strict=True):
            assert any(torch.equal(contents(block), one) for one in stored[name])
            compared.append(place)

    to_come = {}
    monkeypatch.setattr(HostTier, "store", watched_store)
    monkeypatch.setattr(SharedBlockPool, "set_aside", watched_set_aside)
    monkeypatch.setattr(KVMemory, "copy", watched_copy)
    monkeypatch.setattr(KVMemory, "finish", watched_finish)
    work = workload(3, num_requests=24) if tier else workload()
    run_real("fcfs", work, config, runner=runner)
    assert compared.count(tier) > 10
    assert not to_come


def test_block_that_a_disk_does_not_hold_though_it_is_counted_is_found_out():
    engines = []
    _, executor = run_tiered("fcfs", workload(), ON_DISK["disk"], observer=engines.append)
    places = executor.kv_bytes._files[0].places
    executor.check(engines[-1])
    places.evict([next(iter(places.names))])
    with pytest.raises(AssertionError, match="disk holds other blocks than are counted"):
        executor.check(engines[-1])


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


def using_tools(work):
    """Let two turns of three end in a call of a tool."""
    return [
        replace(a, turn=a.turn._replace(tool="search" if a.request.id % 3 else None)) for a in work
    ]


@pytest.mark.parametrize("seats", [2, slow(3)])
@pytest.mark.parametrize(
    "memory", ["cache", slow("cache-and-swap"), slow("through"), slow("back"), slow("swap-to-tier")]
)
@pytest.mark.parametrize("policy", ["continuum", "infercept"])
def test_memory_kept_for_a_session_takes_no_seat_and_is_found_again(policy, memory, seats):
    options = {"ttl": "preview", "fixed_ttl_s": 3e-5} if policy == "continuum" else {}
    config = replace(MEMORY[memory], num_blocks=60, max_num_seqs=seats)
    work = using_tools([a for i in range(4) for a in session(3 * i, 500 * i, 1_000 * i)])
    simulated = laws.run(registry.make(policy, **options), work, config)
    kept = []
    real, executor = run_tiered(
        registry.make(policy, **options), work, config, lane=LazyLane,
        observer=lambda engine: kept.append(len(engine.requests.kept)),
    )  # fmt: skip
    assert max(kept) > 0
    assert laws.difference(simulated, real, ("simulated", "real")) is None
    assert laws.signature(simulated) == laws.signature(real)
    assert real.requests()["prefix_hit_tokens"].sum() > 50
    assert generated(executor, work) == alone(work, prompt_ids=executor.sequences._prompt_ids)


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
@pytest.mark.parametrize("memory", ["through", "back", "swap-to-tier", "small-and-slow", *ON_DISK])
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


def on_disk(folder=None, **more):
    """Write down the same with a host that holds less than a conversation, and a disk below."""
    disk = {"name": "disk", "num_blocks": 200, "link": "nvme-4", "write": "back", **more}
    if folder is not None:
        disk["path"] = str(folder)
    tiers = [{"name": "cpu", "num_blocks": 10, "link": "pcie-4"}, disk]
    return {"kv_offload": {"load": "always", "tiers": tiers}}


@pytest.mark.slow
@pytest.mark.parametrize("write", ["through", "back"])
def test_experiment_with_a_disk_has_the_hits_of_the_simulated_one_and_leaves_no_file(
    write, tmp_path
):
    real = run(experiment(on_disk(tmp_path, write=write))).metrics()
    simulated = run(experiment(on_disk(tmp_path, write=write), backend="sim")).metrics()
    assert real == pytest.approx(simulated, nan_ok=True)
    assert real["loaded_bytes(tier=disk)"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_experiment_by_real_time_loads_from_the_disk_what_was_written_there(clock, tmp_path):
    metrics = run(experiment(on_disk(tmp_path), real={"clock": clock})).metrics()
    assert metrics["stored_bytes(tier=disk)"] > 0
    assert metrics["loaded_bytes(tier=disk)"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("clock", ["modelled", "virtual", "wall"])
def test_disk_that_cannot_be_written_any_more_ends_the_run_with_its_name(
    clock, tmp_path, monkeypatch
):
    pwrite, num_left = os.pwrite, 5

    def full(file, data, at):
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(file, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    message = r"tier disk of engine\.kv_offload: block \d+ cannot be written: No space left on dev"
    with pytest.raises(SchedlabError, match=message):
        run(experiment(on_disk(tmp_path), real={"clock": clock}))
    assert num_left < 0
    assert list(tmp_path.iterdir()) == []


def test_disk_that_fails_when_all_is_answered_ends_the_run_too(tmp_path, monkeypatch):
    """By its link nothing is ever there, so that nobody waits for it."""
    disk = on_disk(tmp_path, write="through", store_gb_per_s=1e-9)
    disk["kv_offload"]["tiers"][0]["num_blocks"] = 300
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(SchedlabError, match=r"tier disk of engine\.kv_offload: block 0 cannot"):
        run(experiment(disk))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="this system has no /proc")
def test_run_that_failed_gives_the_room_of_its_file_back(tmp_path, monkeypatch):
    opened = []

    def full(*_):
        opened.extend(files_in(tmp_path))
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SchedlabError, match="Input/output error"):
        run(experiment(on_disk(tmp_path)))
    gc.collect()
    assert len(opened) > 0
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"folder": "/no/such/folder"}, r"tiers\[1\]\.path: there is no folder /no/such/folder"),
        ({"num_blocks": 2**39}, r"engine\.kv_offload\.tiers\[1\]: \d+\.\d\d GiB are to lie in /"),
    ],
)
def test_disk_that_does_not_do_is_refused_by_its_key(more, message):
    with pytest.raises(SpecError, match=message):
        run(experiment(on_disk(**more)))


def test_tier_larger_than_the_host_is_refused_by_its_key(monkeypatch):
    monkeypatch.setattr("schedlab.gpu_backend.device.free_bytes", lambda device: 2**20)
    tiers = [{"name": "cpu", "gib": 0.5, "link": "pcie-4"}]
    message = r"engine\.kv_offload\.tiers\[0\]: cpu takes 0\.50 GiB .* has 0\.00 GiB free"
    with pytest.raises(SpecError, match=message):
        run(experiment({"kv_offload": {"tiers": tiers}}))
