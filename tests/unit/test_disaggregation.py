from dataclasses import replace
from math import ceil
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlab import core
from schedlab.experiments.running.run import run as run_experiment
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.specification.pools import engine_pools
from schedlab.policies import registry
from schedlab.policies.routers import registry as routers
from schedlab.sim.config import EngineConfig, KVTier
from schedlab.sim.core.audit import check_conservation
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.clock import Clock
from schedlab.sim.drive.cluster import simulate_cluster
from schedlab.sim.drive.disaggregation import Disaggregation
from schedlab.sim.drive.engine_state import LiveState, ReportedState, note_sent
from schedlab.sim.drive.handover import has_room
from schedlab.sim.drive.links import Interconnect
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.link import LINKS, Link
from schedlab.sim.record.columns import REJECTED
from schedlab.sim.request import RequestState, Turn
from tests import laws
from tests.laws import LinearCost, arrival
from tests.property.test_combinations import named
from tests.workloads import share, workloads

CONFIG = EngineConfig(num_blocks=200, max_model_len=100, block_size=4, max_num_seqs=4)
BYTES_PER_TOKEN = 1000
LINK = Link(bytes_per_s=1e12, latency_s=50e-9, source="a test")  # a token a nanosecond


def run(
    workload, roles=("prefill", "decode"), configs=None, policies=None, link=LINK, fast=True,
    max_concurrency=None, decode_router="least_outstanding_requests", devices=None, staleness_ns=0,
    num_layers=1, cost=LinearCost, **plan,
):  # fmt: skip
    configs = configs or [CONFIG] * len(roles)
    engines = [
        Engine(
            config if fast else laws.slow(config),
            registry.make(policy) if isinstance(policy, str) else policy,
            SimExecutor(Pricing(cost(1000, 10, 0))),
            check_conservation,
        )
        for config, policy in zip(configs, policies or ["fcfs"] * len(roles), strict=True)
    ]
    goes_on = routers.make(decode_router) if isinstance(decode_router, str) else decode_router
    plan = Disaggregation(roles, goes_on, **plan)
    joins = Interconnect(link, BYTES_PER_TOKEN, devices or [1] * len(roles), num_layers)
    router = routers.make("jsq")
    log = simulate_cluster(
        engines, router, workload, max_concurrency, None, staleness_ns, plan, joins
    )
    for engine in engines:
        assert engine.kv.free_blocks == engine.kv.num_blocks, "the run ended with blocks held"
        assert not engine.requests.handed_over
        assert not engine.requests.fetching
    return log


LEARNT = {  # what a policy knows of the lengths of answers
    "qoserve": lambda policy: [one._n for one in policy._lengths.values()],
    "past_future": lambda policy: list(policy._past),
    "gittins": lambda policy: [list(past._ended) for past in policy._groups.values()],
    "nested_wait": lambda policy: policy._num_came,
}


@pytest.mark.parametrize("name", LEARNT)
def test_lengths_are_learnt_where_answers_end_and_not_where_prompts_are_computed(name):
    learnt, knobs = LEARNT[name], {"window": 8} if name == "past_future" else {}
    fresh, prompts, answers, alone = (registry.make(name, **knobs) for _ in range(4))
    work = [arrival(i, i * 3_000, 10, n) for i, n in enumerate((30, 12, 30, 20))]
    run(work, policies=[prompts, answers])
    for each in (alone, fresh):
        run(work[: 0 if each is fresh else None], ("mixed",), policies=[each])
    assert sorted(map(str, learnt(answers))) == sorted(map(str, learnt(alone)))
    assert not learnt(fresh) or learnt(prompts) != learnt(answers)
    run([arrival(0, 0, 10, 1)], policies=[prompts, answers])  # it ends with its first token
    assert learnt(prompts) != learnt(fresh)


def test_times_of_a_lone_request_add_up():
    log = run([arrival(0, 0, 20, 3)])
    row = {name: column[0] for name, column in log.requests().items()}
    # Prompt: 1000 + 20 * 10 ns. Its KV: 50 ns, then 20 tokens of 1000 bytes at 1000 a ns.
    assert row["first_token_ns"] == 1200
    assert (row["transfer_start_ns"], row["transfer_end_ns"]) == (1200, 1270)
    # Then two decodes of 1010 ns.
    assert log.token_times(0).tolist() == [1200, 2280, 3290]
    assert (row["engine"], row["prefill_engine"], row["transferred_bytes"]) == (1, 0, 20_000)
    assert (row["generated_tokens"], row["output_tokens"], row["status"]) == (3, 3, 0)


@pytest.mark.parametrize(
    ("num_layers", "came_ns"),
    # All of it after the prompt, 1200 ns: 20 ns on the link. The last of four layers: 5 ns.
    [(1, 1200 + 700 + 50 + 20), (4, 1200 + 700 + 50 + 5)],
)
def test_overhead_of_a_handover_is_added_to_what_the_link_takes(num_layers, came_ns):
    log = run([arrival(0, 0, 20, 3)], num_layers=num_layers, overhead_ns=700)
    assert log.requests()["transfer_end_ns"].tolist() == [came_ns]


