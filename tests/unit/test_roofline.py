"""The roofline against hand computation and against public tables of kernels."""

import math
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from librt.vecs import vec
from mypy_extensions import i64

from schedlab.sim.cost.efficiency import (
    AllReduce,
    Attention,
    Efficiency,
    Elementwise,
    Experts,
    Gemm,
    Host,
    Sampler,
)
from schedlab.sim.cost.kernel_times import LAUNCHES_PER_LAYER
from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.cost.roofline import RooflineCostModel
from schedlab.sim.cost.shape import BatchShape, UnevenSteps
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import Gpu, gpu
from schedlab.sim.hardware.model_shape import ModelShape
from schedlab.sim.hardware.models import model

TINY = ModelShape(
    name="tiny", num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4,
    intermediate_size=16, vocab_size=32, max_model_len=1024, source="test",
)  # fmt: skip
# 1 byte per ns and 1 flop per ns: costs in ns are flops or bytes.
SLOW_MEMORY = Gpu(
    name="g", memory_bytes=10**9, memory_bytes_per_s=1e9, flops_per_s={"bf16": 1e15},
    interconnect_bytes_per_s=1e9, pcie_bytes_per_s=1e9, num_sms=1, source="test",
)  # fmt: skip
SLOW_COMPUTE = Gpu(
    name="g", memory_bytes=10**9, memory_bytes_per_s=1e18, flops_per_s={"bf16": 1e9},
    interconnect_bytes_per_s=1e18, pcie_bytes_per_s=1e18, num_sms=1, source="test",
)  # fmt: skip
# Kernels that start at once and reach the peaks: only datasheets are left. Sampling reads fp32.
IDEAL = Efficiency(
    gemm={"bf16": Gemm(0.0, 1.0, 1.0)},
    attention=Attention(
        latency_s=0.0, row_s=0.0, row_share=0.0, bandwidth_share=1.0, ramp_s=0.0, query_block=1,
        block_s=0.0,
        flops_share=1.0, key_s=0.0, mixed_rows=0.0,
    ),
    elementwise=Elementwise(0.0, 1.0), sampler=Sampler(0.0, 4.0), experts=Experts(0.0, 1.0, 1.0),
    all_reduce=AllReduce(10e-6, 0.0, 0.75, 0.0), host=Host(0.0), origin={},
)  # fmt: skip


def decode(batch, context):
    return BatchShape(batch, batch * context, context, rows_sampled=batch)


def test_roofline_when_memory_bound_costs_the_bytes_moved():
    cost = RooflineCostModel(Deployment(TINY, SLOW_MEMORY), IDEAL)
    # One decode row with 10 tokens of context, 16-bit.
    # Layer, weights: qkv 8*16, o 8*8, gate-up 8*32, down 16*8 = 576 parameters -> 1152 bytes.
    # Layer, activations of the products: (8+16) + (8+8) + (8+32) + (16+8) = 104 -> 208 bytes.
    # Element-wise: norms 8*8, rope 2*(8+4) = 88 -> 176; the cache write reads and writes 2*4
    # elements -> 32; activation 3*16 elements -> 96.
    layer = 1152 + 208 + 176 + 32 + 96
    # KV: 11 tokens of 2 layers * 2 * 4 * 2 bytes = 32 bytes.
    kv = 11 * 32
    # Embedding and final norm 4*8*2; head (8*32 + 8 + 32) * 2, and logits in fp32 4*32.
    ends = 64 + (256 + 40) * 2 + 128
    assert cost.step_ns(decode(1, 10)) == [2 * layer + kv + ends]


def test_roofline_when_compute_bound_costs_the_flops():
    cost = RooflineCostModel(Deployment(TINY, SLOW_COMPUTE), IDEAL)
    # 6 new tokens after 4: 2 * 576 flops per token and layer; attention 4 * 2 heads * 4 * pairs per
    # layer with 6*4 + 6*7/2 = 45 pairs; head 2 * 8 * 32.
    chunk = BatchShape(0, 0, 0, chunks=((6, 4),), rows_sampled=1)
    assert cost.step_ns(chunk) == [2 * (6 * 2 * 576 + 32 * 45) + 512]


