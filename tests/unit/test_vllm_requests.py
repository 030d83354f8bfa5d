"""vLLM's requests stand in for an engine's own, without vLLM."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from schedlab import core
from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core import plan_builder, step_ledger
from schedlab.sim.request import Status

if core.running() != "python":
    pytest.skip("policies run in vLLM with the Python core only", allow_module_level=True)

from schedlab.gpu_backend.vllm.arrivals import bare
from schedlab.gpu_backend.vllm.blocks import VllmHit
from schedlab.gpu_backend.vllm.requests import Requests


def test_requests_inside_vllm_have_all_that_plans_ask_of_a_population():
    source = "".join(Path(module.__file__).read_text() for module in (step_ledger, plan_builder))
    asked = set(re.findall(r"\b_?requests\.([a-z_]+)", source))
    scheduler = SimpleNamespace(
        running=[], kv_cache_manager=None, num_waiting_for_streaming_input=0,
        get_request_counts=lambda: (0, 0),
    )  # fmt: skip
    requests = Requests(
        scheduler, EngineConfig(num_blocks=8, max_model_len=64), registry.make("fcfs"), print
    )
    assert {"running", "kv", "fetching"} <= asked
    assert {name for name in asked if not hasattr(requests, name)} == set()


class Manager:
    """vLLM's KV cache manager, of which only what is asked is there."""

    def __init__(self, free_blocks):
        self.block_pool = SimpleNamespace(get_num_free_blocks=lambda: free_blocks)
        self.asked = []

    def allocate_slots(self, request, num_tokens, **options):
        self.asked.append((request.request_id, num_tokens, options))
        return f"blocks of {request.request_id}"

    def get_computed_blocks(self, request):
        group = [SimpleNamespace(block_id=i, ref_cnt=count) for i, count in enumerate((2, 1, 0))]
        return SimpleNamespace(blocks=[group]), 48

    def get_blocks(self, name):
        held = {"r0": (0, 1, 3), "r1": (0, 4)}[name]
        counts = 2, 1, 0, 1, 1
        group = [SimpleNamespace(block_id=i, ref_cnt=counts[i]) for i in held]
        return SimpleNamespace(blocks=[group])


class Sampled(SimpleNamespace):
    """vLLM's request."""

    def __init__(self, number, computed=0, outputs=0, in_flight=0, max_tokens=5, prompt=20, **more):
        super().__init__(
            request_id=f"r{number}", num_computed_tokens=computed, num_output_tokens=outputs,
            num_output_placeholders=in_flight, max_tokens=max_tokens, num_prompt_tokens=prompt,
            priority=0, sampling_params=SimpleNamespace(extra_args=more or None), block_hashes=[],
        )  # fmt: skip


def inside(*running, free_blocks=10, **limits):
    """Return requests of a scheduler that knows and runs some, and that scheduler."""
    scheduler = SimpleNamespace(
        running=list(running), requests={r.request_id: r for r in running},
        kv_cache_manager=Manager(free_blocks), num_waiting_for_streaming_input=1,
        get_request_counts=lambda: (len(running), 3),
    )  # fmt: skip
    evicted = []
    config = EngineConfig(num_blocks=8, max_model_len=64, **limits)
    requests = Requests(scheduler, config, registry.make("fcfs"), evicted.append)
    for number, request in enumerate(running):
        state = requests.add(request, bare(request, number, 7), 9)
        requests.enqueue(state, 9)
        requests.admit(state, 0, 10)
    return requests, scheduler, evicted


def test_progress_is_copied_with_tokens_in_flight_and_who_has_all_of_them_leaves():
    prefill, decode = Sampled(0, computed=8), Sampled(1, computed=21, outputs=1, in_flight=1)
    last = Sampled(2, computed=24, outputs=4, in_flight=1)
    requests, _, _ = inside(prefill, decode, last)
    (done,) = requests.look(50)
    assert (done.id, done.status) == (2, Status.FINISHED)
    assert requests.look(60) == [], "it is told of once"
    assert list(requests.running) == [0, 1]
    assert list(requests.prefilling) == [0]
    assert requests.decodes.size == 1
    assert [state.id for state in requests.leaving] == [2]
    assert [state.id for state in requests.seated()] == [0, 1, 2]
    assert requests.running[1].num_output_tokens == 2
    assert [requests.state_of(f"r{i}").first_token_ns for i in range(3)] == [-1, 50, 50]
    assert (requests.num_seated, requests.num_known, requests.num_waiting) == (4, 6, 3)


