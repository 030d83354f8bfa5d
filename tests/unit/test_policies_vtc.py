"""VTC, traced by hand: an input token is charged 1, an output token 2."""

import pytest

from tests.laws import arrival
from tests.traced import batches, limits
from tests.unit.test_policies_ordering import served


def of(tenant, ids, at_ns=0):
    return [arrival(i, at_ns, prompt=4, tenant=tenant) for i in ids]


def test_vtc_serves_the_tenant_that_got_least():
    work = of("a", range(4)) + of("b", (4, 5))
    # Each request is charged 4 + 2; ties go to the earlier one.
    assert served("vtc", work) == [0, 4, 1, 5, 2, 3]


def test_vtc_charges_by_weight_of_the_tenant():
    work = of("a", range(4)) + of("b", (4, 5))
    # A request of tenant a is charged 6 / 3: 2, 4, 6 against b's 6.
    assert served("vtc", work, tenant_weights={"a": 3.0}) == [0, 4, 1, 2, 3, 5]


def test_vtc_charges_prompts_at_admission_within_a_step():
    # Two seats: request 0 charges tenant a 4, so the second seat goes to b.
    got, _ = batches("vtc", of("a", (0, 1)) + of("b", (2,)), limits(seats=2))
    assert got == [{0: 4, 2: 4}, {1: 4}]


def test_vtc_lets_nobody_save_up_idle_time():
    # b comes in the fifth step. a has been charged 30 by its end, and b is lifted to 30: they
    # take turns. With a counter of 0, b would be served three times in a row.
    work = of("a", range(10)) + of("b", range(10, 13), at_ns=4_500)
    assert served("vtc", work) == [0, 1, 2, 3, 4, 5, 10, 6, 11, 7, 12, 8, 9]


def test_vtc_charges_output_tokens_as_they_come_out():
    # One answer of 5 tokens costs tenant a 4 + 10, two of 1 token cost b 6 each.
    work = [arrival(0, prompt=4, output=5, tenant="a"), *of("a", (1,)), *of("b", (2, 3, 4))]
    assert served("vtc", work) == [0, 2, 3, 4, 1]


def test_vtc_without_tenants_is_first_come_first_served():
    work = [arrival(i, prompt=1 + i % 3) for i in range(5)]
    assert served("vtc", work) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "knobs", [{"input_weight": -1.0}, {"output_weight": float("nan")}, {"tenant_weights": {"a": 0}}]
)
def test_vtc_with_an_impossible_weight_is_refused(knobs):
    with pytest.raises(Exception, match="weight"):
        batches("vtc", [arrival(0)], limits(), **knobs)