def test_roofline_reads_at_half_its_rate_until_the_ramp_is_over():
    # A call of each of 2 layers: 32 bytes a token in both, 100 ns of ramp in each.
    ramped = replace(IDEAL, attention=replace(IDEAL.attention, ramp_s=100e-9))
    plain = RooflineCostModel(Deployment(TINY, SLOW_MEMORY), IDEAL)
    cost = RooflineCostModel(Deployment(TINY, SLOW_MEMORY), ramped)
    more = [
        slow - fast
        for slow, fast in zip(
            cost.step_ns(decode(1, 3), 6), plain.step_ns(decode(1, 3), 6), strict=True
        )
    ]
    assert more == [4 * 32, 5 * 32, 6 * 32, 200, 200, 200]


def test_roofline_chunk_of_one_token_reads_what_a_decode_row_reads():
    cost = RooflineCostModel(Deployment(TINY, SLOW_MEMORY), IDEAL)
    chunk = BatchShape(0, 0, 0, chunks=((1, 10),), rows_sampled=1)
    assert cost.step_ns(chunk) == cost.step_ns(decode(1, 10))


def test_roofline_model_without_a_gate_has_one_product_less():
    cost = RooflineCostModel(Deployment(replace(TINY, mlp="plain"), SLOW_COMPUTE), IDEAL)
    # As above, but 8*16 up instead of 8*32 gate-up: 448 parameters.
    chunk = BatchShape(0, 0, 0, chunks=((6, 4),), rows_sampled=1)
    assert cost.step_ns(chunk) == [2 * (6 * 2 * 448 + 32 * 45) + 512]


def test_roofline_8_bits_multiply_faster_but_attention_and_head_stay_at_16():
    chip = replace(SLOW_COMPUTE, flops_per_s={"bf16": 1e9, "fp8": 2e9})
    cost = RooflineCostModel(Deployment(TINY, chip, dtype="fp8"), IDEAL)
    chunk = BatchShape(0, 0, 0, chunks=((6, 4),), rows_sampled=1)
    assert cost.step_ns(chunk) == [2 * (6 * 576 + 32 * 45) + 512]


def test_roofline_narrow_weights_are_read_as_stored_and_multiplied_as_computed():
    wide = RooflineCostModel(Deployment(TINY, SLOW_MEMORY), IDEAL)
    narrow = RooflineCostModel(Deployment(TINY, SLOW_MEMORY, weight_dtype="int8"), IDEAL)
    # 576 weights of each of 2 layers take a byte less; the head keeps 16 bits.
    assert wide.step_ns(decode(1, 10))[0] - narrow.step_ns(decode(1, 10))[0] == 2 * 576
    wide = RooflineCostModel(Deployment(TINY, SLOW_COMPUTE), IDEAL)
    narrow = RooflineCostModel(Deployment(TINY, SLOW_COMPUTE, weight_dtype="int8"), IDEAL)
    chunk = BatchShape(0, 0, 0, chunks=((6, 4),), rows_sampled=1)
    assert wide.step_ns(chunk) == narrow.step_ns(chunk)


@pytest.mark.parametrize(
    ("device", "dtype", "stored", "decode_gain", "prompt_gain"),
    [
        # The layers' weights are 3.9 or 2 times smaller, head and cache are not; small products
        # of narrow formats start later in the tables.
        ("a100", "bf16", "int4", (1.8, 3.9), (0.85, 1.1)),
        ("a100", "bf16", "int8", (1.4, 2.0), (0.85, 1.1)),
        ("a100", "int8", "auto", (1.4, 2.0), (1.2, 2.0)),
        ("h100", "fp8", "auto", (1.2, 2.0), (1.05, 2.0)),
        ("b200", "fp4", "auto", (1.1, 3.6), (1.5, 4.0)),
    ],
)
def test_roofline_formats_gain_what_they_save_where_it_binds(
    device, dtype, stored, decode_gain, prompt_gain
):
    shape, chip = model("llama-3-8b"), gpu(device)
    wide = RooflineCostModel(Deployment(shape, chip))
    narrow = RooflineCostModel(Deployment(shape, chip, dtype=dtype, weight_dtype=stored))
    prompt = BatchShape(0, 0, 0, chunks=((2048, 0),), rows_sampled=1)
    for step, (low, high) in ((decode(1, 100), decode_gain), (prompt, prompt_gain)):
        assert low < wide.step_ns(step)[0] / narrow.step_ns(step)[0] < high


