"""Shapes of language models: what memory and step time depend on, not their weights."""

# ruff: noqa: E501  (a table reads best as a table)

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.hardware.dtypes import dtype_bytes, stored_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The dimensions of a decoder-only transformer.

    Biases are ignored: they are less than 0.1 % of the parameters of any model in the table.

    Attributes
    ----------
    name : str
        How results name the model.
    num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, vocab_size : int
        Dimensions, with Hugging Face's meaning. `intermediate_size` is that of a dense MLP.
    max_model_len : int
        Longest sequence (prompt + output) the model was built for, tokens.
    source : str
        Where the numbers come from.
    mlp : {"gated", "plain"}
        Three matrices (gate, up, down) or two (up, down).
    tied_embeddings : bool
        Whether the language-model head is the embedding matrix.
    qk_norm : bool
        Whether queries and keys are normalised per head (Qwen3).
    num_position_embeddings : int
        Rows of a learned position table (OPT); 0 for rotary positions.
    num_norm_vectors : int
        Vectors of `hidden_size` in one normalisation: 1 for RMSNorm, 2 for LayerNorm.
    sliding_window : int or None
        Attention window in tokens, if every layer has one.
    num_experts, experts_per_token, moe_intermediate_size : int
        Mixture of experts in every layer; all 0 for a dense model.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    source: str
    mlp: Literal["gated", "plain"] = "gated"
    tied_embeddings: bool = False
    qk_norm: bool = False
    num_position_embeddings: int = 0
    num_norm_vectors: int = 1
    sliding_window: int | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0

    def __post_init__(self) -> None:
        for key in (
            "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim",
            "vocab_size", "max_model_len",
        ):  # fmt: skip
            if getattr(self, key) < 1:
                raise SpecError(f"model {self.name}: {key} must be >= 1, got {getattr(self, key)}")
        if self.num_heads % self.num_kv_heads:
            raise SpecError(
                f"model {self.name}: num_heads {self.num_heads} is not a multiple of "
                f"num_kv_heads {self.num_kv_heads}"
            )
        moe = (self.num_experts, self.experts_per_token, self.moe_intermediate_size)
        if any(moe) and not (all(n > 0 for n in moe) and moe[1] <= moe[0]):
            raise SpecError(
                f"model {self.name}: num_experts, experts_per_token and moe_intermediate_size go "
                f"together, experts_per_token <= num_experts; got {moe}"
            )
        if not self.num_experts and self.intermediate_size < 1:
            raise SpecError(f"model {self.name}: intermediate_size must be >= 1")

    @property
    def num_mlp_matrices(self) -> int:
        """Matrices of one MLP (or expert): 3 gated, 2 plain."""
        return 3 if self.mlp == "gated" else 2

    @property
    def attention_parameters(self) -> int:
        """Parameters of the q, k, v and o projections of one layer."""
        width = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return self.hidden_size * width

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert, or of the dense MLP of one layer."""
        width = self.moe_intermediate_size if self.num_experts else self.intermediate_size
        return self.num_mlp_matrices * self.hidden_size * width

    @property
    def num_parameters(self) -> int:
        """Parameters without biases: embeddings, layers, normalisations and an untied head."""
        experts = max(self.num_experts, 1) * self.expert_parameters
        router = self.num_experts * self.hidden_size
        norms = 2 * self.num_norm_vectors * self.hidden_size
        norms += 2 * self.head_dim if self.qk_norm else 0
        layer = self.attention_parameters + experts + router + norms
        tables = self.vocab_size * (1 if self.tied_embeddings else 2) + self.num_position_embeddings
        final_norm = self.num_norm_vectors * self.hidden_size
        return self.num_layers * layer + tables * self.hidden_size + final_norm

    def weight_bytes(self, weight_dtype: str = "bf16") -> int:
        """Return the bytes of all weights.

        Parameters
        ----------
        weight_dtype : str
            Format of the matrices of the layers. Where it has less than 16 bits, the scales of 4-bit
            formats are counted, and all other weights have 16 bits, as in quantised checkpoints.

        Examples
        --------
        >>> model("llama-3-8b").weight_bytes("bf16"), model("llama-3-8b").weight_bytes("int4")
        (16060522496, 5701115904)
        """
        if dtype_bytes(weight_dtype) >= 2:
            return math.ceil(self.num_parameters * dtype_bytes(weight_dtype))
        experts = max(self.num_experts, 1) * self.expert_parameters
        matrices = self.num_layers * (self.attention_parameters + experts)
        others = 2 * (self.num_parameters - matrices)
        return math.ceil(matrices * stored_bytes(weight_dtype) + others)

    def routed_expert_bytes(self, weight_dtype: str = "bf16") -> int:
        """Return the bytes of the experts of all layers; 0 for a dense model."""
        experts = self.num_layers * self.num_experts * self.expert_parameters
        return math.ceil(experts * stored_bytes(weight_dtype)) if self.num_experts else 0

    def kv_bytes_per_token(self, dtype: str = "bf16", tensor_parallel_size: int = 1) -> int:
        """Return the KV cache bytes of one token on one GPU.

        Parameters
        ----------
        dtype : str
            Format of the cache.
        tensor_parallel_size : int
            GPUs that share the heads. With fewer KV heads than GPUs the heads are replicated.

        Notes
        -----
        ``2 * num_layers * ceil(num_kv_heads / tp) * head_dim * bytes``; scales of a quantised
        cache are not counted.

        Examples
        --------
        >>> model("llama-2-7b").kv_bytes_per_token("fp16")
        524288
        """
        heads = math.ceil(self.num_kv_heads / tensor_parallel_size)
        return math.ceil(2 * self.num_layers * heads * self.head_dim * dtype_bytes(dtype))


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
    _llama("llama-2-7b",     32,  4096,  32,  32, 11008,  32000,   4096, "Llama-2-7b-hf"),
    _llama("llama-2-13b",    40,  5120,  40,  40, 13824,  32000,   4096, "Llama-2-13b-hf"),
    _llama("llama-2-70b",    80,  8192,  64,   8, 28672,  32000,   4096, "Llama-2-70b-hf"),
    _llama("codellama-34b",  48,  8192,  64,   8, 22016,  32000,  16384, "CodeLlama-34b-hf"),
    _llama("llama-3-8b",     32,  4096,  32,   8, 14336, 128256,   8192, "Meta-Llama-3-8B"),
    _llama("llama-3-70b",    80,  8192,  64,   8, 28672, 128256,   8192, "Meta-Llama-3-70B"),
    _llama("llama-3.1-8b",   32,  4096,  32,   8, 14336, 128256, 131072, "Llama-3.1-8B"),
    _llama("llama-3.1-70b",  80,  8192,  64,   8, 28672, 128256, 131072, "Llama-3.1-70B"),
    _llama("llama-3.2-1b",   16,  2048,  32,   8,  8192, 128256, 131072, "Llama-3.2-1B", tied=True),
    _llama("llama-3.2-3b",   28,  3072,  24,   8,  8192, 128256, 131072, "Llama-3.2-3B", tied=True),
    _llama("qwen2.5-0.5b",   24,   896,  14,   2,  4864, 151936,  32768, "Qwen2.5-0.5B-Instruct", tied=True),
    _llama("qwen2.5-1.5b",   28,  1536,  12,   2,  8960, 151936,  32768, "Qwen2.5-1.5B-Instruct", tied=True),
    _llama("qwen2.5-3b",     36,  2048,  16,   2, 11008, 151936,  32768, "Qwen2.5-3B-Instruct", tied=True),
    _llama("qwen2.5-7b",     28,  3584,  28,   4, 18944, 152064,  32768, "Qwen2.5-7B-Instruct"),
    _llama("qwen2.5-14b",    48,  5120,  40,   8, 13824, 152064,  32768, "Qwen2.5-14B-Instruct"),
    _llama("qwen2.5-32b",    64,  5120,  40,   8, 27648, 152064,  32768, "Qwen2.5-32B-Instruct"),
    _llama("qwen2.5-72b",    80,  8192,  64,   8, 29568, 152064,  32768, "Qwen2.5-72B-Instruct"),
    _qwen3("qwen3-0.6b",     28,  1024,  16,   8,  3072, 151936,  40960, "Qwen3-0.6B", tied=True),
    _qwen3("qwen3-1.7b",     28,  2048,  16,   8,  6144, 151936,  40960, "Qwen3-1.7B", tied=True),
    _qwen3("qwen3-4b",       36,  2560,  32,   8,  9728, 151936,  40960, "Qwen3-4B", tied=True),
    _qwen3("qwen3-8b",       36,  4096,  32,   8, 12288, 151936,  40960, "Qwen3-8B"),
    _qwen3("qwen3-14b",      40,  5120,  40,   8, 17408, 151936,  40960, "Qwen3-14B"),
    _qwen3("qwen3-32b",      64,  5120,  64,   8, 25600, 151936,  40960, "Qwen3-32B"),
    _qwen3("qwen3-30b-a3b",  48,  2048,  32,   4,  6144, 151936,  40960, "Qwen3-30B-A3B",
           num_experts=128, experts_per_token=8, moe_intermediate_size=768),
    _qwen3("qwen3-30b-a3b-instruct-2507", 48, 2048, 32, 4, 6144, 151936, 262144,
           "Qwen3-30B-A3B-Instruct-2507",
           num_experts=128, experts_per_token=8, moe_intermediate_size=768),
    _llama("mistral-7b-v0.1",32, 4096,  32,   8, 14336,  32000,  32768, "Mistral-7B-v0.1",
           sliding_window=4096),
    _llama("mistral-7b",     32,  4096,  32,   8, 14336,  32768,  32768, "Mistral-7B-v0.3"),
    _llama("mistral-nemo-12b", 40, 5120, 32,   8, 14336, 131072, 131072, "Mistral-Nemo-Instruct-2407",
           head_dim=128),
    _llama("yi-34b",         60,  7168,  56,   8, 20480,  64000,   4096, "Yi-34B"),
    _llama("mixtral-8x7b",   32,  4096,  32,   8, 14336,  32000,  32768, "Mixtral-8x7B-v0.1",
           num_experts=8, experts_per_token=2, moe_intermediate_size=14336),
    _llama("mixtral-8x22b",  56,  6144,  48,   8, 16384,  32768,  65536, "Mixtral-8x22B-Instruct-v0.1",
           num_experts=8, experts_per_token=2, moe_intermediate_size=16384),
    _opt("opt-125m", 12, 768, 12),
    _opt("opt-1.3b", 24, 2048, 32),
    _opt("opt-6.7b", 32, 4096, 32),
    _opt("opt-13b", 40, 5120, 40),
    _opt("opt-30b", 48, 7168, 56),
    _opt("opt-66b", 64, 9216, 72),
    _own("schedlab-tiny", 2, 64, 4, 2, 128, 512),
    _own("schedlab-small", 8, 512, 8, 4, 1408, 8192),
)}
# fmt: on

_ALIASES = {
    "llama-3.3-70b": "llama-3.1-70b",
    "mistral-7b-v0.3": "mistral-7b",
    "mistral-nemo-base-2407": "mistral-nemo-12b",
    "mistral-nemo-instruct-2407": "mistral-nemo-12b",
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
    "mixtral-8x22b-v0.1": "mixtral-8x22b",
}


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
        If the name is unknown (with the nearest name), or the file is unusable (naming the key).

    Examples
    --------
    >>> model("llama-3-8b").num_parameters
    8030261248
    """
    key = canonical_model(name)
    if key in _TABLE:
        return _TABLE[key]
    path = Path(name)
    if path.suffix == ".json" or path.is_dir():
        from schedlab.sim.hardware.model_config import read_config

        return read_config(path / "config.json" if path.is_dir() else path)
    hint = nearest(key, [*_TABLE, *_ALIASES])
    raise SpecError(f"model {name!r} is unknown; {hint} (or the path of a config.json)")


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