def test_overhead_of_a_handover_leaves_the_link_to_others():
    # The first one's bytes leave when the other prompt is done, and both share the link then.
    work = [arrival(0, 0, 20, 2), arrival(1, 100, 40, 2)]
    roles = ("prefill", "decode", "decode")
    took = [
        log["transfer_end_ns"] - log["transfer_start_ns"]
        for log in (run(work, roles, overhead_ns=ns).requests() for ns in (0, 5_000))
    ]
    assert (took[1] - took[0]).tolist() == [5_000, 5_000]


def test_prompt_that_lacks_memory_is_preempted_until_what_is_handed_over_has_gone():
    # Of 12 blocks the first one holds 8 for a millisecond; the other needs as many, and loses its
    # own every third step of a microsecond.
    config = replace(CONFIG, num_blocks=12, max_model_len=48, max_num_batched_tokens=8)
    work = [arrival(0, 0, 32, 3), arrival(1, 1, 32, 3)]
    requests = run(work, configs=[config, CONFIG], overhead_ns=1_000_000).requests()
    assert requests["num_preemptions"][1] > 200
    assert requests["first_token_ns"][1] > requests["transfer_end_ns"][0] > 1_000_000


@pytest.mark.parametrize(
    ("bytes_per_s", "budget", "came_ns"),
    [
        # The prompt takes 1200 ns, a layer 300; its KV 20 ns, that of a layer 5.
        pytest.param(1e12, 100, 1200 + 50 + 5, id="what remains is the last layer"),
        # Its KV takes 20,000 ns, and can begin to leave after the first layer.
        pytest.param(1e9, 100, 300 + 50 + 20_000, id="the link is slower than the layers"),
        # Chunks of 8, 8 and 4 tokens: 1080 ns twice, then 1040, of which a layer is 260.
        pytest.param(1e12, 8, 3200 + 50 + 1, id="what remains is of the last chunk"),
        pytest.param(1e9, 8, 2160 + 260 + 50 + 20_000, id="earlier chunks wait for the last"),
    ],
)
def test_kv_sent_layer_by_layer_comes_when_what_remains_after_the_last_has(
    bytes_per_s, budget, came_ns
):
    config = replace(CONFIG, max_num_batched_tokens=budget)
    link = replace(LINK, bytes_per_s=bytes_per_s)
    requests = run([arrival(0, 0, 20, 3)], configs=[config] * 2, link=link, num_layers=4).requests()
    assert requests["transfer_end_ns"].tolist() == [came_ns]
    assert requests["last_token_ns"].tolist() == [came_ns + 2 * 1010]


def test_answer_of_one_token_stays_where_its_prompt_was_computed():
    requests = run([arrival(0, 0, 20, 1), arrival(1, 0, 8, 5, max_tokens=1), arrival(2, 0, 8, 2)])
    requests = requests.requests()
    assert requests["engine"].tolist() == [0, 0, 1]
    assert requests["prefill_engine"].tolist() == [-1, -1, 0]
    assert requests["output_tokens"].tolist() == [1, 5, 2]


def test_first_token_of_the_engine_that_goes_on_comes_a_step_after_its_kv():
    log = run([arrival(0, 0, 20, 3)], first_token="decode")
    row = {name: column[0] for name, column in log.requests().items()}
    # Prompt: 1000 + 20 * 10 ns. Its KV: 50 ns, then 20 tokens of 1000 bytes at 1000 a ns.
    assert row["prefill_end_ns"] == 1200
    assert (row["transfer_start_ns"], row["transfer_end_ns"]) == (1200, 1270)
    # Then the last token of the prompt again, and two decodes, of 1010 ns each.
    assert log.token_times(0).tolist() == [2280, 3290, 4300]
    assert (row["first_token_ns"], row["last_token_ns"]) == (2280, 4300)
    assert (row["engine"], row["prefill_engine"], row["transferred_bytes"]) == (1, 0, 20_000)
    assert (row["generated_tokens"], row["output_tokens"], row["status"]) == (3, 3, 0)
    of_prompts, of_answers = (one.steps() for one in log.of_engines)
    assert of_prompts["prefill_tokens"].tolist() == [20]
    assert of_answers["prefill_tokens"].tolist() == [1, 0, 0]
    assert log.token_counts()["count"].sum() == 3, "nobody reads the token of the first engine"


class Launched(LinearCost):
    """Steps with prompts take a microsecond to launch."""

    def step_ns(self, shape, k=1):
        return [ns + 1000 * bool(shape.chunks) for ns in super().step_ns(shape, k)]


def test_last_prompt_token_that_is_computed_again_takes_the_time_of_a_decode():
    # The second comes while the first decodes, in steps of 1010 ns: its token makes one of 1020.
    work = [arrival(0, 0, 20, 6), arrival(1, 2_500, 8, 3)]
    log = run(work, first_token="decode", cost=Launched)
    first = log.token_times(0)
    # 2000 + 20 * 10 ns for the prompt, 50 + 20 for its KV.
    assert first[0] == 2200 + 70 + 1010
    assert np.diff(first).tolist() == [1010, 1010, 1020, 1020, 1020]
    # Its KV is there at 2500 + 2080 + 58 ns, in the second of these steps.
    assert log.token_times(1).tolist() == first[3:].tolist()


