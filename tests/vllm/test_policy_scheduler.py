"""What the scheduler class for vLLM refuses, and what it does when something goes wrong."""

from dataclasses import replace

import pytest
from vllm.v1.request import RequestStatus

from schedlab.policies import Policy
from schedlab.sim.errors import PolicyError, SpecError
from tests.vllm import vllm_steps, workloads
from tests.vllm.test_decisions import SWITCHES, Virtual


def draw(seed):
    return workloads.draw(seed, SWITCHES, has_watermark=True)


def scheduler(spec, **changes):
    """Construct one with a policy; `changes` are those of vLLM's configuration."""

    class Changed(Virtual):
        def __init__(self, config, *arguments, **options):
            config.additional_config = {"schedlab": {"policy": spec}} if spec else {}
            for name, value in changes.items():
                setattr(config, name, value)
            super().__init__(config, *arguments, **options)

    return vllm_steps.make_scheduler(draw(0), Changed)


def test_server_without_a_policy_says_how_to_name_one():
    with pytest.raises(SpecError, match="additional-config names no policy"):
        scheduler(None)


@pytest.mark.parametrize("policy", ["edf", "gittins", "sjf", "slai"])
@pytest.mark.parametrize(
    "carried",
    [
        {"predicted_tokens": 10**400},
        {"predicted_tokens": 10**5000},
        {"predicted_tokens": 1e300},
        {"predicted_tokens": 3, "slo": {"ttft_ms": 1e308}},
        {"predicted_tokens": 3, "slo": {"tpot_ms": 5e-324}},
    ],
)
def test_request_that_carries_a_number_beyond_all_measure_is_refused_alone(policy, carried):
    server = scheduler(policy)
    first, second = draw(0).arrivals[:2]
    bad = vllm_steps.vllm_request(first.request, first.output_tokens, server.block_size)
    bad.sampling_params.extra_args = {"schedlab": carried}
    good = vllm_steps.vllm_request(second.request, second.output_tokens, server.block_size)
    server.add_request(bad)
    server.add_request(good)
    assert bad.status == RequestStatus.FINISHED_ERROR
    assert list(server.schedule().num_scheduled_tokens) == [good.request_id]


def test_unknown_policy_is_refused_with_the_nearest_name():
    with pytest.raises(SpecError, match=r"unknown policy 'fcsf'.*fcfs"):
        scheduler("fcsf")


@pytest.mark.parametrize("name", ["static", "dynamic", "multi_bin", "prompt_buckets"])
def test_sealed_batches_are_refused_by_name(name):
    with pytest.raises(SpecError, match=f"policy '{name}' seals batches"):
        scheduler({"name": name, "max_batch_size": 4} if name == "static" else name)


@pytest.mark.parametrize("name", ["fair_batching", "fastserve", "hygen", "qoserve", "scorpio"])
def test_policies_that_ask_for_times_are_refused_by_name(name):
    with pytest.raises(SpecError, match=f"policy '{name}' asks how long steps take"):
        scheduler(name)


@pytest.mark.parametrize(
    ("setting", "feature"),
    [
        ("speculative_config", "speculative decoding"),
        ("lora_config", "LoRA"),
    ],
)
def test_server_with_a_feature_that_plans_do_not_know_is_refused(setting, feature):
    value = vllm_steps.Nothing(max_num_new_slots_for_drafting=0, use_eagle=lambda: False)
    value.use_eagle_block_drop = value.uses_draft_model = lambda: False
    with pytest.raises(SpecError, match=f"do not run in vLLM with {feature}"):
        scheduler("fcfs", **{setting: value})


class Raises(Policy):
    def plan(self, view, builder):
        return 1 // 0


def test_policy_that_raises_ends_the_server_with_its_name():
    server = scheduler("tests.vllm.test_policy_scheduler:Raises")
    first = draw(0).arrivals[0]
    request, output_tokens = first.request, first.output_tokens
    server.add_request(vllm_steps.vllm_request(request, output_tokens, server.block_size))
    with pytest.raises(PolicyError, match="policy Raises: ZeroDivisionError"):
        server.schedule()


def test_request_without_the_prediction_that_a_policy_needs_is_answered_with_an_error():
    server = scheduler("sjf")
    first = draw(0).arrivals[0]
    request, output_tokens = first.request, first.output_tokens
    unknown = replace(request, predicted_tokens=None)
    asked = vllm_steps.vllm_request(unknown, output_tokens, server.block_size)
    server.add_request(asked)
    assert asked.status == RequestStatus.FINISHED_ERROR
    step = server.schedule()
    assert step.num_scheduled_tokens == {}
    outputs = server.update_from_output(step, vllm_steps.Model().run_nothing())
    assert "predicted_tokens" in outputs[0].outputs[0].stop_reason


def test_aborted_request_leaves_the_policys_queue():
    server = scheduler("fcfs")
    requests = [
        vllm_steps.vllm_request(arrival.request, arrival.output_tokens, server.block_size)
        for arrival in draw(0).arrivals
    ]
    for request in requests:
        server.add_request(request)
    server.finish_requests(requests[0].request_id, RequestStatus.FINISHED_ABORTED)
    assert requests[0].request_id not in server.schedule().num_scheduled_tokens
    assert len(server.plan_requests.waiting) == len(server.waiting)
