"""The model table and the reader of Hugging Face configs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.dtypes import dtype_bytes, dtype_name
from schedlab.sim.hardware.model_shape import ModelShape
from schedlab.sim.hardware.models import _ALIASES, _OTHER_WEIGHTS, model, model_names, repository
from tests.data_folder import data_folder

# Parameter counts as Hugging Face shows them for the safetensors files. Models with biases
# (Qwen2.5: q, k, v; OPT: everywhere) are compared with a tolerance below.
EXACT = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-30b-a3b-instruct-2507": 30_532_122_624,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "yi-34b": 34_388_917_248,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-small-24b": 23_572_403_200,
    "phi-4": 14_659_507_200,
    "qwen3-235b-a22b": 235_093_634_560,
}
WITH_BIASES = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "opt-125m": 125_239_296,
    "opt-13b": 12_853_473_280,
}
KV_BYTES = {
    "llama-2-7b": 524_288,
    "llama-3-8b": 131_072,
    "llama-2-70b": 327_680,
    "opt-13b": 819_200,
}

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def write(path, **changes):
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value != "absent"}
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(("name", "expected"), EXACT.items())
def test_num_parameters_of_a_model_without_biases_is_exact(name, expected):
    assert model(name).num_parameters == expected


@pytest.mark.parametrize(("name", "expected"), WITH_BIASES.items())
def test_num_parameters_of_a_model_with_biases_is_within_a_thousandth(name, expected):
    count = model(name).num_parameters
    assert expected * 0.999 < count < expected


@pytest.mark.parametrize(
    ("name", "total", "active"),
    # Billions, as their makers say; of Llama 4 without its 0.9 of images, of GLM without the layer
    # that predicts a second token.
    [("llama-4-scout", 108, 17), ("llama-4-maverick", 401, 17), ("glm-4.5-air", 107, 13)],
)
def test_a_mixture_with_shared_experts_has_the_parameters_its_makers_say(name, total, active):
    shape = model(name)
    unused = shape.num_experts - shape.experts_per_token
    idle = shape.num_moe_layers * unused * shape.expert_parameters
    assert shape.num_parameters == pytest.approx(total * 1e9, rel=0.006)
    assert shape.num_parameters - idle == pytest.approx(active * 1e9, rel=0.04)


@pytest.mark.parametrize(("name", "expected"), KV_BYTES.items())
def test_kv_bytes_per_token_in_16_bits_equals_the_published_figure(name, expected):
    assert model(name).kv_bytes_per_token("fp16") == expected


def test_kv_bytes_per_token_with_fewer_kv_heads_than_gpus_are_replicated():
    shape = model("llama-3-8b")  # 8 KV heads
    assert shape.kv_bytes_per_token("bf16", 8) == 131_072 // 8
    assert shape.kv_bytes_per_token("bf16", 32) == 131_072 // 8


def test_kv_and_weight_bytes_follow_the_dtype():
    shape = model("llama-3-8b")
    assert shape.kv_bytes_per_token("fp8") == 65_536
    assert shape.weight_bytes("bf16") == 2 * 8_030_261_248
    # 32 layers of 4096 * (6144 + 4096) + 3 * 4096 * 14336 in 4 bits and a scale of 16 for 128; two
    # tables of 128256 * 4096 and 65 norms of 4096 in 16 bits.
    matrices = 32 * (4096 * (6144 + 4096) + 3 * 4096 * 14336)
    others = 2 * 128_256 * 4096 + 65 * 4096
    assert shape.weight_bytes("int4") == matrices // 2 + matrices // 64 + 2 * others
    assert shape.weight_bytes("fp8") == matrices + 2 * others


@pytest.mark.parametrize(
    "spelling", ["meta-llama/Meta-Llama-3-8B", "Meta-Llama-3-8B-Instruct", "LLAMA-3-8B"]
)
def test_model_by_hugging_face_name_finds_the_table_entry(spelling):
    assert model(spelling) is model("llama-3-8b")


def test_every_name_in_the_table_finds_itself():
    assert [model(name).name for name in model_names()] == model_names()


def test_model_with_unknown_name_names_the_nearest():
    with pytest.raises(SpecError, match=r"lama3-8b.*did you mean llama-3-8b\?"):
        model("lama3-8b")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("openai/gpt-oss-20b", "last 128 tokens"),
        ("deepseek-ai/DeepSeek-V3", "multi-head latent attention"),
        ("google/gemma-3-27b-it", "last 1,024 tokens"),
    ],
)
def test_model_of_an_architecture_that_has_no_shape_says_why(name, why):
    with pytest.raises(SpecError, match=f"is not supported: .*{why}"):
        model(name)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "llama-3.1-8b and engine.dtype: fp8"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "qwen2.5-7b and engine.weight_dtype: int4"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "qwen2.5-7b and engine.weight_dtype: int8"),
        ("nvidia/Llama-3.3-70B-Instruct-NVFP4", "llama-3.1-70b and engine.dtype: fp4"),
    ],
)
def test_model_of_quantised_weights_names_the_plain_one_and_the_key_of_the_format(name, write):
    with pytest.raises(SpecError) as refused:
        model(name)
    assert str(refused.value).endswith(f" in another number format: write model: {write}")


def test_model_type_that_is_no_name_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"config\.json: model_type must be a name, got \[\[1\]\]"):
        model(write(tmp_path / "config.json", model_type=[[1]]))


def test_model_name_too_long_for_a_path_is_an_unknown_name():
    with pytest.raises(SpecError, match="is unknown") as refused:
        model("x" * 6000)
    assert len(str(refused.value)) < 1000


def test_model_from_config_json_of_an_unsupported_kind_says_why(tmp_path):
    with pytest.raises(SpecError, match=r"model_type 'deepseek_v3' is not supported: multi-head"):
        model(write(tmp_path / "config.json", model_type="deepseek_v3"))


_LLAMA_4 = {
    "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48,
    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_experts_per_tok": 1,
    "vocab_size": 202048, "attention_chunk_size": 8192, "tie_word_embeddings": False,
}  # fmt: skip
_GLM = {
    "model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 46,
    "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 128,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
    "vocab_size": 151552, "max_position_embeddings": 131072, "use_qk_norm": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama-4-scout", {"model_type": "llama4", "text_config": {
            **_LLAMA_4, "interleave_moe_layer_step": 1, "num_local_experts": 16,
            "max_position_embeddings": 10485760}}),
        ("llama-4-maverick", {"model_type": "llama4", "text_config": {
            **_LLAMA_4, "interleave_moe_layer_step": 2, "num_local_experts": 128,
            "max_position_embeddings": 1048576}}),
        ("glm-4.5-air", _GLM),
    ],
)  # fmt: skip
def test_config_json_of_a_mixture_with_shared_experts_equals_the_table_entry(
    tmp_path, name, config
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = model(str(tmp_path))
    assert replace(read, name=name, source=model(name).source) == model(name)


@pytest.mark.parametrize("num_shared", [1, 2, 3])
def test_shared_experts_of_a_config_json_are_as_wide_as_all_of_them(tmp_path, num_shared):
    (tmp_path / "config.json").write_text(json.dumps({**_GLM, "n_shared_experts": num_shared}))
    assert model(str(tmp_path)).shared_intermediate_size == 1408 * num_shared


def test_model_from_config_json_equals_the_table_entry(tmp_path):
    shape = model(write(tmp_path / "config.json"))
    table = model("llama-3-8b")
    assert shape.num_parameters == table.num_parameters
    assert (shape.num_kv_heads, shape.head_dim, shape.max_model_len) == (8, 128, 8192)
    assert shape.source.endswith("config.json")


def test_model_from_a_folder_reads_its_config(tmp_path):
    write(tmp_path / "config.json")
    assert model(str(tmp_path)).num_layers == 32


def test_model_from_published_config_json_equals_the_table_entry():
    path = data_folder() / "vllm_ground_truth/model_configs/meta-llama/Llama-3.1-8B.json"
    assert model(str(path)).num_parameters == model("llama-3.1-8b").num_parameters


@pytest.mark.parametrize(
    ("kind", "changes", "name"),
    [
        ("qwen2", {"use_sliding_window": False, "sliding_window": 131072}, None),
        ("mistral", {"sliding_window": 4096}, None),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4096}, None),
        ("qwen3", {"head_dim": 128}, None),
        ("qwen3", {"head_dim": 128, "use_sliding_window": False, "sliding_window": 4096}, None),
        (
            "qwen3_moe",
            {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
             "head_dim": 128, "hidden_size": 2048, "num_key_value_heads": 4,
             "num_hidden_layers": 48, "vocab_size": 151936, "mlp_only_layers": [],
             "decoder_sparse_step": 1},
            "qwen3-30b-a3b",
        ),
        (
            "mixtral",
            {"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000},
            "mixtral-8x7b",
        ),
        (
            "opt",
            {"ffn_dim": 20480, "hidden_size": 5120, "num_attention_heads": 40,
             "num_hidden_layers": 40, "vocab_size": 50272, "max_position_embeddings": 2048,
             "tie_word_embeddings": "absent", "word_embed_proj_dim": 5120},
            "opt-13b",
        ),
    ],
)  # fmt: skip
def test_config_of_each_family_is_understood(tmp_path, kind, changes, name):
    shape = model(write(tmp_path / "config.json", model_type=kind, **changes))
    assert shape.qk_norm == kind.startswith("qwen3")
    counts = kind == "mistral" or changes.get("use_sliding_window")
    assert shape.sliding_window == (4096 if counts else None)
    if name:
        assert shape.num_parameters == model(name).num_parameters
        assert shape.num_position_embeddings == model(name).num_position_embeddings


def test_config_of_llama_4_without_optional_keys_has_those_of_its_class(tmp_path):
    keys = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 4096}
    shape = model(write(tmp_path / "config.json", model_type="llama4_text", **keys))
    # Attention in chunks of 8192, and experts in every layer.
    assert (shape.sliding_window, shape.num_dense_layers, shape.moe_layer_step) == (8192, 0, 1)
    keys |= {"attention_chunk_size": 512, "interleave_moe_layer_step": 2}
    shape = model(write(tmp_path / "config.json", model_type="llama4_text", **keys))
    assert (shape.sliding_window, shape.num_dense_layers, shape.moe_layer_step) == (512, 16, 2)


def test_config_of_opt_with_narrower_embeddings_is_refused(tmp_path):
    keys = {"ffn_dim": 64, "hidden_size": 4096, "word_embed_proj_dim": 512}
    with pytest.raises(SpecError, match="word_embed_proj_dim = 512 is not supported"):
        model(write(tmp_path / "config.json", model_type="opt", **keys))


def test_config_without_kv_heads_has_one_per_query_head(tmp_path):
    shape = model(write(tmp_path / "config.json", num_key_value_heads="absent"))
    assert shape.num_kv_heads == 32


def test_config_that_says_null_says_as_much_as_one_without_the_key(tmp_path):
    # Published files write null where the default holds.
    optional = {
        "phi3": ("num_key_value_heads", "head_dim", "sliding_window"),
        "llama": ("num_key_value_heads", "head_dim", "sliding_window"),
        "llama4_text": ("head_dim", "attention_chunk_size", "interleave_moe_layer_step"),
    }
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 4096}
    for kind, keys in optional.items():
        absent, null = (
            model(
                write(
                    tmp_path / "config.json",
                    **{"model_type": kind, **experts, **dict.fromkeys(keys, value)},
                )
            )
            for value in ("absent", None)
        )
        assert absent == null, kind
        assert absent.num_kv_heads == (8 if kind == "llama4_text" else 32)
        assert absent.head_dim == 128
        with pytest.raises(SpecError, match="key 'num_hidden_layers' is missing"):
            model(write(tmp_path / "config.json", model_type=kind, num_hidden_layers=None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": "absent"}, r"config.json: key 'num_hidden_layers' is missing"),
        ({"hidden_size": 0}, r"hidden_size must be a whole number >= 1, got 0"),
        ({"hidden_size": "4096"}, r"hidden_size must be a whole number"),
        ({"num_hidden_layers": True}, r"num_hidden_layers must be a whole number >= 1, got True"),
        ({"vocab_size": 128256.0}, r"vocab_size must be a whole number >= 1, got 128256\.0"),
        ({"model_type": "lama"}, r"'lama' is not supported; did you mean llama\?"),
        ({"num_key_value_heads": 5}, r"num_heads 32 is not a multiple of num_kv_heads 5"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"some layers are dense"),
    ],
)
def test_config_with_a_fault_names_file_and_key(tmp_path, changes, message):
    with pytest.raises(SpecError, match=message):
        model(write(tmp_path / "config.json", **changes))


def test_config_that_is_not_there_or_not_json_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"no.json: no such file"):
        model(str(tmp_path / "no.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(SpecError, match=r"bad.json: not valid JSON"):
        model(str(tmp_path / "bad.json"))


def test_model_shape_with_half_a_mixture_of_experts_is_refused():
    with pytest.raises(SpecError, match="go together"):
        ModelShape(
            name="x", num_layers=1, hidden_size=8, num_heads=1, num_kv_heads=1, head_dim=8,
            intermediate_size=8, vocab_size=8, max_model_len=8, source="test", num_experts=4,
        )  # fmt: skip


def test_dtype_aliases_and_sizes():
    assert dtype_name("bfloat16") == "bf16"
    assert (dtype_bytes("fp8"), dtype_bytes("half"), dtype_bytes("int4")) == (1.0, 2.0, 0.5)
    with pytest.raises(SpecError, match=r"did you mean bfloat16\?"):
        dtype_name("bflot16")


@pytest.mark.parametrize(
    ("file", "given", "name"),
    [
        ("config.json", {}, "folder"),
        ("config.json", {"_name_or_path": "org/theirs/"}, "theirs"),
        ("own.json", {"_name_or_path": "org/theirs"}, "own"),
    ],
)
@pytest.mark.parametrize("is_around_text", [False, True])
def test_model_is_named_by_its_config_or_the_file_or_its_folder(
    tmp_path, file, given, name, is_around_text
):
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "plain.json", model_type="mistral")
    text = json.loads((folder / "plain.json").read_text())
    text.pop("_name_or_path", None)
    whole = {"model_type": "mistral3", "text_config": text} if is_around_text else text
    (folder / file).write_text(json.dumps({**whole, **given}))
    assert model(str(folder / file)).name == name


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("llama-3.1-70b", "meta-llama/Llama-3.1-70B"),
        ("Meta-Llama-3.1-70B", "meta-llama/Llama-3.1-70B"),
        ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct"),  # of the shape of another
        ("deepseek-r1-distill-llama-8b", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"),
        ("someone/Llama-3.1-70B-Instruct", "someone/Llama-3.1-70B-Instruct"),
        ("a/b/llama-3.1-70b", ""),  # two slashes are a path
        ("someone/llama-9", ""),
        ("llama-9", ""),
    ],
)
def test_repository_of_a_model_is_that_of_its_weights(name, found):
    assert repository(name) == found


def test_repository_of_another_name_of_a_model_is_the_models():
    for alias in _ALIASES.keys() - _OTHER_WEIGHTS.keys():
        name = _ALIASES[alias]
        assert repository(alias) == repository(name) == model(name).repository, alias


def test_repository_of_a_folder_is_none_though_it_is_called_like_one(tmp_path, monkeypatch):
    (tmp_path / "someone" / "llama-3.1-70b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert repository("someone/llama-3.1-70b") == ""


@pytest.mark.parametrize(
    ("inside", "outside", "name"),
    [("a/inner", "b/outer", "inner"), (None, "b/outer", "outer"), (None, None, "folder")],
)
def test_model_around_text_is_named_as_its_text_is_or_else_as_the_whole(
    tmp_path, inside, outside, name
):
    folder = tmp_path / "folder"
    folder.mkdir()
    text = json.loads(Path(write(folder / "config.json", model_type="llama")).read_text())
    text.pop("_name_or_path", None)
    whole = {"model_type": "mistral3", "text_config": text}
    if inside:
        text["_name_or_path"] = inside
    if outside:
        whole["_name_or_path"] = outside
    (folder / "config.json").write_text(json.dumps(whole))
    assert model(str(folder / "config.json")).name == name


@pytest.mark.parametrize("section", [None, [], "text", 7])
def test_model_around_text_without_an_object_of_its_own_is_refused(tmp_path, section):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "mistral3", "text_config": section}))
    with pytest.raises(SpecError, match=r"config\.json: text_config must be an object, got"):
        model(str(path))