def test_roofline_all_reduce_moves_activations_around_a_ring():
    slow_link = replace(SLOW_COMPUTE, flops_per_s={"bf16": 1e24}, interconnect_bytes_per_s=1e9)
    cost = RooflineCostModel(Deployment(TINY, slow_link, tensor_parallel_size=2), IDEAL)
    # 2 all-reduces in 2 layers of 6 tokens * 8 * 2 bytes, each 2 * 1/2 times over the link, which
    # reaches 75 % of 1 byte/ns; 10 us to start each.
    chunk = BatchShape(0, 0, 0, chunks=((6, 4),), rows_sampled=1)
    assert cost.step_ns(chunk) == [4 * (10_000 + 128)]


def test_roofline_prices_padding_as_tokens_and_as_context_read():
    cost = RooflineCostModel(Deployment(TINY, SLOW_MEMORY), IDEAL)
    padded = BatchShape(1, 10, 10, padding_tokens=1, padding_context_tokens=5, rows_sampled=2)
    # Against two real decode rows: the padding row reads its 5 tokens but not its own new one.
    real = BatchShape(2, 15, 10, rows_sampled=2)
    assert cost.step_ns(padded)[0] == cost.step_ns(real)[0] - 32


@pytest.mark.parametrize("name", ["a100-80gb", "rtx4090"])
def test_times_of_steps_with_padding_are_those_of_single_steps(name):
    cost = RooflineCostModel(Deployment(model("llama-3-8b"), gpu(name)))
    step_times = cost.step_times_pricer()
    for num_decodes, rows, tokens, context in product((0, 2), (0, 3), (0, 5), (0, 70_000)):
        padded = BatchShape(
            num_decodes, 90_000 * num_decodes, 90_000 * min(num_decodes, 1), padding_tokens=tokens,
            padding_context_tokens=context, rows_sampled=2, padding_rows=rows,
        )  # fmt: skip
        assert step_times(padded).durations_ns(5) == cost.step_ns(padded, 5), padded


def test_roofline_swapped_bytes_cross_pcie():
    cost = RooflineCostModel(Deployment(TINY, SLOW_MEMORY), IDEAL)
    swap = BatchShape(0, 0, 0, swapped_bytes=3000)
    assert cost.step_ns(swap) == [4000]  # 3000 bytes at 75 % of 1 byte/ns


def test_roofline_moe_reads_the_expected_number_of_experts():
    dense = {"name": "moe", "num_experts": 4, "experts_per_token": 1, "moe_intermediate_size": 16}
    shape = ModelShape(
        num_layers=1, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=16,
        vocab_size=32, max_model_len=1024, source="test", **dense,
    )  # fmt: skip
    cost = RooflineCostModel(Deployment(shape, SLOW_MEMORY), IDEAL)
    prefill = [cost.step_ns(BatchShape(0, 0, 0, chunks=((n, 0),)))[0] for n in (1, 2, 200)]
    # An expert is 3 * 8 * 16 * 2 = 768 bytes; 1, 2 and 200 tokens touch 1, 4*(1-0.75**2) = 1.75 and
    # 4 experts; all other traffic grows by the same amount per token.
    per_token = (prefill[2] - prefill[0] - 3 * 768) / 199
    assert prefill[1] - prefill[0] == pytest.approx(0.75 * 768 + per_token, abs=1.0)


