"""The decoder's arithmetic: against a naive reference, and against itself by other routes."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from schedlab.gpu_backend import cpu_ops  # noqa: E402
from schedlab.gpu_backend.block_pool import BlockPool  # noqa: E402
from schedlab.gpu_backend.decoder_config import DecoderConfig, RopeScaling, decoder_config  # noqa: E402
from schedlab.gpu_backend.model import rotations  # noqa: E402
from schedlab.gpu_backend.runner import ModelRunner, open_runner  # noqa: E402
from schedlab.gpu_backend.weights import random_source  # noqa: E402
from schedlab.sim.errors import SpecError  # noqa: E402
from schedlab.sim.hardware.models import model  # noqa: E402
from tests.gpu.backend import (  # noqa: E402
    CONFIG,
    TINY,
    decoder_of,
    paged_logits,
    random_tensors,
    tiny_runner,
    variant,
)
from tests.gpu.reference import full_logits  # noqa: E402

TOKENS = np.random.default_rng(1).integers(0, 512, 53).tolist()


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        variant(num_kv_heads=4),
        variant(num_kv_heads=1, tied_embeddings=False),
        variant(qk_norm=True),
        variant(head_dim=32),
    ],
    ids=["grouped", "multi-head", "multi-query-untied", "qk-norm", "wide-heads"],
)
def test_decoder_with_paged_cache_gives_the_logits_of_full_attention(config):
    tensors = random_tensors(config)
    runner = ModelRunner(decoder_of(config, tensors), CONFIG)
    logits = paged_logits(runner, TOKENS, cuts=(17, 18, 30))
    expected = full_logits(config, tensors, TOKENS)
    assert expected.std() > 0.3
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("cuts", [(1,), (4, 8, 12), (5, 6, 7, 40), tuple(range(1, 53))])
def test_prompt_computed_in_chunks_gives_the_logits_of_the_whole(cuts):
    whole = paged_logits(tiny_runner(), TOKENS)
    chunked = paged_logits(tiny_runner(), TOKENS, cuts)
    torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-4)


def test_cache_in_scattered_blocks_changes_no_bit():
    first = BlockPool(64, 4, 8, 128)
    other = BlockPool(64, 4, 8, 128, shuffle_seed=3)
    in_order = paged_logits(tiny_runner(), TOKENS, (20, 21), pool=first)
    scattered = paged_logits(tiny_runner(), TOKENS, (20, 21), pool=other)
    assert first.tables[0, :14].tolist() == list(range(1, 15))
    assert sorted(other.tables[0, :14]) != list(range(1, 15))
    assert torch.equal(in_order, scattered)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_checkpoint_of_hugging_face_gives_its_logits(tmp_path, family):
    transformers = pytest.importorskip("transformers")
    shape = TINY.shape
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=32,
        max_position_embeddings=256,
        rms_norm_eps=1e-4,
        rope_theta=70_000.0,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    runner = open_runner(str(tmp_path), CONFIG, weights=tmp_path)
    logits = paged_logits(runner, TOKENS, (20,))
    assert expected.std() > 0.3
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


def test_rotations_with_llama3_scaling_equal_those_of_hugging_face():
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    constants = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    shape = model("llama-3.1-8b")
    theirs = transformers.LlamaConfig(
        hidden_size=4096, num_attention_heads=32, max_position_embeddings=131072,
        rope_theta=500_000.0, rope_scaling={"rope_type": "llama3", **constants},
    )  # fmt: skip
    frequency, _ = utils.ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    scaling = RopeScaling(**constants)
    config = DecoderConfig(shape=shape, rope_theta=500_000.0, rope_scaling=scaling)
    ours = rotations(config, 2, torch.device("cpu"))[1, : shape.head_dim // 2]
    torch.testing.assert_close(ours, frequency.cos(), rtol=0, atol=1e-6)


def test_llama3_scaling_keeps_fast_turns_and_slows_slow_ones():
    scaling = RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    shape = model("llama-3.1-8b")
    plain = rotations(DecoderConfig(shape=shape), 2, torch.device("cpu"))[1, 64:].asin()
    scaled = DecoderConfig(shape=shape, rope_scaling=scaling)
    slower = rotations(scaled, 2, torch.device("cpu"))[1, 64:].asin()
    torch.testing.assert_close(slower[1], plain[1])
    torch.testing.assert_close(slower[-1], plain[-1] / 8, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("opt-13b", "plain MLP"),
        ("mixtral-8x7b", "mixture of experts"),
        ("mistral-7b-v0.1", "sliding window"),
    ],
)
def test_decoder_config_of_another_architecture_says_why_not(name, reason):
    with pytest.raises(SpecError, match=f"{name}: it has .*{reason}"):
        decoder_config(name)


def test_norm_divides_by_the_root_of_the_mean_square_of_what_is_added():
    x, residual = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]])
    normed, total = cpu_ops.add_rms_norm(x, residual, torch.tensor([1.0, 10.0]), 0.0)
    assert total.tolist() == [[3.0, 4.0]]
    expected = [3.0 / 12.5**0.5, 40.0 / 12.5**0.5]
    assert normed[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_gathering_takes_the_blocks_that_hold_tokens_and_no_others(length):
    keys = torch.arange(4 * 2 * 4 * 3).view(4, 2, 4, 3).float()
    table = torch.tensor([2, 0, 99][: -(-length // 4) + 1] if length > 4 else [2, 99])
    k, v = cpu_ops._gather(keys, -keys, table, length)
    expected = torch.cat([keys[2], keys[0]], dim=1)[:, :length]
    assert torch.equal(k, expected)
    assert torch.equal(v, -expected)


def test_random_weights_are_as_wide_as_the_inputs_they_add_up():
    config = DecoderConfig(shape=model("schedlab-tiny"))
    source = random_source(config, 5, torch.device("cpu"), torch.float32)
    residual = 1 / (2 * config.shape.num_layers) ** 0.5
    for name, times in (
        ("q_proj", 4.0), ("k_proj", 1.0), ("v_proj", 2.0), ("o_proj", residual), ("up_proj", 1.0),
        ("down_proj", residual),
    ):  # fmt: skip
        some = source(f"model.layers.0.x.{name}.weight", (64, 1024))
        assert some.std().item() == pytest.approx(times / 32, rel=0.02), name
        assert abs(some.mean().item()) < times / 32 / 50
    norm = source("model.norm.weight", (10_000,))
    assert norm.std().item() == pytest.approx(0.1, rel=0.05)
    assert norm.mean().item() == pytest.approx(1.0, abs=0.005)
