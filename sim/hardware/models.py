"""The models that are known by name, and how a name is looked up."""

# ruff: noqa: E501  (a table reads best as a table)

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.hardware.model_shape import ModelShape


def _llama(
    name: str,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    vocab_size: int,
    max_model_len: int,
    repository: str,
    *,
    head_dim: int = 0,
    tied: bool = False,
    **more: int | bool,
) -> ModelShape:
    """Return a gated-MLP, RMSNorm, rotary model: one line of the table."""
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim or hidden_size // num_heads,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        tied_embeddings=tied,
        source=f"config.json of {repository} on huggingface.co",
        repository=repository,
        **more,  # type: ignore[arg-type]
    )


def _opt(name: str, num_layers: int, hidden_size: int, num_heads: int) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=4 * hidden_size,
        vocab_size=50272,
        max_model_len=2048,
        mlp="plain",
        tied_embeddings=True,
        num_position_embeddings=2050,
        num_norm_vectors=2,
        source=f"config.json of facebook/{name} on huggingface.co",
        repository=f"facebook/{name}",
    )


def _own(
    name: str, num_layers: int, hidden_size: int, num_heads: int, num_kv_heads: int,
    intermediate_size: int, vocab_size: int,
) -> ModelShape:  # fmt: skip
    """Return a Llama small enough for the real engine on a CPU."""
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        max_model_len=8192,
        tied_embeddings=True,
        source="made for the CPU backend; no trained weights exist",
    )


_qwen3 = partial(_llama, head_dim=128, qk_norm=True)