def test_first_token_that_goes_with_the_kv_is_told_when_that_is_there():
    log = run([arrival(0, 0, 20, 3), arrival(1, 0, 20, 1)], first_token="transfer")
    requests = log.requests()
    assert requests["prefill_end_ns"].tolist() == [1400, -1]
    assert requests["transfer_end_ns"].tolist() == [1470, -1]
    # Two decodes of 1010 ns follow; an answer of one token is told with its prompt.
    assert [log.token_times(number).tolist() for number in (0, 1)] == [[1470, 2480, 3490], [1400]]
    assert requests["first_token_ns"].tolist() == [1470, 1400]
    assert requests["generated_tokens"].tolist() == [3, 1]
    counts = log.token_counts()
    assert counts["time_ns"].tolist() == [1400, 1470, 2480, 3490]
    assert counts["count"].tolist() == [1, 1, 1, 1]


def test_answer_of_one_token_goes_on_where_the_first_token_comes_from():
    work = [arrival(0, 0, 20, 1), arrival(1, 0, 8, 5, max_tokens=1), arrival(2, 0, 1, 1)]
    requests = run(work, first_token="decode").requests()
    assert requests["engine"].tolist() == [1, 1, 1]
    assert requests["generated_tokens"].tolist() == [1, 1, 1]
    assert (requests["first_token_ns"] > requests["transfer_end_ns"]).all()


@pytest.mark.parametrize("first_token", ["prefill", "transfer", "decode"])
def test_kv_whose_last_token_is_computed_again_needs_no_block_for_the_next(first_token):
    # 18 blocks hold two prompts of 36 tokens, and no token after them.
    small = replace(CONFIG, num_blocks=18, max_model_len=60, watermark=0.0)
    work = [arrival(0, 0, 36, 2), arrival(1, 0, 36, 2)]
    requests = run(work, configs=[CONFIG, small], first_token=first_token).requests()
    first, second = requests["transfer_start_ns"].tolist()
    assert (second == first) is (first_token == "decode")


@pytest.mark.parametrize("first_token", ["transfer", "decode"])
def test_requests_whose_token_is_told_elsewhere_are_not_kept(first_token):
    with pytest.raises(ValueError, match=r"keeps_when_full: .* none is told"):
        Disaggregation(("prefill", "decode"), None, keeps_when_full=True, first_token=first_token)


def test_transfers_share_the_link_of_their_sender():
    # Both prompts end with the same step; each gets half of what leaves the engine.
    log = run([arrival(0, 0, 20, 2), arrival(1, 0, 40, 2)], ("prefill", "decode", "decode"))
    requests = log.requests()
    assert requests["engine"].tolist() == [1, 2]
    took = requests["transfer_end_ns"] - requests["transfer_start_ns"]
    # 20 tokens at half speed take 40 ns, then the other has 20 left, alone.
    assert took.tolist() == [50 + 40, 50 + 40 + 20]


def test_transfer_uses_as_many_devices_as_the_smaller_engine_has():
    log = run([arrival(0, 0, 40, 2)], devices=[4, 2])
    requests = log.requests()
    assert requests["transfer_end_ns"] - requests["transfer_start_ns"] == 50 + 20


def test_kv_is_held_where_the_prompt_was_computed_until_it_is_delivered():
    # Memory for one prompt of 40 tokens: the second waits until the KV of the first is gone.
    small = replace(CONFIG, num_blocks=15, max_model_len=60)
    slow_link = replace(LINK, latency_s=5e-6)
    log = run([arrival(0, 0, 40, 3), arrival(1, 0, 40, 3)], configs=[small, CONFIG], link=slow_link)
    requests = log.requests()
    assert requests["transfer_end_ns"][0] == 1400 + 5000 + 40
    assert requests["first_scheduled_ns"].tolist() == [0, 6440]


def test_request_preempted_before_it_goes_on_is_told_of_as_preempted():
    # Two prompts of 10 blocks grow in the memory for 15, in steps of 16 tokens.
    small = replace(CONFIG, num_blocks=15, max_model_len=60, max_num_batched_tokens=16)
    log = run([arrival(0, 0, 40, 3), arrival(1, 0, 40, 3)], configs=[small, CONFIG])
    requests = log.requests()
    assert requests["num_preemptions"].tolist() == [0, 1]
    assert requests["recomputed_tokens"][1] > 0
    assert requests["engine"].tolist() == [1, 1]


def test_kv_waits_for_room_where_the_answer_is_computed():
    small = replace(CONFIG, num_blocks=15, max_model_len=60)
    log = run([arrival(0, 0, 40, 5), arrival(1, 0, 40, 5)], configs=[CONFIG, small])
    requests = log.requests()
    assert requests["first_token_ns"].tolist() == [1800, 1800]
    assert requests["transfer_start_ns"].tolist() == [1800, requests["finish_ns"][0]]


def test_request_that_nobody_has_room_for_goes_on_where_its_prompt_was_computed():
    # 15 blocks there: a prompt of ten and the next token, not two.
    small = replace(CONFIG, num_blocks=15, max_model_len=60)
    log = run(
        [arrival(0, 0, 40, 3), arrival(1, 0, 40, 3)], configs=[CONFIG, small], keeps_when_full=True
    )
    requests = log.requests()
    assert requests["engine"].tolist() == [1, 0]
    assert requests["prefill_engine"].tolist() == [0, -1]
    # It waits for nothing: steps of one token follow the prompts, 1000 + 2 * 40 * 10 ns, at once.
    assert log.token_times(1).tolist() == [1800, 2810, 3820]
    # The other's KV takes 50 + 40 ns to come.
    assert log.token_times(0).tolist() == [1800, 2900, 3910]


