"""Read a model's shape from a Hugging Face ``config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from schedlab.sim.errors import SpecError, look_alike, nearest
from schedlab.sim.files import read_json_object
from schedlab.sim.hardware.models import ModelShape

_GATED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "qwen3_moe")
_KNOWN = (*_GATED, "opt")


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
        The file. `model_type` must be one of llama, mistral, qwen2, qwen3, phi3, mixtral,
        qwen3_moe, opt.

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
    moe: tuple[int, int, int] = (0, 0, 0)
    if kind == "qwen3_moe":
        moe = (
            config.integer("num_experts"),
            config.integer("num_experts_per_tok"),
            config.integer("moe_intermediate_size"),
        )
    elif kind == "mixtral":
        moe = (
            config.integer("num_local_experts"),
            config.integer("num_experts_per_tok"),
            config.integer("intermediate_size"),
        )
    # Only the llama and phi3 classes fall back to one KV head per query head.
    kv_default = heads if kind in ("llama", "phi3") else None
    window = config.data.get("sliding_window")
    if kind.startswith("qwen") and not config.data.get("use_sliding_window"):
        window = None
    qwen3 = kind.startswith("qwen3")
    return ModelShape(
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
        qk_norm=qwen3,
        sliding_window=window,
        num_experts=moe[0],
        experts_per_token=moe[1],
        moe_intermediate_size=moe[2],
        source=str(config.path),
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