# fmt: off
_TABLE = {shape.name: shape for shape in (
    #      name            layers hidden heads kv  mlp   vocab   max len  repository
    _llama("llama-2-7b",     32,  4096,  32,  32, 11008,  32000,   4096, "meta-llama/Llama-2-7b-hf"),
    _llama("llama-2-13b",    40,  5120,  40,  40, 13824,  32000,   4096, "meta-llama/Llama-2-13b-hf"),
    _llama("llama-2-70b",    80,  8192,  64,   8, 28672,  32000,   4096, "meta-llama/Llama-2-70b-hf"),
    _llama("codellama-34b",  48,  8192,  64,   8, 22016,  32000,  16384, "codellama/CodeLlama-34b-hf"),
    _llama("llama-3-8b",     32,  4096,  32,   8, 14336, 128256,   8192, "meta-llama/Meta-Llama-3-8B"),
    _llama("llama-3-70b",    80,  8192,  64,   8, 28672, 128256,   8192, "meta-llama/Meta-Llama-3-70B"),
    _llama("llama-3.1-8b",   32,  4096,  32,   8, 14336, 128256, 131072, "meta-llama/Llama-3.1-8B"),
    _llama("llama-3.1-70b",  80,  8192,  64,   8, 28672, 128256, 131072, "meta-llama/Llama-3.1-70B"),
    _llama("llama-3.1-405b",126, 16384, 128,  8, 53248, 128256, 131072, "meta-llama/Llama-3.1-405B"),
    _llama("llama-3.2-1b",   16,  2048,  32,   8,  8192, 128256, 131072, "meta-llama/Llama-3.2-1B", tied=True),
    _llama("llama-3.2-3b",   28,  3072,  24,   8,  8192, 128256, 131072, "meta-llama/Llama-3.2-3B", tied=True),
    _llama("qwen2.5-0.5b",   24,   896,  14,   2,  4864, 151936,  32768, "Qwen/Qwen2.5-0.5B-Instruct", tied=True),
    _llama("qwen2.5-1.5b",   28,  1536,  12,   2,  8960, 151936,  32768, "Qwen/Qwen2.5-1.5B-Instruct", tied=True),
    _llama("qwen2.5-3b",     36,  2048,  16,   2, 11008, 151936,  32768, "Qwen/Qwen2.5-3B-Instruct", tied=True),
    _llama("qwen2.5-7b",     28,  3584,  28,   4, 18944, 152064,  32768, "Qwen/Qwen2.5-7B-Instruct"),
    _llama("qwen2.5-14b",    48,  5120,  40,   8, 13824, 152064,  32768, "Qwen/Qwen2.5-14B-Instruct"),
    _llama("qwen2.5-32b",    64,  5120,  40,   8, 27648, 152064,  32768, "Qwen/Qwen2.5-32B-Instruct"),
    _llama("qwen2.5-72b",    80,  8192,  64,   8, 29568, 152064,  32768, "Qwen/Qwen2.5-72B-Instruct"),
    _qwen3("qwen3-0.6b",     28,  1024,  16,   8,  3072, 151936,  40960, "Qwen/Qwen3-0.6B", tied=True),
    _qwen3("qwen3-1.7b",     28,  2048,  16,   8,  6144, 151936,  40960, "Qwen/Qwen3-1.7B", tied=True),
    _qwen3("qwen3-4b",       36,  2560,  32,   8,  9728, 151936,  40960, "Qwen/Qwen3-4B", tied=True),
    _qwen3("qwen3-8b",       36,  4096,  32,   8, 12288, 151936,  40960, "Qwen/Qwen3-8B"),
    _qwen3("qwen3-14b",      40,  5120,  40,   8, 17408, 151936,  40960, "Qwen/Qwen3-14B"),
    _qwen3("qwen3-32b",      64,  5120,  64,   8, 25600, 151936,  40960, "Qwen/Qwen3-32B"),
    _qwen3("qwen3-30b-a3b",  48,  2048,  32,   4,  6144, 151936,  40960, "Qwen/Qwen3-30B-A3B",
           num_experts=128, experts_per_token=8, moe_intermediate_size=768),
    _qwen3("qwen3-30b-a3b-instruct-2507", 48, 2048, 32, 4, 6144, 151936, 262144,
           "Qwen/Qwen3-30B-A3B-Instruct-2507",
           num_experts=128, experts_per_token=8, moe_intermediate_size=768),
    _qwen3("qwen3-235b-a22b",94,  4096,  64,   4, 12288, 151936,  40960, "Qwen/Qwen3-235B-A22B",
           num_experts=128, experts_per_token=8, moe_intermediate_size=1536),
    _llama("llama-4-scout",  48,  5120,  40,   8, 16384, 202048, 10485760, "meta-llama/Llama-4-Scout-17B-16E-Instruct",
           num_experts=16, experts_per_token=1, moe_intermediate_size=8192,
           shared_intermediate_size=8192, sliding_window=8192),
    _llama("llama-4-maverick", 48, 5120, 40,   8, 16384, 202048, 1048576, "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
           num_experts=128, experts_per_token=1, moe_intermediate_size=8192,
           shared_intermediate_size=8192, num_dense_layers=24, moe_layer_step=2,
           sliding_window=8192),
    _llama("glm-4.5-air",    46,  4096,  96,   8, 10944, 151552, 131072, "zai-org/GLM-4.5-Air", head_dim=128,
           num_experts=128, experts_per_token=8, moe_intermediate_size=1408,
           shared_intermediate_size=1408, num_dense_layers=1),
    _llama("phi-4",          40,  5120,  40,  10, 17920, 100352,  16384, "microsoft/phi-4"),
    _llama("mistral-7b-v0.1",32, 4096,  32,   8, 14336,  32000,  32768, "mistralai/Mistral-7B-v0.1",
           sliding_window=4096),
    _llama("mistral-7b",     32,  4096,  32,   8, 14336,  32768,  32768, "mistralai/Mistral-7B-v0.3"),
    _llama("mistral-nemo-12b", 40, 5120, 32,   8, 14336, 131072, 131072, "mistralai/Mistral-Nemo-Instruct-2407",
           head_dim=128),
    _llama("mistral-small-24b", 40, 5120, 32,  8, 32768, 131072,  32768, "mistralai/Mistral-Small-24B-Instruct-2501",
           head_dim=128),
    _llama("mistral-small-3.2-24b", 40, 5120, 32, 8, 32768, 131072, 131072,
           "mistralai/Mistral-Small-3.2-24B-Instruct-2506", head_dim=128),
    _llama("yi-34b",         60,  7168,  56,   8, 20480,  64000,   4096, "01-ai/Yi-34B"),
    _llama("mixtral-8x7b",   32,  4096,  32,   8, 14336,  32000,  32768, "mistralai/Mixtral-8x7B-v0.1",
           num_experts=8, experts_per_token=2, moe_intermediate_size=14336),
    _llama("mixtral-8x22b",  56,  6144,  48,   8, 16384,  32768,  65536, "mistralai/Mixtral-8x22B-Instruct-v0.1",
           num_experts=8, experts_per_token=2, moe_intermediate_size=16384),
    _opt("opt-125m", 12, 768, 12),
    _opt("opt-1.3b", 24, 2048, 32),
    _opt("opt-6.7b", 32, 4096, 32),
    _opt("opt-13b", 40, 5120, 40),
    _opt("opt-30b", 48, 7168, 56),
    _opt("opt-66b", 64, 9216, 72),
    ModelShape(
        name="falcon-180b", num_layers=80, hidden_size=14848, num_heads=232, num_kv_heads=8,
        head_dim=64, intermediate_size=4 * 14848, vocab_size=65024, max_model_len=2048, mlp="plain",
        num_norm_vectors=2, source="config.json of tiiuae/falcon-180B on huggingface.co",
        repository="tiiuae/falcon-180B",
    ),
    _own("schedlab-tiny", 2, 64, 4, 2, 128, 512),
    _own("schedlab-mini", 4, 256, 4, 2, 704, 4096),
    _own("schedlab-small", 8, 512, 8, 4, 1408, 8192),
)}
# fmt: on

