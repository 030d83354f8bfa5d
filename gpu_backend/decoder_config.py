"""What the decoder needs beside its dimensions: rotary base, scaling, normalisation constant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schedlab.sim.errors import SpecError
from schedlab.sim.files import read_json_object
from schedlab.sim.hardware.model_shape import ModelShape
from schedlab.sim.hardware.models import model


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretching of the slow rotary frequencies (``rope_type: llama3``).

    Attributes
    ----------
    factor, low_freq_factor, high_freq_factor : float
        As in config.json.
    original_max_position_embeddings : int
        Context length before stretching.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A Llama-style decoder that this backend can run.

    Attributes
    ----------
    shape : ModelShape
        Dimensions: dense, gated MLP, RMSNorm, rotary positions, full attention.
    rope_theta : float
        Base of the rotary frequencies.
    rope_scaling : RopeScaling or None
        Stretching of the frequencies.
    rms_norm_eps : float
        Added to the mean square in every normalisation.

    Raises
    ------
    SpecError
        If the shape is of another architecture.
    """

    shape: ModelShape
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        shape = self.shape
        unsupported = {
            "a mixture of experts": shape.num_experts > 0,
            "a plain MLP": shape.mlp == "plain",
            "learned positions": shape.num_position_embeddings > 0,
            "LayerNorm": shape.num_norm_vectors != 1,
            "a sliding window": shape.sliding_window is not None,
            "an odd head_dim": shape.head_dim % 2 == 1,
        }
        reasons = [reason for reason, applies in unsupported.items() if applies]
        if reasons:
            raise SpecError(
                f"the real backend cannot run {shape.name}: it has {', '.join(reasons)}; "
                f"llama, mistral (v0.3 and later), qwen2.5 and qwen3 models run"
            )


def decoder_config(name: str) -> DecoderConfig:
    """Return the decoder of a model name or of a Hugging Face ``config.json``.

    Parameters
    ----------
    name : str
        As for `schedlab.sim.hardware.models.model`.

    Raises
    ------
    SpecError
        If the model is unknown, of another architecture, or scales positions in a way that is
        not implemented.

    Notes
    -----
    A model of the table has no weights of its own, so it runs with the defaults; they change no
    step time. A config.json gives its own constants.
    """
    shape = model(name)
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if shape.source != str(path):
        return DecoderConfig(shape=shape)
    data = read_json_object(path)
    # transformers 5 keeps the rotary constants in `rope_parameters`.
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    theta = rope.get("rope_theta", data.get("rope_theta", 10_000.0))
    return DecoderConfig(
        shape=shape,
        rope_theta=_number(path, "rope_theta", theta),
        rope_scaling=_scaling(path, rope),
        rms_norm_eps=_number(path, "rms_norm_eps", data.get("rms_norm_eps", 1e-6)),
    )


def _scaling(path: Path, rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise SpecError(f"{path}: rope_type {kind!r} is not supported; known: default, llama3")
    keys = ("factor", "low_freq_factor", "high_freq_factor")
    for key in (*keys, "original_max_position_embeddings"):
        if key not in rope:
            raise SpecError(f"{path}: rope_scaling: key {key!r} is missing")
    factor, low, high = (_number(path, key, rope[key]) for key in keys)
    return RopeScaling(
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )


def _number(path: Path, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise SpecError(f"{path}: {key} must be a number above 0, got {value!r}")
    return float(value)
