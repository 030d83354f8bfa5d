"""What drafters take beside a model, worked out from its shape."""

from dataclasses import replace

import pytest

from schedlab.sim.cost.roofline import RooflineCostModel
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.memory import MemoryBudget
from schedlab.sim.hardware.models import model
from schedlab.sim.speculation.drafters import (
    ModelDrafter,
    NgramDrafter,
    blocks_beside,
    draft_head,
    draft_model,
)
from tests.laws import LinearCost

LLAMA = Deployment(model("llama-3-8b"), gpu("h100-80gb"))
HIDDEN, KV_WIDTH, WIDTH = 4096, 1024, 14336
JOINING = 2731  # of three matrices, as large as one of 2 h^2 weights: 8192 / 3, rounded up
LAYER = 2 * HIDDEN**2 + 2 * HIDDEN * KV_WIDTH + 3 * HIDDEN * (WIDTH + JOINING) + 2 * HIDDEN
PASS = BatchShape(3, 900, 400, rows_sampled=3)
KV = 2 * KV_WIDTH * 2  # keys and values of a layer, two bytes each


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize(("num_layers", "a_pass"), [(1, 1), (3, 1), (3, 3)])
def test_draft_head_holds_its_layers_and_their_kv_and_shares_tables(num_layers, a_pass, devices):
    drafter = draft_head(replace(LLAMA, tensor_parallel_size=devices), num_layers, a_pass)
    # In 16 bits, with the last norm; embeddings and head are the model's.
    assert drafter.weight_bytes == 2 * (num_layers * LAYER + HIDDEN) // devices
    assert drafter.kv_bytes_per_token == num_layers * KV // devices
    assert drafter.whole_kv_bytes_per_token == num_layers * KV
    shape = replace(LLAMA.model, num_layers=a_pass, intermediate_size=WIDTH + JOINING)
    priced = RooflineCostModel(replace(LLAMA, tensor_parallel_size=devices, model=shape))
    assert drafter.cost_model.step_ns(PASS) == priced.step_ns(PASS)


def test_draft_head_of_tied_embeddings_shares_one_table():
    target = Deployment(model("llama-3.2-1b"), gpu("h100-80gb"))
    shape = target.model
    assert shape.tied_embeddings
    drafter = draft_head(target, 1, 1)
    hidden = shape.hidden_size
    bare = replace(
        shape, num_layers=1, intermediate_size=shape.intermediate_size + -(-2 * hidden // 3)
    )
    assert drafter.weight_bytes == bare.weight_bytes("bf16") - 2 * shape.vocab_size * hidden


@pytest.mark.parametrize("engines", [1, 4])
def test_draft_head_of_a_mixture_holds_its_share_of_the_experts(engines):
    target = Deployment(
        model("mixtral-8x7b"), gpu("h100-80gb"), tensor_parallel_size=2, data_parallel_size=engines
    )
    shape = replace(target.model, num_layers=1)
    experts = 2 * 8 * 3 * 4096 * 14336
    assert shape.routed_expert_bytes("bf16") == experts
    drafter = draft_head(target, 1, 1)
    tables = 2 * 2 * 32_000 * 4096
    whole = shape.weight_bytes("bf16") - tables
    assert drafter.weight_bytes == int((whole - experts * (1 - 1 / engines)) / 2)


def test_draft_model_is_divided_as_the_model_is_and_needs_its_tokens():
    target = Deployment(model("llama-3.1-8b"), gpu("h100-80gb"), tensor_parallel_size=2)
    small = model("llama-3.2-1b")
    drafter = draft_model(target, small)
    assert drafter.weight_bytes == small.weight_bytes("bf16") // 2
    assert drafter.kv_bytes_per_token == small.kv_bytes_per_token("bf16", 2)
    assert drafter.whole_kv_bytes_per_token == small.kv_bytes_per_token("bf16", 1)
    priced = RooflineCostModel(replace(target, model=small))
    assert drafter.cost_model.step_ns(PASS) == priced.step_ns(PASS)
    with pytest.raises(SpecError, match="its drafts cannot be verified"):
        draft_model(target, model("qwen3-8b"))


def memory(kv_bytes):
    return MemoryBudget(10_000, 100, 10, kv_bytes, 10, 4)


@pytest.mark.parametrize(
    ("kv_bytes", "beside_model", "beside_lookup"),
    [(1_000, 10, 25), (999, 9, 24), (280, 1, 7), (279, None, 6), (40, None, 1), (39, None, None)],
)
def test_blocks_beside_a_drafter_hold_the_kv_of_both(kv_bytes, beside_model, beside_lookup):
    # Beside weights of 200 bytes: 10 bytes a token of the model and 10 of the drafter.
    drafter = ModelDrafter(LinearCost(), 200, 10, 20)
    for one, num_blocks in ((drafter, beside_model), (NgramDrafter(0.0), beside_lookup)):
        if num_blocks is None:
            with pytest.raises(SpecError, match="the draft does not fit"):
                blocks_beside(one, memory(kv_bytes))
        else:
            assert blocks_beside(one, memory(kv_bytes)) == num_blocks