def test_kept_request_has_had_the_service_of_both_its_seats(monkeypatch):
    served = {}

    class Watching(registry.policy_class("fcfs")):
        def on_finish(self, state, now_ns):
            served.setdefault(state.id, []).append(state.served_ns)

    monkeypatch.setattr(registry, "make", lambda name: Watching())
    small = replace(CONFIG, num_blocks=15, max_model_len=60)
    work = [arrival(0, 0, 40, 3), arrival(1, 0, 40, 3)]
    run(work, configs=[CONFIG, small], keeps_when_full=True)
    assert served[1] == [1800, 3820], "as it goes on, and at its end"


def test_kept_request_decodes_beside_the_next_prompt():
    small = replace(CONFIG, num_blocks=11, max_model_len=44)
    log = run(
        [arrival(0, 0, 40, 4), arrival(1, 0, 40, 4), arrival(2, 2000, 20, 1)],
        configs=[CONFIG, small], keeps_when_full=True,
    )  # fmt: skip
    # The third prompt is computed with a token of the second answer: 1000 + 20 * 10 + 10 ns.
    assert log.token_times(1).tolist() == [1800, 2810, 4020, 5030]
    assert log.requests()["first_token_ns"][2] == 4020


@pytest.mark.parametrize("num_layers", [1, 4])
def test_request_kept_and_preempted_is_recomputed_where_it_is(num_layers):
    small = replace(CONFIG, num_blocks=12, max_model_len=48)
    tight = replace(CONFIG, num_blocks=21, max_model_len=60)
    work = [arrival(0, 0, 28, 20), arrival(1, 0, 28, 20), arrival(2, 0, 28, 20)]
    log = run(work, configs=[tight, small], keeps_when_full=True, num_layers=num_layers)
    requests = log.requests()
    assert requests["engine"].tolist() == [1, 0, 0]
    assert requests["num_preemptions"].tolist() == [0, 0, 2]
    assert requests["generated_tokens"].tolist() == [20, 20, 20]


def test_request_too_long_for_the_engine_of_answers_is_refused_at_once():
    spec = make_spec(
        {
            "workload": {"trace": "azure-conv", "num_requests": 30, "too_long": "reject"},
            "cluster": {
                "pools": {
                    "p": {"role": "prefill"},
                    "d": {"role": "decode", "engine": {"max_model_len": 1000}},
                }
            },
        }
    )
    requests = run_experiment(spec).requests
    refused = requests["status"] == REJECTED
    assert 0 < refused.sum() < 30
    assert (requests["first_scheduled_ns"][refused] == -1).all()
    total = requests["prompt_tokens"] + requests["generated_tokens"]
    assert total[~refused].max() <= 1000


@st.composite
def configs(draw):
    return EngineConfig(
        num_blocks=25 + draw(st.sampled_from((0, 1, 10, 200))),
        max_model_len=100,
        block_size=4,
        max_num_seqs=draw(st.sampled_from((1, 2, 8))),
        max_num_batched_tokens=draw(st.sampled_from((8, 30, 200))),
        watermark=draw(st.sampled_from((0.0, 0.05))),
        enable_prefix_caching=draw(st.booleans()),
    )


@st.composite
def cases(draw):
    roles = draw(
        st.sampled_from(
            [("prefill", "decode"), ("prefill", "prefill", "decode"),
             ("prefill", "decode", "decode"), ("prefill", "mixed", "decode")]
        )
    )  # fmt: skip
    return {
        "workload": list(named(draw, draw(workloads()), CONFIG.block_size)),
        "roles": roles,
        "configs": [draw(configs()) for _ in roles],
        "policies": [draw(st.sampled_from(("fcfs", "sjf", "srtf", "vtc"))) for _ in roles],
        "link": Link(draw(st.sampled_from((1e10, 1e12))), draw(st.sampled_from((0.0, 3e-6))), ""),
        "decode_router": draw(st.sampled_from(("jsq", "least_kv", "random"))),
        "max_concurrency": draw(st.sampled_from((None, None, 1, 4))),
        "staleness_ns": draw(st.sampled_from((0, 0, 2_000))),
        "num_layers": draw(st.sampled_from((1, 1, 4))),
        **draw(
            st.sampled_from(
                (
                    {},
                    {"keeps_when_full": True},
                    {"first_token": "transfer"},
                    {"first_token": "decode"},
                )
            )
        ),
        "local_uncached_tokens": draw(st.sampled_from((None, None, 5, 20))),
        "local_queue_requests": draw(st.sampled_from((None, None, 1))),
        "overhead_ns": draw(st.sampled_from((0, 0, 2_500))),
    }


