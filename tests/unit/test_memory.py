"""KV capacity against what vLLM reported on real GPUs."""

from dataclasses import replace

import pytest

from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.memory import (
    RUNTIME_RESERVE_BYTES,
    MemoryBudget,
    activation_reserve_bytes,
    memory_budget,
)
from schedlab.sim.hardware.models import model

LIMITS = {
    "gpu_memory_utilization": 0.9,
    "block_size": 16,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 256,
}


def budget_of(shape, device, **options):
    return memory_budget(model(shape), gpu(device), **{**LIMITS, **options})


def test_memory_budget_parts_add_up_by_hand():
    # No estimate in it: the reserve is given, and Llama-3-8B weighs 2 * 8,030,261,248 bytes.
    device = gpu("a100-80gb")
    budget = budget_of(
        "llama-3-8b", "a100-80gb", gpu_memory_utilization=0.5, activation_bytes=10**9
    )
    kv = int(0.5 * device.memory_bytes) - 16_060_522_496 - 10**9
    assert budget.kv_bytes == kv
    assert budget.num_blocks == kv // (16 * 131_072)
    assert budget.num_tokens == budget.num_blocks * 16


@pytest.mark.parametrize(
    ("name", "device", "batched_tokens", "blocks"),
    [
        # vLLM 0.19, max_num_batched_tokens 2048 (the run the runtime reserve was chosen from).
        ("llama-3.1-8b", "rtx-4090", 2048, 2588),
        # vLLM pull request 4454 prints "# GPU blocks" on an RTX A6000; vLLM then profiled with
        # max_model_len tokens.
        ("llama-3-8b", "rtx-a6000", 8192, 13_248),
        ("mistral-7b-v0.1", "rtx-a6000", 32_768, 12_735),
        ("opt-125m", "rtx-a6000", 2048, 75_937),
        # Llumnix (OSDI'24): LLaMA-7B on an A10 holds 13,616 tokens, 851 blocks of 16.
        ("llama-2-7b", "a10", 2560, 851),
    ],
)
def test_memory_budget_is_near_the_blocks_vllm_reported(name, device, batched_tokens, blocks):
    budget = budget_of(name, device, max_num_batched_tokens=batched_tokens)
    assert budget.num_blocks == pytest.approx(blocks, rel=0.05)


def test_memory_budget_with_tensor_parallelism_splits_weights_and_heads():
    one = budget_of("llama-3-8b", "a100", activation_bytes=0)
    two = budget_of("llama-3-8b", "a100", activation_bytes=0, tensor_parallel_size=2)
    assert two.weight_bytes * 2 == one.weight_bytes
    assert two.kv_bytes_per_token * 2 == one.kv_bytes_per_token
    assert two.num_blocks > 2 * one.num_blocks


def test_memory_budget_divides_experts_over_the_engines_that_share_them():
    shape, device = "qwen3-30b-a3b", "h100"
    one, two = (budget_of(shape, device, data_parallel_size=n) for n in (1, 2))
    # 48 layers of 128 experts of 3 * 2048 * 768 in bf16; all else is on every engine.
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    assert one.weight_bytes - two.weight_bytes == experts // 2
    assert two.kv_bytes - one.kv_bytes == experts // 2
    both = budget_of(shape, device, data_parallel_size=2, tensor_parallel_size=2)
    assert both.weight_bytes == (one.weight_bytes - experts) // 2 + experts // 4
    dense = "llama-3-8b"
    assert budget_of(dense, device, data_parallel_size=2) == budget_of(dense, device)


def test_memory_budget_of_an_8_bit_cache_holds_twice_the_tokens():
    full = budget_of("llama-3-8b", "a100")
    half = budget_of("llama-3-8b", "a100", kv_dtype="fp8")
    assert half.num_blocks // 2 == full.num_blocks


def test_memory_budget_of_an_8_bit_model_keeps_a_16_bit_cache():
    budget = budget_of("llama-3-70b", "h100", dtype="fp8")
    assert budget.kv_bytes_per_token == 327_680


def test_memory_budget_when_weights_do_not_fit_says_how_much_and_what_helps():
    # 141,107,412,992 / 2**30 = 131.4 GiB of weights against 0.9 * 79.15 = 71.2 GiB.
    message = r"131\.4 GiB.*71\.2 GiB usable.*missing.*tensor_parallel_size \(now 1\).*dtype"
    with pytest.raises(SpecError, match=message):
        budget_of("llama-3-70b", "a100")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization"),
        ({"block_size": 0}, "block_size"),
        ({"tensor_parallel_size": 3}, r"tensor_parallel_size 3 does not divide the 32 heads"),
    ],
)
def test_memory_budget_with_an_impossible_argument_is_refused(options, message):
    with pytest.raises(SpecError, match=message):
        budget_of("llama-3-8b", "a100", **options)