def test_roofline_moe_of_two_experts_a_token_reads_three_of_four_for_two_tokens():
    one = ModelShape(
        name="moe", num_layers=1, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4,
        intermediate_size=16, vocab_size=32, max_model_len=1024, source="test",
        num_experts=4, experts_per_token=2, moe_intermediate_size=16,
    )  # fmt: skip
    cost = RooflineCostModel(Deployment(one, SLOW_MEMORY), IDEAL)
    ns = [cost.step_ns(BatchShape(0, 0, 0, chunks=((n, 0),)))[0] for n in (1, 2, 200)]
    # An expert is 768 bytes; 1, 2 and 200 tokens touch 2, 4*(1 - 0.5**2) = 3 and 4 experts.
    per_token = (ns[2] - ns[0] - 2 * 768) / 199
    assert ns[1] - ns[0] == pytest.approx(768 + per_token, abs=1.0)


def test_roofline_shared_experts_are_read_in_every_step_and_dense_layers_have_none():
    routed = ModelShape(
        name="moe", num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4,
        intermediate_size=16, vocab_size=32, max_model_len=1024, source="test",
        num_experts=4, experts_per_token=1, moe_intermediate_size=16,
    )  # fmt: skip
    shared = replace(routed, shared_intermediate_size=16)
    half = replace(shared, num_dense_layers=1)
    ns = [
        RooflineCostModel(Deployment(shape, SLOW_MEMORY), IDEAL).step_ns(decode(1, 10))[0]
        for shape in (routed, shared, half)
    ]
    # An MLP of 16: 768 bytes of weights; products (8+32) + (16+8) and activation 3*16 elements.
    mlp = 768 + 2 * (40 + 24 + 48)
    assert ns[1] - ns[0] == 2 * mlp
    # The dense layer has that MLP and no router (32 weights, 8+4 elements), chosen expert (768
    # bytes; 2*8 + 3*16 elements) or shared one.
    assert ns[2] - ns[1] == mlp - (2 * (32 + 12) + 768 + 2 * 64 + mlp)


def test_roofline_engines_that_share_experts_price_their_share_of_all_tokens_and_the_exchange():
    shape = ModelShape(
        name="moe", num_layers=1, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4,
        intermediate_size=16, vocab_size=32, max_model_len=1024, source="test",
        num_experts=4, experts_per_token=1, moe_intermediate_size=16,
    )  # fmt: skip
    chip = replace(SLOW_COMPUTE, interconnect_bytes_per_s=1e9)
    alone = RooflineCostModel(Deployment(shape, chip), IDEAL)
    shared = RooflineCostModel(Deployment(shape, chip, data_parallel_size=2), IDEAL)

    def ns(cost, own, gathered=0):
        step = BatchShape(0, 0, 0, ((own, 0),), gathered_tokens=gathered)
        return cost.step_ns(step)[0]

    # A token in one expert is 2 * 3 * 8 * 16 = 768 flops; twice 10 us and half of the tokens'
    # 8 * 2 bytes over a link of 0.75 bytes/ns.
    for own, gathered in ((6, 6), (6, 20), (6, 0)):
        met = gathered or own
        exchange = 2 * (10_000 + met * 16 / 2 / 0.75)
        expected = ns(alone, own) + 768 * (met / 2 - own) + exchange
        assert ns(shared, own, gathered) == pytest.approx(expected, abs=1.5)


@pytest.mark.parametrize("num_dense", [0, 1, 3])
def test_roofline_shared_experts_of_all_engines_are_those_of_layers_that_have_any(num_dense):
    shape = ModelShape(
        name="moe", num_layers=4, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4,
        intermediate_size=16, vocab_size=32, max_model_len=1024, source="test",
        num_experts=4, experts_per_token=1, moe_intermediate_size=16, num_dense_layers=num_dense,
    )  # fmt: skip
    chip = replace(SLOW_COMPUTE, interconnect_bytes_per_s=1e9)
    cost = RooflineCostModel(Deployment(shape, chip, data_parallel_size=2), IDEAL)

    def ns(gathered):
        step = BatchShape(0, 0, 0, ((6, 0),), gathered_tokens=gathered)
        return cost.step_ns(step)[0]

    # A token more of all engines: 768 flops, of which each computes half, and its exchange.
    token = 768 / 2 + 2 * 16 / 2 / 0.75
    assert ns(100) - ns(20) == pytest.approx((4 - num_dense) * 80 * token, abs=1.5)