@given(cases())
@settings(max_examples=share(0.5))
def test_nobody_is_lost_or_doubled_and_no_answer_goes_on_before_its_kv_is_there(case):
    log = run(**case)
    requests = log.requests()
    assert requests["id"].tolist() == [a.request.id for a in case["workload"]]
    for i, a in enumerate(case["workload"]):
        times = log.token_times(a.request.id)
        assert len(times) == requests["generated_tokens"][i] == a.output_tokens
        assert (np.diff(times) > 0).all()
        assert times[0] == requests["first_token_ns"][i]
        assert times[-1] == requests["last_token_ns"][i]
        came_ns = requests.get("transfer_end_ns", np.full(len(times) + i + 1, -1))[i]
        told_by = case.get("first_token", "prefill")
        if came_ns >= 0 and told_by != "prefill":
            assert times[0] == came_ns if told_by == "transfer" else times[0] > came_ns
            assert requests["prefill_end_ns"][i] <= came_ns
        elif came_ns >= 0:
            assert times[0] <= came_ns  # nothing of it had to come
            assert case["num_layers"] > 1 or times[0] <= requests["transfer_start_ns"][i]
            assert len(times) == 1 or times[1] > came_ns
        if came_ns >= 0:
            sent_bytes = requests["transferred_bytes"][i]
            assert sent_bytes <= a.request.prompt_tokens * BYTES_PER_TOKEN
            if not case["configs"][requests["engine"][i]].enable_prefix_caching:
                assert sent_bytes == a.request.prompt_tokens * BYTES_PER_TOKEN
            least_ns = case["link"].latency_s * 1e9 + case["overhead_ns"]
            least_ns += sent_bytes / case["link"].bytes_per_s * 1e9
            assert came_ns - requests["transfer_start_ns"][i] >= ceil(least_ns - 1e-6)
    assert log.token_counts()["count"].sum() == requests["generated_tokens"].sum()
    gaps = log.token_gaps()
    total = sum(requests["last_token_ns"] - requests["first_token_ns"])
    assert (gaps["gap_ns"] * gaps["count"]).sum() == total


@pytest.mark.slow
@given(cases())
@settings(max_examples=share(0.5))
def test_disaggregated_fleet_gives_the_same_bytes_step_by_step(case):
    fast, slow = run(**case), run(**case, fast=False)
    assert fast.transfers == slow.transfers
    for mine, its in zip(fast.of_engines, slow.of_engines, strict=True):
        assert laws.signature(mine) == laws.signature(its)


TIERED = {
    "enable_prefix_caching": True,
    "kv_offload": {"tiers": [{"name": "cpu", "gib": 4, "link": "pcie-4"}]},
}


def cluster(**pools):
    return make_spec(
        {
            "workload": {"trace": "azure-conv", "num_requests": 20, "request_rate": 20},
            "cluster": {"pools": {"p": {"role": "prefill"}, "d": {"role": "decode"}} | pools},
        }
    )


def test_experiment_tells_of_transfers():
    result = run_experiment(cluster())
    metrics = result.metrics()
    assert [e.role for e in result.engines] == ["prefill", "decode"]
    moved = result.requests["transferred_bytes"]
    # Llama 3 8B: 32 layers, 8 heads of 128, keys and values, 2 bytes.
    assert (moved == result.requests["prompt_tokens"] * 32 * 8 * 128 * 2 * 2).all()
    assert metrics["transferred_bytes"] == moved.sum()
    took = result.requests["transfer_end_ns"] - result.requests["first_token_ns"]
    assert metrics["mean_handover_ms"] == pytest.approx(took.mean() / 1e6)
    link = LINKS["infiniband-ndr"]
    assert (took >= link.latency_s * 1e9 + moved / link.bytes_per_s * 1e9 - 1).all()


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ({"d": {"role": "prefill"}}, "role prefill need a pool of role decode"),
        ({"p": {"role": "decode"}}, "role decode need a pool of role prefill"),
        ({"d": {"role": "decoder"}}, "cluster.pools.d.role: .*did you mean decode"),
        (
            {"p": {"role": "prefill", "engine": {"async_scheduling": True}}},
            "cluster.pools.p.engine.async_scheduling: must be false in a pool of role prefill$",
        ),
        (
            {"d": {"role": "decode", "engine": {"profile": "vllm-0.32"}}},
            r"must be false in a pool of role decode \(profile vllm-0.32 switches it on\)",
        ),
        (
            {"d": {"role": "decode", "engine": TIERED}},
            "cluster.pools.d.engine.kv_offload: engines of role decode look nothing up: .* swap",
        ),
        (
            {"p": {"role": "prefill", "engine": TIERED | {"offloading_connector": True}}},
            "cluster.pools.p.engine.offloading_connector: .* must be false",
        ),
    ],
)
def test_roles_that_cannot_serve_are_told(pools, message):
    with pytest.raises(SpecError, match=message):
        cluster(**pools)


def test_engines_of_answers_have_the_tiers_that_one_can_swap_to():
    data = cluster().to_data()
    store = {"name": "store", "gib": 40, "link": "ethernet-100g", "shared": True}
    data["engine"] = {**TIERED, "kv_offload": {"tiers": [*TIERED["kv_offload"]["tiers"], store]}}
    for mode, of_answers in (("recompute", None), ("swap", ["cpu"])):
        data["engine"]["preemption_mode"] = mode
        prompts, answers = (pool.spec.engine for pool in engine_pools(make_spec(data)))
        assert [tier.name for tier in prompts.kv_offload.tiers] == ["cpu", "store"]
        offload = answers.kv_offload
        assert (offload and [tier.name for tier in offload.tiers]) == of_answers
        assert not answers.enable_prefix_caching