def test_preempted_requests_lose_what_they_computed_each_time():
    one, other = Sampled(0, computed=12), Sampled(1, computed=24, outputs=4, in_flight=1)
    requests, _, _ = inside(one, other)
    (done,) = requests.look(50)
    state = requests.running[0]
    requests.apply((state, done), 60)
    assert (state.status, state.num_preemptions, state.recomputed_tokens) == (Status.WAITING, 1, 12)
    assert (state.num_computed_tokens, list(requests.running)) == (0, [])
    assert done.num_preemptions == 0, "it has finished"
    requests.admit(state, 4, 70)
    requests.look(70)
    requests.apply((state,), 80)
    assert (state.num_preemptions, state.recomputed_tokens) == (2, 12 + 12)
    assert (state.first_scheduled_ns, state.cached_tokens, state.prefix_hit_tokens) == (10, 4, 0)


def test_requests_that_are_gone_are_forgotten_with_their_last_token():
    one, other = Sampled(0, computed=20, outputs=1), Sampled(1)
    requests, scheduler, _ = inside(one, other)
    waiting = requests.add(Sampled(2), bare(Sampled(2), 2, 8), 9)
    assert (waiting.queued_ns, waiting.request.arrival_ns) == (9, 8)
    assert requests.state_of("r2") is waiting
    requests.enqueue(waiting, 9)
    one.num_output_tokens = 3
    del scheduler.requests["r0"]
    gone = requests.forget_the_gone(90)
    assert [(state.id, state.num_output_tokens) for state in gone] == [(0, 3), (2, 0)]
    assert waiting not in requests.waiting
    assert [requests.is_known(state) for state in gone] == [False, False]
    assert requests.id_of(other) == 1
    assert requests.forget_the_gone(95) == []
    requests.add(Sampled(3), bare(Sampled(3), 3, 8), 96)
    scheduler.requests["r3"] = Sampled(3)
    assert requests.forget_the_gone(97) == []
    del scheduler.requests["r1"]
    assert [state.id for state in requests.forget_the_gone(98)] == [1]


def test_blocks_of_vllm_are_asked_for_what_a_plan_grants():
    one = Sampled(0, computed=17)
    requests, scheduler, evicted = inside(one, free_blocks=4)
    requests.look(50)
    kv, state = requests.kv, requests.running[0]
    assert [kv.new_blocks_of(state, n) for n in (1, 15, 16, 31, 32)] == [0, 0, 1, 1, 2]
    assert kv.allocate(state, 5)
    assert scheduler.kv_cache_manager.asked == [("r0", 5, {"num_lookahead_tokens": 0})]
    assert kv.new_blocks == {"r0": "blocks of r0"}
    kv.release(state)
    assert (kv.new_blocks, evicted) == ({}, [one])


@pytest.mark.parametrize(
    ("caches", "who", "most_tokens"),
    [
        # 5 are free. The first two of three cached blocks are held by both, and by r0 alone.
        (True, (), 7 * 16),
        (True, (0,), 8 * 16),  # blocks 1 and 3 come, and block 1 is needed
        (True, (1,), 8 * 16),  # block 4 comes
        (True, (0, 1), 9 * 16),  # all 4 come, and blocks 0 and 1 are needed
        (False, (0, 1), 8 * 16),  # 20 and 10 tokens are counted, whatever is held
    ],
)
def test_room_that_victims_make_is_of_blocks_that_nobody_else_holds(caches, who, most_tokens):
    one, other = Sampled(0, computed=20), Sampled(1, computed=10)
    requests, _, _ = inside(one, other, free_blocks=5, enable_prefix_caching=caches)
    requests.look(50)
    victims = [requests.running[i] for i in who]
    for tokens, fits in ((most_tokens, True), (most_tokens + 1, False)):
        sent = Sampled(9, prompt=tokens)
        state = requests.add(sent, bare(sent, 9, tokens), 9)
        assert requests.kv.fits_without(victims, state, 0) is fits
        assert not requests.kv.fits_without(victims, state, 1)


@pytest.mark.parametrize(("keep", "fits"), [(2, True), (3, False)])
def test_newcomer_takes_blocks_beyond_those_that_others_use_and_the_watermark(keep, fits):
    requests, scheduler, _ = inside(free_blocks=5)
    state = requests.add(Sampled(0), bare(Sampled(0), 0, 7), 9)
    kv = requests.kv
    hit = kv.lookup(state)
    assert hit[:2] == (48, 2)
    # 80 tokens are five blocks, of which others use two.
    assert kv.allocate(state, 32, keep, VllmHit(48, 2, hit.blocks)) is fits
    (asked,) = scheduler.kv_cache_manager.asked or [None]
    assert (asked is not None) is fits
    if fits:
        assert asked[2] == {
            "num_new_computed_tokens": 48, "new_computed_blocks": hit.blocks,
            "num_lookahead_tokens": 0, "has_scheduled_reqs": False,
        }  # fmt: skip