def test_roofline_tensor_parallelism_adds_all_reduces_and_splits_work():
    cost = RooflineCostModel(Deployment(TINY, SLOW_COMPUTE, tensor_parallel_size=2), IDEAL)
    chunk = BatchShape(0, 0, 0, chunks=((6, 4),), rows_sampled=1)
    # Half the flops (the one KV head is replicated: qkv has 8*(4+2*4) per GPU instead of 8*16/2),
    # and 2 all-reduces of 10 us in each of 2 layers.
    params = 8 * 12 + 4 * 8 + 8 * 16 + 8 * 8
    flops = 2 * (6 * 2 * params + 16 * 45) + 256
    assert cost.step_ns(chunk) == [flops + 4 * 10_000]


# Linear layers and element-wise kernels of all layers, ms, by new tokens; without head and
# attention. Sums of the medians in public kernel profiles: Vidur (microsoft/vidur, MLSys'24) for
# A100 and H100, which taught nothing; LLMServingSim (casys-kaist/LLMServingSim) for the RTX cards,
# which did, so that there it is the form of the model that is tested.
PROFILES = {
    ("a100-80gb", "llama-2-7b", 0.21): {1: 9.34, 512: 33.6, 1024: 68.3, 2048: 134.4, 4096: 261.7},
    ("h100-80gb", "llama-2-7b", 0.22): {1: 5.63, 512: 12.1, 1024: 21.2, 2048: 40.9, 4096: 84.2},
    ("rtx-4090", "llama-3.1-8b", 0.15): {1: 15.22, 256: 23.92, 512: 45.86, 2048: 181.09},
    ("rtx-pro-6000", "llama-3.1-8b", 0.08): {1: 10.14, 64: 10.97, 512: 22.2, 2048: 76.66},
}


@pytest.mark.parametrize(
    ("device", "name", "tolerance", "tokens", "measured_ms"),
    [(*key, *point) for key, points in PROFILES.items() for point in points.items()],
)
def test_roofline_layers_are_near_public_profiles(device, name, tolerance, tokens, measured_ms):
    cost = RooflineCostModel(Deployment(model(name), gpu(device)))
    # Padding attends to nothing.
    step_ms = cost.step_ns(BatchShape(0, 0, 0, padding_tokens=tokens))[0] / 1e6
    assert step_ms == pytest.approx(measured_ms, rel=tolerance)


@pytest.mark.parametrize(
    ("name", "device", "context", "speedups"),
    [
        ("llama-2-7b", "a100-80gb", 1024, (6.6, 15.3)),
        ("llama-2-7b", "h100-80gb", 1024, (6.5, 15.2)),
        ("llama-2-7b", "a100-80gb", 256, (7.7, 24.6)),
        ("llama-3-8b", "a100-80gb", 1024, (7.4, 23.1)),
    ],
)
def test_roofline_decode_throughput_grows_with_the_batch_as_measured(
    name, device, context, speedups
):
    cost = RooflineCostModel(Deployment(model(name), gpu(device)))
    rates = [n / cost.step_ns(decode(n, context))[0] for n in (1, 8, 32)]
    assert rates[1] / rates[0] == pytest.approx(speedups[0], rel=0.1)
    assert rates[2] / rates[0] == pytest.approx(speedups[1], rel=0.1)


@pytest.mark.parametrize("shape", [BatchShape(2, 8, 4, chunks=((4, 0),)),
                                   BatchShape(2, 8, 4, swapped_bytes=1)])  # fmt: skip
def test_roofline_several_steps_of_an_unrepeatable_batch_are_refused(shape):
    cost = RooflineCostModel(Deployment(TINY, SLOW_MEMORY))
    with pytest.raises(ValueError, match="k = 2"):
        cost.step_ns(shape, 2)