@pytest.mark.parametrize(
    "keys",
    [
        {"pools": {"p": {"role": "prefill"}, "d": {"role": "decode", "count": 2}},
         "migration": {"name": "llumnix", "every_ms": 20}},
        {"count": 2, "migration": {"name": "llumnix", "every_ms": 20}},
    ],
    ids=["apart", "whole"],
)  # fmt: skip
def test_fleet_whose_requests_move_swaps_to_tiers(keys):
    data = cluster().to_data()
    data["cluster"] = keys
    data["workload"] |= {"num_requests": 60}
    data["engine"] = {**TIERED, "preemption_mode": "swap", "num_gpu_blocks_override": 300,
                      "max_model_len": 4800, "enable_prefix_caching": "pools" in keys}  # fmt: skip
    data["workload"] |= {"max_total_tokens": 4800, "too_long": "clip_prompt"}
    result = run_experiment(make_spec(data))
    metrics = result.metrics()
    assert metrics["num_preemptions"] > 0
    assert metrics["recomputed_tokens"] == 0
    assert (result.requests["generated_tokens"] == result.requests["output_tokens"]).all()


def test_prompt_found_below_the_engine_of_prompts_is_loaded_there_and_sent_whole():
    # A block takes 50 ns to load, and 1000 and more to compute; two of ten are still on the GPU.
    below = KVTier("cpu", 100, 1e9, 1e9)
    tiered = replace(
        CONFIG, num_blocks=25, enable_prefix_caching=True, kv_tiers=(below,), kv_block_bytes=50,
        swap_space_blocks=100,
    )  # fmt: skip
    names = {"prefix_hash_ids": tuple(range(10))}
    work = [
        arrival(0, 0, 41, 2, **names),
        arrival(1, 10_000, 90, 2, prefix_hash_ids=tuple(range(100, 122))),
        arrival(2, 20_000, 41, 2, **names),
    ]
    log = run(work, configs=[tiered, CONFIG])
    requests = log.requests()
    loads = log.of_engines[0].copies.columns()
    (row,) = [i for i, is_load in enumerate(loads["is_load"]) if is_load]
    assert (loads["id"][row], loads["num_blocks"][row], loads["done_ns"][row]) == (2, 8, 20_400)
    assert requests["prefix_hit_tokens"].tolist() == [0, 0, 40]
    assert requests["first_token_ns"][2] == 20_400 + 1010
    assert requests["transferred_bytes"].tolist() == [41_000, 90_000, 41_000]
    assert requests["engine"].tolist() == [1, 1, 1]


def test_first_token_of_the_engine_that_goes_on_is_one_of_an_experiment():
    data = cluster().to_data()
    data["cluster"]["first_token"] = "decode"
    result = run_experiment(make_spec(data))
    came_ns, told = result.requests["transfer_end_ns"], result.requests["first_token_ns"]
    assert (told > came_ns).all()
    took = (came_ns - result.requests["prefill_end_ns"]) / 1e6
    assert result.metrics()["mean_handover_ms"] == pytest.approx(took.mean())
    assert (result.requests["generated_tokens"] == result.requests["output_tokens"]).all()
    before = run_experiment(cluster())
    assert "prefill_end_ns" not in before.requests
    assert (told > before.requests["first_token_ns"]).all()


def test_overhead_of_handovers_is_one_of_an_experiment():
    data, before = cluster().to_data(), run_experiment(cluster()).metrics()["mean_handover_ms"]
    data["cluster"]["handover_overhead_ms"] = 110
    after = run_experiment(make_spec(data)).metrics()["mean_handover_ms"]
    assert after == pytest.approx(before + 110, abs=1)


def test_first_token_of_no_role_or_of_requests_that_are_kept_is_refused():
    data = cluster().to_data()
    data["cluster"] |= {"first_token": "decode", "local": {"when_full": True}}
    with pytest.raises(
        SpecError, match=r"local\.when_full: must be false with first_token: decode"
    ):
        make_spec(data)
    data["cluster"] |= {"first_token": "decoder", "local": None}
    with pytest.raises(SpecError, match=r"cluster\.first_token: .*did you mean decode"):
        make_spec(data)


CACHING = replace(CONFIG, enable_prefix_caching=True)
NAMES = {"prefix_hash_ids": (0, 1, 2, 3, 4)}


@pytest.mark.parametrize(
    ("first_token", "sent_tokens"), [("prefill", 0), ("transfer", 4), ("decode", 4)]
)
def test_kv_that_is_in_the_cache_where_a_request_goes_on_is_not_sent(first_token, sent_tokens):
    # The last token that is known is never taken from a cache: of the prompt, or behind it.
    work = [arrival(0, 0, 20, 3, **NAMES), arrival(1, 50_000, 20, 3, **NAMES)]
    log = run(work, configs=[CONFIG, CACHING], first_token=first_token)
    requests = log.requests()
    assert requests["transferred_bytes"].tolist() == [20_000, 1000 * sent_tokens]
    took = requests["transfer_end_ns"] - requests["transfer_start_ns"]
    assert took.tolist() == [50 + 20, 50 + sent_tokens]
    assert requests["prefix_hit_tokens"].tolist() == [0, 0], "all of both was computed"
    # What comes after is as without a cache.
    gaps = [np.diff(log.token_times(number)).tolist() for number in (0, 1)]
    assert gaps[1][-1] == gaps[0][-1] == 1010


