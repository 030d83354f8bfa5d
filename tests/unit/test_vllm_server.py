"""Policies inside vLLM's scheduler decide as in a simulation, with a stand-in for vLLM.

The stand-in keeps blocks, counts tokens and ends requests as vLLM does; every step takes 1 us.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from schedlab import core
from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from tests import laws
from tests.laws import arrival

pytest.importorskip("torch")
if core.running() != "python":
    pytest.skip("policies run in vLLM with the Python core only", allow_module_level=True)

from tests.unit.test_vllm_loop import AsyncScheduler, ours  # noqa: F401 - a fixture

STEP_NS = 1_000


class Memory:
    """vLLM's KV cache manager without a prefix cache."""

    def __init__(self, num_blocks, block_size):
        self.block_size, self.held = block_size, {}
        self.block_pool = SimpleNamespace(
            num_gpu_blocks=num_blocks + 1,
            get_num_free_blocks=lambda: num_blocks - sum(self.held.values()),
        )
        self.steps = 0

    def new_step_starts(self):
        self.steps += 1

    def get_computed_blocks(self, request):
        return SimpleNamespace(blocks=[[]]), 0

    def get_blocks(self, name):
        return self.held[name]

    def allocate_slots(self, request, num_tokens, num_lookahead_tokens=0, **of_new):
        held = self.held.get(request.request_id, 0)
        end = request.num_computed_tokens + num_tokens + num_lookahead_tokens
        more = max(-(-end // self.block_size) - held, 0)
        if more > self.block_pool.get_num_free_blocks():
            return None
        self.held[request.request_id] = held + more
        return more


class Server:
    """vLLM around its scheduler."""

    def __init__(self, limits, given):
        self.limits, self.given = limits, given
        self.now_ns, self.told, self.times, self.states = 0, [], {}, {}

    def open(self, scheduler):
        """Give a scheduler what vLLM's own gives it."""
        limits = self.limits
        vars(scheduler).update(
            vllm_config=SimpleNamespace(
                additional_config={"schedlab": self.given}, speculative_config=None,
                kv_transfer_config=None, ec_transfer_config=None, lora_config=None,
                model_config=SimpleNamespace(
                    runner_type="generate", is_diffusion=False, supports_multimodal_inputs=False
                ),
            ),
            scheduler_config=SimpleNamespace(
                enable_chunked_prefill=limits.enable_chunked_prefill, async_scheduling=False,
                long_prefill_token_threshold=limits.long_prefill_token_threshold,
                watermark=limits.watermark,
            ),
            cache_config=SimpleNamespace(enable_prefix_caching=False),
            kv_cache_config=SimpleNamespace(kv_cache_groups=["one"]),
            kv_cache_manager=Memory(limits.num_blocks, limits.block_size),
            use_pp=False, dcp_world_size=1, pcp_world_size=1, is_encoder_decoder=False,
            has_mamba_layers=False, use_v2_model_runner=False, current_step=0, _pause_state="no",
            block_size=limits.block_size, max_model_len=limits.max_model_len,
            max_num_running_reqs=limits.max_num_seqs, max_num_active_reqs=limits.max_num_seqs,
            max_num_scheduled_tokens=limits.max_num_batched_tokens,
            scheduler_reserve_full_isl=limits.scheduler_reserve_full_isl,
            requests={}, running=[], waiting=self, num_waiting_for_streaming_input=0,
        )  # fmt: skip
        scheduler.get_request_counts = lambda: (
            len(scheduler.running), len(scheduler.requests) - len(scheduler.running)
        )  # fmt: skip
        scheduler._preempt_request = self.preempt
        self.scheduler = scheduler

    def remove_request(self, request):
        """Take a request out of vLLM's queue."""
        assert request.status in ("waiting", "preempted")

    def preempt(self, request, at_s):
        """Take the memory of a request."""
        del self.scheduler.kv_cache_manager.held[request.request_id]
        request.num_computed_tokens, request.status = 0, "preempted"
        request.num_preemptions += 1

    def step(self, new, resumed, running, tokens, blocks, preempted):
        """Carry a step out."""
        scheduler = self.scheduler
        self.now_ns += STEP_NS
        assert sorted(r.request_id for r in (*new, *resumed, *running)) == sorted(tokens)
        assert all(r.num_computed_tokens == 0 for r in (*new, *resumed))
        assert {r.num_preemptions > 0 for r in new} <= {False}
        assert {r.num_preemptions > 0 for r in resumed} <= {True}
        self.told.append((tokens, preempted, blocks))
        for name, num_tokens in tokens.items():
            request = scheduler.requests[name]
            request.num_computed_tokens += num_tokens
            total = request.num_prompt_tokens + request.num_output_tokens
            if request.num_computed_tokens < total:
                continue
            request.num_output_tokens += 1
            self.times[request].append(self.now_ns)
            if request.num_output_tokens == request.output_tokens:
                scheduler.running.remove(request)
                del scheduler.requests[name], scheduler.kv_cache_manager.held[name]

    def serve(self, work):
        """Run a workload to its end; return vLLM's requests."""
        coming, sent = list(work), []
        while coming or self.scheduler.requests:
            if not self.scheduler.requests:
                self.now_ns = max(self.now_ns, coming[0].request.arrival_ns)
            while coming and coming[0].request.arrival_ns <= self.now_ns:
                one = coming.pop(0)
                request = Sent(one)
                self.times[request] = []
                sent.append(request)
                self.scheduler.add_request(request)
                self.states[request] = self.scheduler.plan_requests.state_of(request.request_id)
            before = len(self.told)
            self.scheduler.schedule()
            assert len(self.told) > before
        return sent


class Sent:
    """A request as vLLM knows it."""

    num_computed_tokens = num_output_tokens = num_preemptions = num_output_placeholders = 0
    status, client_index = "waiting", 0

    def __init__(self, arrival):
        self.seen, self.output_tokens = arrival.request, arrival.output_tokens
        self.request_id = f"r{arrival.request.id}"
        self.num_prompt_tokens = arrival.request.prompt_tokens
        self.max_tokens = arrival.request.max_tokens


LIMITS = {
    "tight": EngineConfig(num_blocks=12, max_model_len=40, block_size=4, max_num_seqs=5,
                          max_num_batched_tokens=16, scheduler_reserve_full_isl=False),
    "roomy": EngineConfig(num_blocks=60, max_model_len=60, block_size=4, max_num_seqs=4,
                          max_num_batched_tokens=24, long_prefill_token_threshold=7),
    "watermark": EngineConfig(num_blocks=20, max_model_len=40, block_size=4, max_num_seqs=6,
                              max_num_batched_tokens=32, watermark=0.3),
}  # fmt: skip
POLICIES = {
    "fcfs": {}, "sjf": {}, "srtf": {}, "priority": {}, "prefill_first": {}, "vtc": {}, "plas": {},
    "sarathi": {"chunk_size": 6}, "tgi": {}, "aged": {}, "trail": {}, "past_future": {}, "edf": {},
    "tensorrt_llm": {}, "gittins": {}, "fastserve": {}, "hygen": {}, "scorpio": {}, "qoserve": {},
    "fair_batching": {}, "slai": {}, "mc_sf": {}, "wait": {}, "orca": {}, "infercept": {},
}  # fmt: skip


def work():
    """Return requests that come in bursts and differ in everything a policy looks at."""
    return [
        arrival(
            i, 4_000 * (i // 5) + 300 * (i % 5), 3 + 7 * i % 23, 1 + 5 * i % 13,
            priority=i % 3, tenant=i % 2, predicted_tokens=float(1 + 5 * i % 13),
        )
        for i in range(30)
    ]  # fmt: skip


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("policy", POLICIES)
def test_policy_in_vllm_decides_as_in_a_simulation(ours, monkeypatch, policy, limits):  # noqa: F811
    server = Server(LIMITS[limits], {"policy": {"name": policy, **POLICIES[policy]}})
    monkeypatch.setattr(AsyncScheduler, "__init__", lambda self: server.open(self), raising=False)
    monkeypatch.setattr(ours.scheduler, "step_output", lambda _, *step: server.step(*step))
    monkeypatch.setattr(ours.scheduler.PolicyScheduler, "has_cost_model", True)
    scheduler = ours.scheduler.PolicyScheduler()
    scheduler._pricing = SimpleNamespace(estimate_ns=lambda shape, num_steps: STEP_NS)
    scheduler.seen, scheduler.now_ns = lambda request: request.seen, lambda: server.now_ns
    served = server.serve(work())
    log = laws.run(
        registry.make(policy, **POLICIES[policy]), work(),
        replace(scheduler.engine_config, arrivals_between_steps=True),
        laws.LinearCost(STEP_NS, 0, 0), prove=False,
    )  # fmt: skip
    rows = log.requests()
    told = ("num_preemptions", "recomputed_tokens", "first_scheduled_ns", "prefix_hit_tokens")
    for i, number in enumerate(rows["id"].tolist()):
        request = served[number]
        state = server.states[request]
        assert server.times[request] == log.token_times(number).tolist()
        assert [getattr(state, name) for name in told] == [rows[name][i] for name in told]
        assert request.num_preemptions == state.num_preemptions
    if limits == "tight" and policy == "fcfs":
        assert rows["num_preemptions"].sum() > 0
