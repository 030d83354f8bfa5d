"""Whatever a specification says, writing it out and reading it back says the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.specification.sweep import points
from schedlab.sim.yaml_lines import dump_yaml, parse_yaml

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"])),
)
keys = st.text(st.characters(codec="ascii", categories=["L", "N"], include_characters="_."))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@given(st.dictionaries(keys, values, max_size=5))
def test_yaml_round_trip_is_exact(data):
    assert parse_yaml(dump_yaml(data), "text").data == data


specs = st.fixed_dictionaries(
    {
        "workload": st.fixed_dictionaries(
            {"trace": st.sampled_from(["azure-conv", "fixed"]), "num_requests": st.integers(1, 50)},
            optional={
                "request_rate": st.floats(0.1, 100) | st.just("inf"),
                "max_concurrency": st.integers(1, 9),
                "prompt_tokens": st.integers(1, 500),
            },
        )
    },
    optional={
        "seed": st.integers(0, 2**40),
        "replications": st.integers(1, 3),
        "policy": st.sampled_from(["fcfs", "static", {"name": "static", "max_batch_size": 3}]),
        "slo": st.fixed_dictionaries({}, optional={"ttft_ms": st.floats(1, 1e6)}),
        "sweep": st.fixed_dictionaries(
            {},
            optional={
                "policy": st.just(["fcfs", "static"]),
                "engine.block_size": st.lists(
                    st.integers(1, 64), min_size=1, max_size=3, unique=True
                ),
            },
        ),
    },
)


@pytest.mark.slow
@given(specs)
def test_spec_round_trip_through_yaml_is_equal(data):
    spec = make_spec(data)
    assert make_spec(parse_yaml(dump_yaml(spec.to_data()), "text").data) == spec


@given(specs)
def test_points_are_the_product_and_all_different(data):
    spec = make_spec(data)
    found = points(spec)
    product = spec.replications
    for swept in spec.sweep.values():
        product *= len(swept)
    assert len(found) == product
    assert len({(point.label, point.replication) for point in found}) == product
    for i, point in enumerate(found):
        assert point.spec not in [other.spec for other in found[:i]]