def test_kv_on_its_way_is_not_found_by_others():
    slow_link = replace(LINK, latency_s=5e-6)
    work = [arrival(0, 0, 20, 9, **NAMES), arrival(1, 0, 20, 9, **NAMES)]
    requests = run(work, configs=[CONFIG, CACHING], link=slow_link).requests()
    assert requests["transferred_bytes"].tolist() == [20_000, 20_000]


def test_blocks_that_a_request_shares_where_it_goes_on_take_no_room():
    # Six of eight blocks are those of the first; the second needs one of its own.
    small = replace(CACHING, num_blocks=8, max_model_len=32, watermark=0.0)
    work = [arrival(0, 0, 20, 9, **NAMES), arrival(1, 2_000, 20, 3, **NAMES)]
    requests = run(work, configs=[CONFIG, small]).requests()
    assert requests["transferred_bytes"].tolist() == [20_000, 0]
    assert requests["transfer_start_ns"][1] == requests["first_token_ns"][1]
    assert requests["transfer_start_ns"][1] < requests["last_token_ns"][0]


def test_answer_that_was_given_somewhere_is_found_there_by_the_next_turn():
    # Prompt and answer of the first turn fill six blocks; its last token was never computed.
    first = replace(arrival(0, 0, 20, 6, **NAMES, session="s"), turn=Turn((), 0, (5, 6)))
    second = arrival(1, 50_000, 40, 3, prefix_hash_ids=tuple(range(10)), session="s")
    second = replace(second, turn=Turn((0,), 50_000))
    requests = run([first, second], configs=[CONFIG, CACHING]).requests()
    assert requests["transferred_bytes"].tolist() == [20_000, (40 - 24) * 1000]


@pytest.mark.parametrize("name", ["lmetric", "dynamo"])
def test_router_finds_the_cache_where_a_request_goes_on(name):
    roles = ("prefill", "decode", "decode")
    others = [arrival(i, 1000 * i, 20, 2, prefix_hash_ids=(i, i + 100)) for i in range(1, 4)]
    work = [arrival(0, 0, 20, 3, **NAMES), *others, arrival(9, 50_000, 20, 3, **NAMES)]
    log = run(work, roles, [CONFIG, CACHING, CACHING], decode_router=name)
    requests = log.requests()
    assert requests["engine"][-1] == requests["engine"][0]
    assert requests["transferred_bytes"][-1] == 0


def test_pool_of_answers_has_a_prefix_cache_only_if_it_says_so():
    data = cluster().to_data()
    data["engine"] = {"enable_prefix_caching": True}
    data["cluster"]["pools"]["e"] = {"role": "decode", "engine": {"enable_prefix_caching": True}}
    pools = engine_pools(make_spec(data))
    assert [pool.spec.engine.enable_prefix_caching for pool in pools] == [True, False, True]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"engine": TIERED | {"preemption_mode": "swap"}}, "with engine.kv_offload: what lies in"),
        ({"migration": "llumnix"}, "whose requests move"),
    ],
)
def test_prefix_cache_of_a_pool_of_answers_that_would_not_be_kept_right_is_refused(keys, message):
    data = cluster(d={"role": "decode", "count": 2, "engine": {"enable_prefix_caching": True}})
    data = data.to_data()
    data["engine"] = keys.get("engine", {})
    data["cluster"] |= {key: value for key, value in keys.items() if key == "migration"}
    told = r"cluster\.pools\.d\.engine\.enable_prefix_caching: must be false in a pool"
    with pytest.raises(SpecError, match=f"{told}.* {message}"):
        make_spec(data)


def test_kv_of_another_format_is_refused():
    spec = cluster(d={"role": "decode", "engine": {"kv_cache_dtype": "fp8"}})
    with pytest.raises(SpecError, match="kv_cache_dtype must be one"):
        run_experiment(spec)


def test_layers_without_an_engine_for_prompts_are_told():
    with pytest.raises(SpecError, match=r"link\.by_layer is about prompts"):
        make_spec({"cluster": {"count": 2, "link": {"name": "nvlink", "by_layer": True}}})


@pytest.mark.parametrize(
    "keys",
    [
        {"decode_router": "jsq"},
        {"link": "nvlink"},
        {"first_token": "decode"},
        {"handover_overhead_ms": 3},
    ],
)
def test_keys_about_what_no_engine_does_are_refused(keys):
    (key,) = keys
    with pytest.raises(SpecError, match=rf"cluster\.{key}: "):
        make_spec({"cluster": {"count": 2, **keys}})


def test_unknown_link_is_told_with_the_nearest():
    with pytest.raises(SpecError, match=r"cluster.link.name: .*did you mean pcie-5"):
        make_spec(cluster().to_data() | {"cluster": {"count": 2, "link": "pcie-6"}})


def test_links_are_those_of_the_document():
    from tests.unit.test_routers import DOCS

    text = (DOCS / "fleets.md").read_text(encoding="utf-8")
    for name, link in LINKS.items():
        assert (
            f"| `{name}` | {link.bytes_per_s / 1e9:g} GB/s | {link.latency_s * 1e6:g} µs |" in text
        )


