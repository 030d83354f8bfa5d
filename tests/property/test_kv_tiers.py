"""Memory in tiers: the laws of every policy hold, and nothing is lost or counted twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlab.policies import registry
from schedlab.testing import POLICY_LAWS, Case
from tests.policy_cases import PARAMS
from tests.property.test_engine_switches import cases
from tests.property.test_laws import make
from tests.workloads import kv_tiers, share


@st.composite
def tiered(draw):
    """Draw work with common prefixes, limits, and one or two tiers below them."""
    workload, config = draw(cases())
    return tuple(workload), draw(kv_tiers(config))


# Every way of asking for tokens: the loop of vLLM, ranks, chunks, and plans of their own.
POLICIES = (
    "fcfs", "aged", "fastserve", "hygen", "ltr", "nested_wait/theory", "plas", "prefill_first",
    "program_srpt", "qoserve", "sarathi", "tgi3", "vtc",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=share(0.2))
@given(case=tiered())
def test_policy_with_tiers_keeps_the_laws(name, case):
    for law in ("serves_everyone", "skips_ahead_exactly", "keeps_its_promises"):
        POLICY_LAWS[law](lambda: make(name), Case(*case))


@settings(max_examples=share(0.4))
@given(case=tiered(), reserve=st.sampled_from([1, 3, 20]), host=st.sampled_from([0.0, 0.1, 0.9]))
def test_fastserve_that_swaps_ahead_keeps_the_laws(case, reserve, host):
    ahead = {"reserve_blocks": reserve, "host_reserve": host}
    for law in ("serves_everyone", "skips_ahead_exactly", "keeps_its_promises"):
        POLICY_LAWS[law](
            lambda: registry.make("fastserve", **PARAMS["fastserve"], **ahead), Case(*case)
        )