_ALIASES = {
    "llama-3.3-70b": "llama-3.1-70b",
    "llama-4-scout-17b-16e": "llama-4-scout",
    "llama-4-maverick-17b-128e": "llama-4-maverick",
    "mistral-small-24b-instruct-2501": "mistral-small-24b",
    "mistral-small-3.2-24b-instruct-2506": "mistral-small-3.2-24b",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-r1-distill-llama-70b": "llama-3.1-70b",
    "mistral-7b-v0.3": "mistral-7b",
    "mistral-nemo-base-2407": "mistral-nemo-12b",
    "mistral-nemo-instruct-2407": "mistral-nemo-12b",
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
    "mixtral-8x22b-v0.1": "mixtral-8x22b",
}
_OTHER_WEIGHTS = {
    "llama-3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "deepseek-r1-distill-llama-8b": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    "deepseek-r1-distill-llama-70b": "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
    "mistral-nemo-base-2407": "mistralai/Mistral-Nemo-Base-2407",
    "mixtral-8x22b-v0.1": "mistralai/Mixtral-8x22B-v0.1",
}
"""Models of the shape of another, by the repositories that hold them."""


UNSUPPORTED = {
    "deepseek_v2": "multi-head latent attention has another cache",
    "deepseek_v3": "multi-head latent attention has another cache",
    "kimi_k2": "multi-head latent attention has another cache",
    "gemma2": "half of its layers read the last 4,096 tokens only",
    "gemma3": "five of six layers read the last 1,024 tokens only",
    "gemma3_text": "five of six layers read the last 1,024 tokens only",
    "gpt_oss": "every other layer reads the last 128 tokens only",
    "qwen3_next": "three of four layers keep a state and no cache",
}
"""Architectures, as config.json names them, that a shape cannot express, and why."""