@pytest.mark.parametrize(
    ("tokens", "seated", "waiting", "fits"),
    [
        (11, 0, 0, True),  # and the next one: three blocks of four
        (12, 0, 0, False),
        (7, 1, 0, True),  # with somebody else there a block is kept free
        (8, 1, 0, False),
        (3, 2, 0, False),  # no seat
        (3, 0, 1, False),  # behind who was preempted
    ],
)
def test_room_for_a_request_is_that_for_its_next_token_too(tokens, seated, waiting, fits):
    config = EngineConfig(
        num_blocks=10, max_model_len=40, block_size=4, max_num_seqs=2, watermark=0.1
    )
    requests = SimpleNamespace(num_waiting=waiting, num_seated=seated)
    receiver = SimpleNamespace(
        engine=SimpleNamespace(requests=requests, config=config),
        live=SimpleNamespace(used_blocks=7),
    )
    assert has_room(receiver, tokens) is fits


@pytest.mark.skipif(core.running() != "python", reason="compiled code refuses stand-ins")
def test_blocks_in_use_are_those_of_the_steps_that_have_begun():
    # The ledger has taken one block, for the first of three steps of a segment at once.
    kv = SimpleNamespace(num_blocks=10, free_blocks=4, grows=True)
    decodes = SimpleNamespace(blocks_per_step=lambda steps: [1] * steps)
    engine = SimpleNamespace(
        config=SimpleNamespace(num_blocks=10, block_size=4),
        requests=SimpleNamespace(
            kv=kv, decodes=decodes, is_plain=True, num_waiting=0, num_running=0
        ),
    )
    segment = SimpleNamespace(
        shape=SimpleNamespace(num_decodes=2), start_ns=100, first_step_blocks=1,
        steps=SimpleNamespace(durations_ns=[10, 10, 10]),
    )  # fmt: skip
    clock = Clock()
    clock.now_ns = 100
    live = LiveState(0, engine, clock)
    assert live.used_blocks == 6
    live.has_changed(segment)
    for now_ns, opened in ((100, 0), (109, 0), (110, 0), (111, 1), (120, 1), (121, 2), (999, 2)):
        clock.now_ns = now_ns
        assert live.used_blocks == 6 + opened, now_ns
    for now_ns in range(100, 140):  # whoever asks then for the first time is told the same
        live.has_changed(segment)
        clock.now_ns = now_ns
        assert live.used_blocks == 6 + min(max(-(-(now_ns - 100) // 10) - 1, 0), 2), now_ns
    live.has_changed(None)
    assert live.used_blocks == 6


def test_request_that_is_to_go_on_at_an_engine_waits_there_until_there_is_room():
    engine = Engine(CONFIG, registry.make("fcfs"), SimExecutor(Pricing(LinearCost(1000, 10, 0))))
    engine.submit(arrival(1, 50, 7, 1), 50)
    live = LiveState(0, engine, Clock())

    def told():
        waiting = live.first_waiting_blocks, live.waiting_blocks
        return live.num_waiting, live.num_running, *waiting

    assert told() == (1, 0, 2, 2)
    first = RequestState(arrival(2, 40, 30, 1).request)
    live.queue(first)
    assert told() == (2, 0, 8, 10)
    live.unqueue(first)
    assert told() == (1, 0, 2, 2)


def test_report_is_kept_up_by_what_was_sent_since():
    engine = Engine(CONFIG, registry.make("fcfs"), SimExecutor(Pricing(LinearCost(1000, 10, 0))))
    live = LiveState(0, engine, Clock())
    known = ReportedState(live)
    for priority, prompt in ((-1, 4), (0, 8), (-3, 12)):
        note_sent(arrival(0, 0, prompt, 1, priority=priority).request, live, known)
    assert (known.num_waiting, known.num_urgent, known.backlog_tokens) == (3, 2, 24)
    assert (known.first_waiting_blocks, known.waiting_blocks) == (6, 6)


def test_router_by_counts_sees_who_is_on_the_way_to_an_engine_that_answers():
    # Far more comes than the link carries, so that nobody runs long: all seats are of such.
    slow = Link(bytes_per_s=1e9, latency_s=0.0, source="a test")
    work = [arrival(i, 300 * i, 20, 3) for i in range(60)]
    log = run(work, ("prefill", "decode", "decode", "decode"), link=slow, decode_router="jsq")
    engines = np.bincount(log.requests()["engine"])
    assert engines[0] == 0
    assert engines[1:].max() - engines[1:].min() <= 2


def test_pool_has_its_own_profile_of_engine_and_its_own_keys_win():
    asked = make_spec({
        "engine": {"profile": "vllm-0.24", "max_num_seqs": 9},
        "workload": {"trace": "fixed", "num_requests": 1, "request_rate": 1},
        "cluster": {"pools": {
            "a": {},
            "b": {"engine": {"profile": "vllm-0.32", "max_num_seqs": 7}},
            "c": {"engine": {"profile": "vllm-0.32", "free_uncached_first": False}},
        }},
    })  # fmt: skip
    keys = ("threshold_spares_lone_request", "free_uncached_first", "max_num_seqs")
    found = [tuple(getattr(p.spec.engine, key) for key in keys) for p in engine_pools(asked)]
    assert found == [(False, True, 9), (True, True, 7), (True, False, 9)]