def test_roofline_zero_steps_are_refused():
    with pytest.raises(ValueError, match="k = 0"):
        RooflineCostModel(Deployment(TINY, SLOW_MEMORY)).step_ns(decode(1, 1), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compute_efficiency": 0.0}, "compute_efficiency"),
        ({"memory_efficiency": 1.01}, "memory_efficiency"),
        ({"memory_efficiency": math.nan}, "memory_efficiency"),
    ],
)
def test_roofline_with_an_impossible_argument_is_refused(options, message):
    with pytest.raises(SpecError, match=message):
        RooflineCostModel(Deployment(model("llama-3-8b"), gpu("a100")), **options)


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        ({"dtype": "fp8"}, "does not compute in fp8"),
        ({"tensor_parallel_size": 5}, "tensor_parallel_size 5"),
    ],
)
def test_roofline_of_an_impossible_deployment_is_refused(formats, message):
    with pytest.raises(SpecError, match=message):
        RooflineCostModel(Deployment(model("llama-3-8b"), gpu("a100"), **formats))


def test_roofline_describes_itself_as_uncalibrated_and_names_what_it_ignores():
    text = RooflineCostModel(Deployment(model("mistral-7b-v0.1"), gpu("a100"))).describe()
    assert text["calibration"] == "UNCALIBRATED"
    assert any("sliding window" in line for line in text["simplifications"])
    assert "datasheet" in text["hardware_source"]


TABLES = "no calibration: datasheet peaks times shares learnt from tables of kernels"
SWAPPING = "swapping does not overlap with computation"
EXPERTS = "experts are chosen uniformly and independently"
STAGES = "stages send one activation vector a token, beside what they compute"
WINDOW = (
    "the sliding window of 77 tokens is ignored: contexts beyond it are priced as full attention"
)


@pytest.mark.parametrize(
    ("name", "window", "num_stages", "simplified"),
    [
        ("llama-3-8b", None, 1, [TABLES, SWAPPING]),
        ("mixtral-8x7b", None, 1, [TABLES, SWAPPING, EXPERTS]),
        ("llama-3-8b", 77, 1, [TABLES, SWAPPING, WINDOW]),
        ("mixtral-8x7b", 77, 4, [TABLES, SWAPPING, EXPERTS, WINDOW, STAGES]),
    ],
)
def test_roofline_says_all_that_it_simplifies_and_what_it_is_of(
    name, window, num_stages, simplified
):
    shape = replace(model(name), sliding_window=window)
    where = Deployment(
        shape, gpu("h200"), tensor_parallel_size=2, dtype="bf16", weight_dtype="fp8",
        data_parallel_size=3 if shape.num_experts else 1, pipeline_parallel_size=num_stages,
    )  # fmt: skip
    told = RooflineCostModel(where).describe()
    assert told["simplifications"] == simplified
    expected = {
        "name": "roofline", "calibration": "UNCALIBRATED", "model": name,
        "model_source": shape.source, "hardware": "h200", "hardware_source": gpu("h200").source,
        "tensor_parallel_size": 2, "data_parallel_size": 3 if shape.num_experts else 1,
        "dtype": "bf16",
    }  # fmt: skip
    assert {key: told[key] for key in expected} == expected
    if num_stages == 1:
        assert not {"pipeline_parallel_size", "layers_per_stage", "pipeline_link"} & {*told}
    else:
        assert told["pipeline_parallel_size"] == 4
        assert told["layers_per_stage"] == [8] * 4
        assert told["pipeline_link"]["bytes_per_s"] == gpu("h200").interconnect_bytes_per_s


@pytest.mark.parametrize(("compute", "memory"), [(0.3, None), (None, 0.4), (0.3, 0.4)])
def test_roofline_with_shares_of_its_own_takes_each_for_what_it_is(compute, memory):
    where = Deployment(model("llama-3-8b"), gpu("h200"))
    found = RooflineCostModel(where, compute_efficiency=compute, memory_efficiency=memory).kernels
    plain = RooflineCostModel(where).kernels
    assert found.attention.flops_share == (compute or plain.attention.flops_share)
    assert found.attention.bandwidth_share == (memory or plain.attention.bandwidth_share)
    assert found.gemm["bf16"].flops_share == (compute or plain.gemm["bf16"].flops_share)


