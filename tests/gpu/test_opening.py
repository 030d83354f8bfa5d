"""Opening a model: weights from files, and errors that say what to do."""

import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")

from schedlab.gpu_backend import runner as runners  # noqa: E402
from schedlab.gpu_backend import weights  # noqa: E402
from schedlab.gpu_backend.decoder_config import decoder_config  # noqa: E402
from schedlab.gpu_backend.device import open_device, require_memory, torch_dtype  # noqa: E402
from schedlab.gpu_backend.runner import open_runner  # noqa: E402
from schedlab.sim.errors import SpecError  # noqa: E402
from tests.gpu.backend import CONFIG, TINY, paged_logits, random_tensors, tiny_runner  # noqa: E402

CPU = torch.device("cpu")


def write_model(folder, **changes):
    shape = TINY.shape
    config = {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rope_theta": TINY.rope_theta,
        "rms_norm_eps": TINY.rms_norm_eps,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


@pytest.fixture
def save_file():
    return pytest.importorskip("safetensors.torch").save_file


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_read_from_safetensors_give_the_same_logits(tmp_path, save_file, sharded):
    tensors = {name: t.clone() for name, t in random_tensors(TINY).items()}
    if sharded:
        files = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
        for file in set(files.values()):
            save_file({n: t for n, t in tensors.items() if files[n] == file}, tmp_path / file)
        index = json.dumps({"weight_map": files})
        (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    runner = open_runner(write_model(tmp_path), CONFIG, weights=tmp_path, seed=9)
    assert torch.equal(paged_logits(runner, [1, 2, 3]), paged_logits(tiny_runner(), [1, 2, 3]))


class Opened:
    """A file of tensors, in place of what safetensors opens."""

    files: ClassVar[dict[str, object]] = {}

    def __init__(self, path, framework, device="cpu"):
        assert framework == "pt"
        self.tensors, self.device = self.files[path.name], device

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def keys(self):
        return list(self.tensors)

    def get_tensor(self, name):
        return self.tensors[name].to(self.device)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_each_tensor_is_read_from_its_file_in_the_type_asked_for(monkeypatch, tmp_path, is_sharded):
    tensors = {
        name: torch.arange(6.0).view(2, 3) + i
        for i, name in enumerate(("a.weight", "b.weight", "c.weight"))
    }
    single, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    if is_sharded:
        places = {"a.weight": "one", "b.weight": "two", "c.weight": "one"}
        index.write_text(json.dumps({"weight_map": places}))
        files = {
            file: {name: tensors[name] for name, place in places.items() if place == file}
            for file in ("one", "two")
        }
    else:
        single.write_bytes(b"")
        files = {single.name: tensors}
    monkeypatch.setattr(Opened, "files", files)
    monkeypatch.setitem(sys.modules, "safetensors", SimpleNamespace(safe_open=Opened))
    source = weights.safetensors_source(tmp_path, CPU, torch.float16)
    for name, tensor in tensors.items():
        read = source(name, (2, 3))
        assert (read.dtype, read.tolist()) == (torch.float16, tensor.tolist())
    file = tmp_path / ("two" if is_sharded else single.name)
    with pytest.raises(SpecError) as caught:
        source("b.weight", (3, 2))
    assert str(caught.value) == f"{file}: b.weight has shape (2, 3), the model needs (3, 2)"
    with pytest.raises(SpecError) as caught:
        source("c.weigth", (2, 3))
    assert str(caught.value) == f"{tmp_path}: tensor c.weigth is missing (it has c.weight)"
    with pytest.raises(SpecError) as caught:
        source("xyzzy", (2, 3))
    assert str(caught.value) == f"{tmp_path}: tensor xyzzy is missing"
    tensors["a.k_proj.bias"] = torch.zeros(2)
    if is_sharded:
        places["a.k_proj.bias"] = "one"
        index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(SpecError) as caught:
        weights.safetensors_source(tmp_path, CPU, torch.float16)
    assert str(caught.value) == (
        f"{tmp_path}: a.k_proj.bias: projections with biases are not supported"
    )
    for path in (single, index):
        path.unlink(missing_ok=True)
    with pytest.raises(SpecError) as caught:
        weights.safetensors_source(tmp_path, CPU, torch.float16)
    assert str(caught.value) == (
        f"{tmp_path}: has neither model.safetensors nor model.safetensors.index.json"
    )
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(SpecError, match="reading weights needs `pip install safetensors`"):
        weights.safetensors_source(tmp_path, CPU, torch.float16)


def test_random_tensors_are_as_wide_as_their_names_say_and_the_same_for_a_seed():
    layers = TINY.shape.num_layers
    source = weights.random_source(TINY, 3, CPU, torch.float32)
    residual = 1 / math.sqrt(2 * layers)
    size = (200, 400)  # so that a row of 400 inputs is scaled by a twentieth
    drawn = {}
    for name, scale in (
        ("model.layers.0.self_attn.q_proj.weight", 4.0),
        ("model.layers.0.self_attn.k_proj.weight", 1.0),
        ("model.layers.1.self_attn.v_proj.weight", 2.0),
        ("model.layers.0.self_attn.o_proj.weight", residual),
        ("model.layers.0.mlp.gate_proj.weight", 1.0),
        ("model.layers.0.mlp.down_proj.weight", residual),
        ("lm_head.weight", 1.0),
    ):
        drawn[name] = tensor = source(name, size)
        assert tensor.shape == size
        assert float(tensor.std()) == pytest.approx(scale / 20, rel=0.03)
        assert abs(float(tensor.mean())) < 0.01 * scale / 5
    norm = source("model.norm.weight", (5000,))
    assert float(norm.mean()) == pytest.approx(1.0, abs=0.01)
    assert float(norm.std()) == pytest.approx(0.1, rel=0.05)
    again = weights.random_source(TINY, 3, CPU, torch.float32)
    other = weights.random_source(TINY, 4, CPU, torch.float32)
    first = next(iter(drawn))
    assert torch.equal(again(first, size), drawn[first])
    assert not torch.equal(other(first, size), drawn[first])
    assert weights.random_source(TINY, 3, CPU, torch.float16)(first, size).dtype == torch.float16


@pytest.mark.parametrize("map_", [["a"], {"a": 3}, {"a": "b", "c": "sub/d"}, {"a": "../b"}, None])
def test_index_of_weights_names_files_beside_it(tmp_path, map_):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "b", "c": "d"}}), encoding="utf-8")
    found = weights._files_by_tensor(tmp_path, None)
    assert found == {"a": tmp_path / "b", "c": tmp_path / "d"}
    index.write_text(json.dumps({"weight_map": map_}), encoding="utf-8")
    with pytest.raises(SpecError, match="must map tensors to names of files beside it"):
        weights._files_by_tensor(tmp_path, None)


