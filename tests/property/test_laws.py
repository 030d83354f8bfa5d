"""The laws of `schedlab.testing`, over every registered policy and what hypothesis draws."""

import pytest
from hypothesis import given, settings

from schedlab.testing import POLICY_LAWS, Case
from tests.policy_cases import CASES, MAY_WAIT, make
from tests.workloads import configs, share, workloads


def law(name, policy, workload, config):
    """Check a law of `schedlab.testing` on one case."""
    POLICY_LAWS[name](lambda: make(policy), Case(tuple(workload), config))


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=share(0.25))
@given(workload=workloads(), config=configs())
def test_policy_on_random_work_keeps_the_laws(name, workload, config):
    # All on each workload: drawing one takes half as long as a law on it.
    for each in (
        "serves_everyone", "skips_ahead_exactly", "keeps_its_promises", "serves_a_closed_loop",
    ):  # fmt: skip
        law(each, name, workload, config)
    if name not in MAY_WAIT:
        law("never_idles", name, workload, config)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=share(0.12))
@given(workload=workloads(), config=configs())
def test_policy_writes_to_nothing_sees_no_lengths_and_repeats_itself(name, workload, config):
    for other in (
        "changes_nothing_but_itself", "has_sane_keys", "cannot_see_lengths", "is_reproducible",
    ):  # fmt: skip
        law(other, name, workload, config)