def test_overhead_is_linear_and_rounded():
    overhead = SchedulingOverhead(base_s=1e-6, per_running_s=1.6e-9, per_waiting_s=2e-9)
    assert overhead.ns(num_running=1, num_waiting=10) == 1022  # 1000 + 1.6 + 20 = 1021.6
    assert SchedulingOverhead().ns(100, 100) == 0


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
def test_overhead_with_an_impossible_term_is_refused(value):
    with pytest.raises(SpecError, match="per_running_s"):
        SchedulingOverhead(per_running_s=value)


def test_step_with_prompts_takes_no_less_than_the_host_needs_to_launch_it():
    shape = BatchShape(0, 0, 0, ((2, 0),), rows_sampled=1)
    fast = RooflineCostModel(Deployment(TINY, SLOW_MEMORY), IDEAL).step_ns(shape)
    for call_s, expected in ((1e-3, [TINY.num_layers * LAUNCHES_PER_LAYER * 10**6]), (1e-12, fast)):
        held = replace(IDEAL, host=Host(call_s))
        assert RooflineCostModel(Deployment(TINY, SLOW_MEMORY), held).step_ns(shape) == expected


class _Contexts:
    def __init__(self, extremes):
        self._extremes = extremes

    def extremes(self, num_steps):
        return self._extremes[:num_steps]


class _Twice(RooflineCostModel):
    """Takes twice as long, and a nanosecond a token of the smallest context."""

    def step_ns(self, shape, k=1):
        return [2 * ns + shape.decode_context_min_tokens for ns in super().step_ns(shape, k)]


def test_a_subclass_that_prices_steps_is_asked_for_each_and_told_the_extremes():
    deployment = Deployment(model("llama-3-8b"), gpu("a100-80gb"))
    plain, twice = RooflineCostModel(deployment), _Twice(deployment)
    assert (plain.reads_extremes, twice.reads_extremes) == (False, True)
    first = BatchShape(2, 300, 200, rows_sampled=2, decode_context_min_tokens=100)
    extremes = [(200, 100), (203, 101), (205, 105)]
    steps = UnevenSteps(first, vec[i64]([4, 6]), _Contexts(extremes))
    asked = [plain.step_ns(shape)[0] for shape in steps.shapes()]
    assert plain.uneven_ns(steps) == asked
    expected = [2 * ns + least for ns, (_, least) in zip(asked, extremes, strict=True)]
    assert twice.uneven_ns(steps) == expected
    assert twice.pricer()(first, 1) == expected[:1]
    assert plain.pricer()(first, 1) == asked[:1]


def test_kernels_priced_by_a_chunk_are_those_of_the_step_with_it_whatever_is_beside_it():
    # On devices with fast and slow arithmetic, where another part of a step decides each time.
    draw = Random(3)
    for device, size, name in (
        ("h100", 1, "llama-3-8b"), ("a100-80gb", 2, "mixtral-8x7b"), ("l4", 1, "opt-125m")
    ):  # fmt: skip
        cost = RooflineCostModel(Deployment(model(name), gpu(device), size))
        for _ in range(12):
            num_decodes = draw.choice((0, 1, 7, 200))
            longest = draw.choice((1, 900, 30_000)) if num_decodes else 0
            chunks = tuple(
                (draw.randint(1, 600), draw.choice((0, 17, 9000)))
                for _ in range(draw.choice((0, 1, 3)))
            )
            shape = BatchShape(
                num_decodes,
                num_decodes * draw.randint(longest // 2, longest),
                longest,
                chunks,
                padding_tokens=draw.choice((0, 5)),
                padding_context_tokens=draw.choice((0, 300)),
                rows_sampled=num_decodes + len(chunks),
                padding_rows=draw.choice((0, 3, 50)),
            )
            context = draw.choice((0, 100, 20_000))
            price_ns = cost.chunk_pricer(shape, context)
            for tokens in (1, draw.randint(2, 60), 4096):
                expected = cost.step_ns(shape.with_chunk(tokens, context))[0]
                assert price_ns(tokens) == expected, (name, shape, context, tokens)
