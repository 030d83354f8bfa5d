"""Every policy that runs inside vLLM decides there as it does in simulation."""

from dataclasses import replace

import pytest

from schedlab.policies import registry
from tests.vllm import schedlab_steps, vllm_steps, workloads
from tests.vllm.test_decisions import SWITCHES, Virtual, first_difference

REFUSED = {"dynamic", "magnus", "multi_bin", "prompt_buckets", "static"}


@pytest.mark.parametrize("name", sorted(set(registry.names()) - REFUSED))
def test_policy_takes_the_steps_of_its_simulation(name):
    for seed in range(5000, 5016):
        workload = workloads.draw(seed, SWITCHES, has_watermark=True)
        if seed >= 5012:  # fewer: answers that end by a token
            workload = workloads.cut_short(workload, seed, may_abort=False)
        # vLLM has no more places for requests with memory than rows in a step.
        config = replace(workload.config, max_num_resident=workload.config.max_num_seqs)
        workload = workload._replace(policy=name, config=config)
        difference = first_difference(
            schedlab_steps.steps_of(workload), vllm_steps.steps_of(workload, Virtual)
        )
        assert difference is None, f"workload {seed} ({workload.kind}): {difference}"