def test_memory_budget_of_narrow_weights_frees_what_they_save():
    wide, narrow = (
        budget_of("llama-3-8b", "a100", activation_bytes=0, weight_dtype=stored)
        for stored in (None, "int4")
    )
    shape = model("llama-3-8b")
    assert wide.weight_bytes == shape.weight_bytes("bf16")
    assert narrow.weight_bytes == shape.weight_bytes("int4")
    assert narrow.kv_bytes - wide.kv_bytes == wide.weight_bytes - narrow.weight_bytes
    assert narrow.kv_bytes_per_token == wide.kv_bytes_per_token


def test_memory_budget_of_weights_too_large_advises_a_narrower_format():
    with pytest.raises(SpecError, match=r"use a smaller weight_dtype \(now bf16\)"):
        budget_of("llama-3-70b", "a100")
    budget_of("llama-3-70b", "a100", weight_dtype="int4")


def test_memory_budget_of_exactly_a_block_has_one_and_of_a_byte_less_is_refused():
    free = budget_of("llama-3-8b", "a100", activation_bytes=0)
    block_bytes = free.kv_bytes_per_token * free.block_size
    one = budget_of("llama-3-8b", "a100", activation_bytes=free.kv_bytes - block_bytes)
    assert one.num_blocks == 1
    with pytest.raises(SpecError, match="missing"):
        budget_of("llama-3-8b", "a100", activation_bytes=free.kv_bytes - block_bytes + 1)


def test_memory_budget_of_a_pipeline_is_that_of_the_stage_with_the_fewest_blocks_by_hand():
    # 32 layers are 11, 11 and 10; logits for 2000 requests are in the last stage alone, which has
    # fewer bytes left for keys and values than the first, and keeps fewer of a token.
    found = budget_of("llama-3-8b", "a100-80gb", pipeline_parallel_size=3, max_num_seqs=2000)
    hidden, mlp, vocabulary, layers = 4096, 14_336, 128_256, 11
    of_layer = 2 * hidden * hidden + 2 * hidden * 1024 + 3 * hidden * mlp + 2 * hidden
    weights = 2 * (layers * of_layer + vocabulary * hidden)
    reserve = RUNTIME_RESERVE_BYTES + 2048 * (4 * hidden + 3 * mlp) * 2
    usable = int(0.9 * gpu("a100-80gb").memory_bytes)
    per_token = layers * 2 * 8 * 128 * 2
    assert found == MemoryBudget(
        usable, weights, reserve, usable - weights - reserve, per_token, 16
    )
    last = budget_of("llama-3-8b", "a100-80gb", pipeline_parallel_size=3, max_num_seqs=9000)
    logits = 9000 * vocabulary * (2 + 8)
    assert last.activation_bytes == reserve + logits
    assert last.kv_bytes_per_token == 10 * 2 * 8 * 128 * 2
    assert last.weight_bytes == 2 * (10 * of_layer + vocabulary * hidden + hidden)


def test_memory_budget_of_a_pipeline_that_does_not_fit_names_the_stage():
    with pytest.raises(SpecError, match=r"does not fit on a100-80gb in stage 2 of 2: weights 65"):
        budget_of("llama-3-70b", "a100", pipeline_parallel_size=2, gpu_memory_utilization=0.8)


@pytest.mark.parametrize(
    ("num_dense_layers", "dense_width", "width"),
    # Two experts of 100 and a shared one of 30, or a dense layer if there is one that is wider.
    [(0, 999, 230), (1, 999, 999), (1, 229, 230), (0, 7, 230)],
)
def test_activations_of_a_mixture_of_experts_take_the_widest_layer_that_there_is(
    num_dense_layers, dense_width, width
):
    mixture = replace(
        model("mixtral-8x7b"),
        intermediate_size=dense_width,
        num_dense_layers=num_dense_layers,
        moe_intermediate_size=100,
        shared_intermediate_size=30,
        experts_per_token=2,
    )
    reserved = activation_reserve_bytes(
        mixture, max_num_batched_tokens=8, max_num_seqs=4, dtype="bf16", tensor_parallel_size=1
    )
    tokens = 8 * (4 * 4096 + 3 * width) * 2
    assert reserved == RUNTIME_RESERVE_BYTES + tokens + 4 * 32_000 * (2 + 8)
