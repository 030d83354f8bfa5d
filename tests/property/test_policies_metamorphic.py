"""Changes of a workload that must not change, or only scale, what a policy decides."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlab.policies import registry
from schedlab.sim.request import Slo
from tests import laws
from tests.laws import LinearCost, arrival
from tests.policy_cases import CASES, make
from tests.workloads import configs, share, workloads

# What knows no time but that of the requests; the deadlines of edf scale with them.
TIMELESS = ["edf", "fcfs", "hrrn", "ltr", "mc_sf", "orca", "past_future", "prefill_first",
            "priority", "prompt_buckets", "sarathi", "shortest_prompt", "sjf", "srtf", "static",
            "tensorrt_llm", "tgi", "tgi3", "vtc"]  # fmt: skip


def changed(workload, **by_name):
    """Change fields of all requests, each by a function of its old value."""
    return [
        replace(
            a,
            request=replace(
                a.request, **{k: change(getattr(a.request, k)) for k, change in by_name.items()}
            ),
        )
        for a in workload
    ]


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=share(0.12))
@given(workload=workloads(), config=configs(), order=st.permutations("abc"))
def test_names_of_tenants_change_no_bit(name, workload, config, order):
    renamed = changed(workload, tenant=dict(zip("abc", order, strict=True)).get)
    one = laws.signature(laws.run(make(name), workload, config))
    assert one == laws.signature(laws.run(make(name), renamed, config))


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=share(0.12))
@given(workload=workloads(), config=configs())
def test_tenant_that_comes_after_all_is_over_changes_nothing_before(name, workload, config):
    before = laws.run(make(name), workload, config)
    ends_ns = before.steps()["end_ns"].tolist()  # none where a policy rejects everybody
    end_ns = max([*ends_ns, workload[-1].ready_ns])
    late = arrival(len(workload), end_ns + 10**10, 7, 3, tenant="late", predicted_tokens=3.0)
    after = laws.run(make(name), [*workload, late], config)
    assert laws.difference(before, after, ("alone", "with a late tenant")) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMELESS)
@settings(max_examples=share(0.2))
@given(workload=workloads(), config=configs(), ms=st.lists(st.integers(1, 90), min_size=24))
def test_time_in_another_unit_scales_every_time_and_nothing_else(name, workload, config, ms):
    def in_units_of(factor):
        targets = [Slo(ttft_ms=m * 1e-3 * factor) for m in ms]
        scaled = [
            replace(
                a,
                request=replace(
                    a.request, arrival_ns=a.request.arrival_ns * factor, slo=targets[i]
                ),
                ready_ns=a.ready_ns * factor,
            )
            for i, a in enumerate(workload)
        ]
        cost = LinearCost(1000 * factor, 10 * factor, factor)
        roomy = replace(config, swap_space_blocks=0, preemption_mode="recompute")
        return laws.run(registry.make(name), scaled, roomy, cost).requests()

    one, other = in_units_of(1), in_units_of(8)
    for column, values in one.items():
        if column == "slo_ttft_ms":
            continue
        scaled = values * 8 if column.endswith("_ns") and values.dtype != float else values
        expected = np.where(values == -1, -1, scaled)
        np.testing.assert_array_equal(other[column], expected, column)
