"""Laws of the cost models, over random shapes, models and GPUs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlab.sim.cost.fitted import FittedCostModel
from schedlab.sim.cost.profile import Fit, FitError, Regime, step_features
from schedlab.sim.cost.roofline import RooflineCostModel
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.dtypes import dtype_bytes
from schedlab.sim.hardware.gpus import gpu, gpu_names
from schedlab.sim.hardware.models import model, model_names

ERROR = FitError(mape=0.03, p90=0.06, max=0.2, bias=0.001, num_points=100)
EAGER = Regime(
    knots_tokens=(1, 100, 2048),
    knots_s=(0.0087, 0.0093, 0.131),
    coefficients_s={
        "decode_context_sum_tokens": 3.1e-7,
        "decode_context_max_tokens": 1.7e-8,
        "prefill_attention_pairs": 2.3e-9,
        "prefill_context_tokens": 4.1e-8,
        "num_decodes": 1.1e-6,
        "num_prefills": 3e-5,
        "swapped_bytes": 4e-11,
    },
    tile_tokens=64,
)
GRAPH = replace(
    EAGER,
    tile_tokens=1,
    knots_tokens=(1, 8, 64),
    knots_s=(0.0071, 0.0072, 0.0085),
    buckets=(1, 2, 4, 8, 64),
)
BOX = {"new_tokens": (1, 2048), "decode_context_sum_tokens": (50, 100_000),
       "decode_context_max_tokens": (10, 4096), "num_decodes": (1, 64)}  # fmt: skip
FIT = Fit(eager=EAGER, graph=GRAPH, validity=BOX, train=ERROR, held_out=ERROR)

fitted = st.builds(lambda: FittedCostModel(FIT, {}))
dense_gpus = st.sampled_from(gpu_names())
shares = st.one_of(st.none(), st.floats(0.05, 1.0))
roofline = st.builds(
    lambda m, g, tp, c, e, stored: RooflineCostModel(
        Deployment(
            model(m), gpu(g), tp if model(m).num_heads % tp == 0 else 1, weight_dtype=stored
        ),
        compute_efficiency=c,
        memory_efficiency=e,
    ),
    st.sampled_from(model_names()),
    dense_gpus,
    st.sampled_from([1, 2, 4]),
    shares,
    shares,
    st.sampled_from(["auto", "int8", "int4"]),
)
cost_models = st.one_of(roofline, fitted)


@st.composite
def decode_shapes(draw):
    n = draw(st.integers(1, 300))
    longest = draw(st.integers(0, 20_000))
    total = draw(st.integers(longest, longest * n))
    pad, each = draw(st.integers(0, 20)), draw(st.integers(0, 99))
    return BatchShape(
        n, total, longest, padding_tokens=pad, padding_context_tokens=pad * each,
        rows_sampled=n + pad,
    )  # fmt: skip


@st.composite
def mixed_shapes(draw):
    decodes = draw(decode_shapes())
    chunks = draw(
        st.lists(st.tuples(st.integers(1, 2048), st.integers(0, 20_000)), min_size=1, max_size=4)
    )
    return replace(decodes, chunks=tuple(chunks), swapped_bytes=draw(st.integers(0, 10**9)))


def step(shape, j):
    return replace(
        shape,
        decode_context_sum_tokens=shape.decode_context_sum_tokens + shape.num_decodes * j,
        decode_context_max_tokens=shape.decode_context_max_tokens + j,
    )


@pytest.mark.slow
@given(cost_models, decode_shapes(), st.integers(1, 120))
def test_cost_of_k_steps_at_once_equals_one_by_one_to_the_bit(cost, shape, k):
    assert cost.step_ns(shape, k) == [cost.step_ns(step(shape, j))[0] for j in range(k)]


@given(cost_models, st.one_of(decode_shapes(), mixed_shapes()), st.data())
def test_cost_never_falls_when_a_step_has_more_to_do(cost, shape, data):
    more = replace(
        shape,
        num_decodes=shape.num_decodes + data.draw(st.integers(0, 9)),
        decode_context_sum_tokens=shape.decode_context_sum_tokens + data.draw(st.integers(0, 9999)),
        decode_context_max_tokens=shape.decode_context_max_tokens + data.draw(st.integers(0, 99)),
        padding_tokens=shape.padding_tokens + data.draw(st.integers(0, 9)),
        padding_context_tokens=shape.padding_context_tokens + data.draw(st.integers(0, 99)),
        chunks=tuple((q + data.draw(st.integers(0, 99)), c + 1) for q, c in shape.chunks),
        rows_sampled=shape.rows_sampled + data.draw(st.integers(0, 9)),
        swapped_bytes=shape.swapped_bytes + data.draw(st.integers(0, 99)),
    )
    assert cost.step_ns(more)[0] >= cost.step_ns(shape)[0] >= 1


@given(
    cost_models,
    st.one_of(decode_shapes(), mixed_shapes(), st.just(BatchShape(0, 0, 0))),
    st.integers(0, 20_000),
    st.lists(st.integers(1, 4096), min_size=1, max_size=3),
)
def test_cost_of_a_step_by_one_chunk_of_it_is_that_of_the_whole_to_the_bit(
    cost, shape, context, sizes
):
    price_ns = cost.chunk_pricer(shape, context)
    for tokens in sizes:
        assert price_ns(tokens) == cost.step_ns(shape.with_chunk(tokens, context))[0]


@given(roofline, st.one_of(decode_shapes(), mixed_shapes()))
def test_roofline_never_exceeds_the_peaks_of_the_device(cost, shape):
    m, tp = cost.model, cost.tensor_parallel_size
    seconds = (cost.step_ns(shape)[0] + 1) / 1e9  # + 1: the result is rounded to whole ns
    tokens = step_features(shape)["new_tokens"]
    experts = max(m.experts_per_token, 1) * m.expert_parameters
    flops = 2 * tokens * m.num_layers * (m.attention_parameters + experts) / tp
    flops += 2 * shape.rows_sampled * m.hidden_size * m.vocab_size / tp
    attended = shape.decode_context_sum_tokens + shape.num_decodes + shape.padding_context_tokens
    pairs = attended + step_features(shape)["prefill_attention_pairs"]
    flops += 4 * m.num_layers * m.num_heads * m.head_dim * pairs / tp
    assert flops / seconds <= cost.gpu.peak_flops_per_s("bf16") * (1 + 1e-9)

    kv = m.kv_bytes_per_token("bf16", tp)
    moved = kv * (attended + sum(q + c for q, c in shape.chunks))
    # At least these weights.
    stored = dtype_bytes(cost.weight_dtype)
    moved += stored * m.num_layers * (m.attention_parameters + experts) / tp
    assert moved / seconds <= cost.gpu.memory_bytes_per_s * (1 + 1e-9)


@given(roofline, decode_shapes(), st.tuples(st.integers(1, 2048), st.integers(0, 20_000)))
def test_roofline_step_takes_at_least_as_long_as_each_of_its_parts(cost, decodes, chunk):
    both = cost.step_ns(replace(decodes, chunks=(chunk,)))[0]
    assert both >= cost.step_ns(decodes)[0]
    prompt = BatchShape(0, 0, 0, chunks=(chunk,))
    assert both >= cost.step_ns(prompt)[0]
    assert cost.step_ns(replace(prompt, chunks=(chunk, chunk)))[0] >= cost.step_ns(prompt)[0]


@given(roofline, st.integers(1, 4096), st.integers(0, 512))
def test_roofline_step_is_the_sum_of_layers_head_and_attention(cost, tokens, rows):
    # Padding attends to nothing, and rows without tokens go through the head only.
    layers = cost.step_ns(BatchShape(0, 0, 0, padding_tokens=tokens))[0]
    head = cost.step_ns(BatchShape(0, 0, 0, rows_sampled=rows))[0] if rows else 0
    both = cost.step_ns(BatchShape(0, 0, 0, padding_tokens=tokens, rows_sampled=rows))[0]
    assert abs(both - layers - head) <= 2


@settings(max_examples=50)
@given(st.one_of(decode_shapes(), mixed_shapes()))
def test_roofline_is_faster_with_better_efficiency(shape):
    slow, fast = (
        RooflineCostModel(
            Deployment(model("llama-3-8b"), gpu("h100")),
            compute_efficiency=e,
            memory_efficiency=e,
        )
        for e in (0.5, 0.9)
    )
    assert fast.step_ns(shape)[0] < slow.step_ns(shape)[0]


@given(decode_shapes(), st.integers(1, 120))
def test_fitted_steps_outside_are_told_alike_at_once_and_one_by_one(shape, k):
    cost, one_by_one = FittedCostModel(FIT, {}), {}
    for j in range(k):
        features = step_features(step(shape, j))
        for key, (low, high) in BOX.items():
            if features[key] and not low <= features[key] <= high:
                one_by_one.setdefault(key, []).append(j)
        assert set(cost.outside(step(shape, j))) == {f for f, at in one_by_one.items() if j in at}
    assert cost.outside(shape, k) == one_by_one
