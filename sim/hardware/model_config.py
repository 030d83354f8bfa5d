"""Read a model's shape from a Hugging Face ``config.json``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from schedlab.sim.errors import SpecError, look_alike, nearest
from schedlab.sim.files import read_json_object
from schedlab.sim.hardware.model_shape import ModelShape
from schedlab.sim.hardware.models import UNSUPPORTED

_MIXTURES = ("mixtral", "qwen3_moe", "glm4_moe", "llama4_text")
_KNOWN = ("llama", "mistral", "qwen2", "qwen3", "phi3", "opt", "mistral3", "llama4", *_MIXTURES)
_AROUND_TEXT = ("mistral3", "llama4")
"""Models of text and images: `text_config` is the decoder, which is all that is read."""


class _Config:
    """The file's keys, with errors that name file and key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = read_json_object(path)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number >= 1; without a default the key must be there."""
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            near = look_alike(key, self.data)
            hint = f" (the file has {near!r})" if near else ""
            raise SpecError(f"{self.path}: key {key!r} is missing{hint}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(f"{self.path}: {key} must be a whole number >= 1, got {value!r}")
        return value

    def section(self, key: str) -> dict[str, Any]:
        """Return an object of the file, which must be there."""
        value = self.data.get(key)
        if not isinstance(value, dict):
            raise SpecError(f"{self.path}: {key} must be an object, got {value!r}")
        return value

    def require(self, key: str, expected: object, why: str) -> None:
        """Refuse a variant of the architecture that the shape cannot express."""
        value = self.data.get(key, expected)
        if value != expected:
            raise SpecError(f"{self.path}: {key} = {value!r} is not supported: {why}")


def read_config(path: Path) -> ModelShape:
    """Return the shape that a Hugging Face ``config.json`` describes.

    Parameters
    ----------
    path : Path
        The file. `model_type` must be one of llama, mistral, mistral3, qwen2, qwen3, phi3, opt,
        mixtral, qwen3_moe, glm4_moe, llama4.

    Raises
    ------
    SpecError
        If the file cannot be read, a key is missing or wrong, or the architecture is unknown.

    Notes
    -----
    Absent optional keys take the defaults of Hugging Face's configuration classes. A
    `quantization_config` is not read: the format of the weights is the experiment's choice.
    """
    config = _Config(path)
    kind = config.data.get("model_type")
    if kind in _AROUND_TEXT:
        config.data = {"_name_or_path": _name(config), **config.section("text_config")}
        kind = config.data.get("model_type")
    if not isinstance(kind, str):
        raise SpecError(f"{path}: model_type must be a name, got {kind!r}")
    if kind in UNSUPPORTED:
        raise SpecError(f"{path}: model_type {kind!r} is not supported: {UNSUPPORTED[kind]}")
    if kind not in _KNOWN:
        hint = nearest(kind, _KNOWN)
        raise SpecError(
            f"{path}: model_type {kind!r} is not supported; {hint} (no MLA, no mixed attention)"
        )
    return _opt(config) if kind == "opt" else _gated(config, kind)


def _name(config: _Config) -> str:
    name = config.data.get("_name_or_path") or config.path.parent.name
    if config.path.name != "config.json":
        name = config.path.stem
    return str(name).rstrip("/").rsplit("/", 1)[-1] or "config.json"


def _gated(config: _Config, kind: str) -> ModelShape:
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    if kind == "qwen3_moe":
        config.require("mlp_only_layers", [], "some layers are dense")
        config.require("decoder_sparse_step", 1, "some layers are dense")
    # Only the llama and phi3 classes fall back to one KV head per query head.
    kv_default = heads if kind in ("llama", "phi3") else None
    window = config.data.get("sliding_window")
    if kind.startswith("qwen") and not config.data.get("use_sliding_window"):
        window = None
    if kind == "llama4_text":
        window = config.integer("attention_chunk_size", 8192)
    qwen3 = kind.startswith("qwen3")
    shape = ModelShape(
        name=_name(config),
        num_layers=config.integer("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", kv_default),
        head_dim=config.integer("head_dim", None if qwen3 else hidden // heads),
        intermediate_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        max_model_len=config.integer("max_position_embeddings"),
        tied_embeddings=bool(config.data.get("tie_word_embeddings", False)),
        qk_norm=qwen3 or (kind == "glm4_moe" and bool(config.data.get("use_qk_norm"))),
        sliding_window=window,
        source=str(config.path),
    )
    return _with_experts(shape, config, kind) if kind in _MIXTURES else shape


def _with_experts(shape: ModelShape, config: _Config, kind: str) -> ModelShape:
    """Return a shape with the mixture that its kind of config describes."""
    count, width = "num_experts", "moe_intermediate_size"
    shared_width, num_dense, step = 0, 0, 1
    dense_width = shape.intermediate_size
    if kind == "mixtral":
        count, width = "num_local_experts", "intermediate_size"
    elif kind == "glm4_moe":
        count = "n_routed_experts"
        shared_width = config.integer("n_shared_experts") * config.integer(width)
        num_dense = config.integer("first_k_dense_replace")
    elif kind == "llama4_text":
        # One of so many layers has experts, and a shared one as wide as they are.
        count, width = "num_local_experts", "intermediate_size"
        shared_width, dense_width = config.integer(width), config.integer("intermediate_size_mlp")
        step = config.integer("interleave_moe_layer_step", 1)
        num_dense = shape.num_layers - shape.num_layers // step
    return replace(
        shape,
        intermediate_size=dense_width,
        num_experts=config.integer(count),
        experts_per_token=config.integer("num_experts_per_tok"),
        moe_intermediate_size=config.integer(width),
        shared_intermediate_size=shared_width,
        num_dense_layers=num_dense,
        moe_layer_step=step,
    )


def _opt(config: _Config) -> ModelShape:
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    config.require("word_embed_proj_dim", hidden, "embeddings are narrower than the model")
    positions = config.integer("max_position_embeddings")
    mlp: Literal["plain"] = "plain"
    return ModelShape(
        name=_name(config),
        num_layers=config.integer("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=config.integer("ffn_dim"),
        vocab_size=config.integer("vocab_size"),
        max_model_len=positions,
        mlp=mlp,
        tied_embeddings=bool(config.data.get("tie_word_embeddings", True)),
        num_position_embeddings=positions + 2,
        num_norm_vectors=2,
        source=str(config.path),
    )