def test_weights_with_a_missing_misshapen_or_biased_tensor_are_refused(tmp_path, save_file):
    name = write_model(tmp_path)
    whole = {name: t.clone() for name, t in random_tensors(TINY).items()}
    file = tmp_path / "model.safetensors"
    with pytest.raises(SpecError, match=r"has neither model.safetensors nor"):
        open_runner(name, CONFIG, weights=tmp_path)
    save_file({n: t for n, t in whole.items() if n != "model.norm.weight"}, file)
    with pytest.raises(SpecError, match=r"tensor model.norm.weight is missing"):
        open_runner(name, CONFIG, weights=tmp_path)
    save_file({**whole, "model.norm.weight": torch.ones(3)}, file)
    with pytest.raises(SpecError, match=r"model.norm.weight has shape \(3,\), .* needs \(64,\)"):
        open_runner(name, CONFIG, weights=tmp_path)
    save_file({**whole, "model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, file)
    with pytest.raises(SpecError, match=r"q_proj.bias: projections with biases"):
        open_runner(name, CONFIG, weights=tmp_path)


def test_random_weights_depend_on_the_seed_alone():
    first, again, other = (open_runner("schedlab-tiny", CONFIG, seed=s) for s in (1, 1, 2))
    tokens = [3, 1, 4]
    assert torch.equal(paged_logits(first, tokens), paged_logits(again, tokens))
    assert not torch.equal(paged_logits(first, tokens), paged_logits(other, tokens))


def test_config_json_gives_rotary_and_norm_constants(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = write_model(tmp_path, rope_theta=1e6, rms_norm_eps=1e-6, rope_scaling=scaling)
    config = decoder_config(old)
    assert (config.rope_theta, config.rms_norm_eps) == (1e6, 1e-6)
    assert config.rope_scaling.factor == 8.0
    # The form that transformers 5 writes.
    parameters = {"rope_type": "default", "rope_theta": 7e5}
    config = decoder_config(write_model(tmp_path, rope_parameters=parameters))
    assert (config.rope_theta, config.rope_scaling) == (7e5, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "yarn"}}, "rope_type 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "key 'factor' is missing"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps must be a number above 0"),
    ],
)
def test_config_json_with_unusable_constants_names_the_key(tmp_path, changes, message):
    with pytest.raises(SpecError, match=f"config.json: .*{message}"):
        decoder_config(write_model(tmp_path, **changes))


def test_device_that_is_not_there_says_what_to_do():
    with pytest.raises(SpecError, match="'tpu' is unknown; use cpu, cuda"):
        open_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(SpecError, match="or use device cpu"):
            open_device("cuda")


def test_number_format_without_kernels_is_refused():
    with pytest.raises(SpecError, match="on cpu computes in fp32, not in bf16"):
        torch_dtype("bfloat16", CPU)


def test_model_that_does_not_fit_says_how_much_is_missing():
    with pytest.raises(SpecError, match=r"needs 1048576.00 GiB and cpu has .* lower engine"):
        require_memory(1 << 50, CPU, "it")
    huge = replace(CONFIG, num_blocks=1 << 40)
    with pytest.raises(SpecError, match="schedlab-tiny in fp32 with 1099511627776 KV blocks needs"):
        open_runner("schedlab-tiny", huge)


@pytest.mark.parametrize("num_blocks", [20, 37])
def test_memory_asked_for_is_that_of_the_weights_and_of_all_blocks_the_dummy_too(
    monkeypatch, num_blocks
):
    asked = []
    monkeypatch.setattr(runners, "require_memory", lambda *given: asked.append(given))
    config = replace(CONFIG, num_blocks=num_blocks, max_model_len=num_blocks * CONFIG.block_size)
    runner = open_runner("schedlab-tiny", config)
    blocks = sum(pool.nbytes for pair in runner.kv_pools for pool in pair)
    ((needed, where, what),) = asked
    assert needed == decoder_config("schedlab-tiny").shape.weight_bytes("fp32") + blocks
    assert where == CPU
    assert what == f"schedlab-tiny in fp32 with {num_blocks} KV blocks"


def test_context_longer_than_the_models_is_refused():
    config = replace(CONFIG, max_model_len=9000, num_blocks=3000)
    with pytest.raises(SpecError, match="max_model_len 9000 exceeds the 8192 tokens"):
        open_runner("schedlab-tiny", config)