_UNSUPPORTED_NAMES = {
    "deepseek-v2": "deepseek_v2", "deepseek-v3": "deepseek_v3", "deepseek-r1": "deepseek_v3",
    "kimi-k2": "kimi_k2", "gemma-2": "gemma2", "gemma-3": "gemma3", "gpt-oss": "gpt_oss",
    "qwen3-next": "qwen3_next",
}  # fmt: skip

_QUANTISED = {
    "-fp8-dynamic": "dtype: fp8", "-fp8": "dtype: fp8", "-nvfp4": "dtype: fp4", "-fp4": "dtype: fp4",
    "-quantized.w8a8": "dtype: int8", "-w8a8": "dtype: int8", "-gptq-int8": "weight_dtype: int8",
    "-quantized.w4a16": "weight_dtype: int4", "-w4a16": "weight_dtype: int4",
    "-gptq-int4": "weight_dtype: int4", "-gptq": "weight_dtype: int4", "-awq": "weight_dtype: int4",
}  # fmt: skip
"""How repositories say that their weights are in another format, and the engine's key for that."""


def model_names() -> list[str]:
    """Return the names in the model table, in its order."""
    return list(_TABLE)


def model(name: str) -> ModelShape:
    """Return the shape of a model, by name or from a Hugging Face ``config.json``.

    Parameters
    ----------
    name : str
        A name of the table (``"llama-3-8b"``; ``"Meta-Llama-3-8B-Instruct"`` is
        understood too), or the path of a ``config.json`` or of a folder that holds one.

    Raises
    ------
    SpecError
        If the name is unknown (with the nearest name), of quantised weights (with the key for
        these) or of an architecture that a shape cannot express, or the file is unusable (naming
        the key).

    Examples
    --------
    >>> model("llama-3-8b").num_parameters
    8030261248
    """
    key = canonical_model(name)
    if key in _TABLE:
        return _TABLE[key]
    path = Path(name)
    is_folder = os.path.isdir(path)  # False, too, for what is too long for a path
    if path.suffix == ".json" or is_folder:
        from schedlab.sim.hardware.model_config import read_config

        return read_config(path / "config.json" if is_folder else path)
    for prefix, kind in _UNSUPPORTED_NAMES.items():
        if key.startswith(prefix) and "distill" not in key:
            raise SpecError(f"model {name!r} is not supported: {UNSUPPORTED[kind]}")
    for suffix, setting in _QUANTISED.items():
        plain = canonical_model(name.lower().removesuffix(suffix))
        if name.lower().endswith(suffix) and plain in _TABLE:
            raise SpecError(
                f"model {name!r} is {plain} in another number format: write model: {plain} and "
                f"engine.{setting}"
            )
    hint = nearest(key, [*_TABLE, *_ALIASES])
    raise SpecError(f"model {name!r} is unknown; {hint} (or the path of a config.json)")


def repository(name: str) -> str:
    """Return what huggingface.co, and so `vllm serve`, calls a model; empty if nobody said.

    Examples
    --------
    >>> repository("llama-3.1-70b")
    'meta-llama/Llama-3.1-70B'
    >>> repository("meta-llama/Llama-3.1-70B-Instruct")
    'meta-llama/Llama-3.1-70B-Instruct'
    """
    key = name.lower().removeprefix("meta-")
    if key in _OTHER_WEIGHTS:
        return _OTHER_WEIGHTS[key]
    if key in _TABLE or key in _ALIASES:
        return model(key).repository
    is_name = canonical_model(name) in _TABLE and name.count("/") == 1
    return name if is_name and not os.path.exists(name) else ""


def canonical_model(name: str) -> str:
    """Return the table's spelling of a model name, e.g. of a Hugging Face repository.

    Examples
    --------
    >>> canonical_model("meta-llama/Llama-2-7b-chat-hf")
    'llama-2-7b'
    """
    key = name.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    for suffix in ("-hf", "-instruct", "-chat"):
        key = key.removesuffix(suffix)
    key = key.replace("-instruct-v", "-v")
    return _ALIASES.get(key, key)
