"""Shapes of language models: what memory and step time depend on, not their weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from schedlab.sim.errors import SpecError
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
        Attention window in tokens, if layers have one that typical contexts fit into.
    num_experts, experts_per_token, moe_intermediate_size : int
        Mixture of experts; all 0 for a dense model.
    shared_intermediate_size : int
        Width of the experts that every token takes beside those chosen for it, all together.
    num_dense_layers : int
        Layers of a mixture that have a dense MLP instead of experts: its first.
    moe_layer_step : int
        Above 1, dense layers lie between the others: the last one of so many has experts.
    repository : str
        Where huggingface.co has it; empty where that is not known.
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
    shared_intermediate_size: int = 0
    num_dense_layers: int = 0
    moe_layer_step: int = 1
    repository: str = field(default="", compare=False)

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
        if self.num_experts:
            if not 0 <= self.num_dense_layers < self.num_layers:
                raise SpecError(
                    f"model {self.name}: num_dense_layers must be less than its {self.num_layers} "
                    f"layers, got {self.num_dense_layers}"
                )
            step = self.moe_layer_step
            if step < 1:
                raise SpecError(f"model {self.name}: moe_layer_step must be >= 1, got {step}")
            dense = self.num_dense_among_first(self.num_layers)
            if self.num_dense_layers != dense:
                raise SpecError(
                    f"model {self.name}: with moe_layer_step {step} {dense} of its "
                    f"{self.num_layers} layers are dense, got num_dense_layers "
                    f"{self.num_dense_layers}"
                )
        elif self.shared_intermediate_size or self.num_dense_layers or self.moe_layer_step != 1:
            raise SpecError(
                f"model {self.name}: shared_intermediate_size, num_dense_layers and "
                "moe_layer_step are of a mixture of experts, which it is not"
            )
        if (self.num_dense_layers or not self.num_experts) and self.intermediate_size < 1:
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
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    def num_dense_among_first(self, num_layers: int) -> int:
        """Return how many of its first layers have a dense MLP instead of experts."""
        if self.moe_layer_step > 1:
            return num_layers - num_layers // self.moe_layer_step
        return min(self.num_dense_layers, num_layers)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert; 0 for a dense model."""
        return self.mlp_parameters(self.moe_intermediate_size)

    def mlp_parameters(self, width: int) -> int:
        """Return the parameters of an MLP of some width."""
        return self.num_mlp_matrices * self.hidden_size * width

    def matrix_parameters(self, num_experts: int) -> int:
        """Return the parameters of the matrices of all layers, but for those that choose experts.

        Parameters
        ----------
        num_experts : int
            Of the experts of a layer, as many: `num_experts` for all that is stored,
            `experts_per_token` for what one token is multiplied with.
        """
        mixture = num_experts * self.expert_parameters
        mixture += self.mlp_parameters(self.shared_intermediate_size)
        dense = (self.num_layers - self.num_moe_layers) * self.mlp_parameters(
            self.intermediate_size
        )
        return self.num_layers * self.attention_parameters + self.num_moe_layers * mixture + dense

    @property
    def num_parameters(self) -> int:
        """Parameters without biases: embeddings, layers, normalisations and an untied head."""
        matrices = self.matrix_parameters(self.num_experts)
        routers = self.num_moe_layers * self.num_experts * self.hidden_size
        norms = 2 * self.num_norm_vectors * self.hidden_size
        norms += 2 * self.head_dim if self.qk_norm else 0
        tables = self.vocab_size * (1 if self.tied_embeddings else 2) + self.num_position_embeddings
        final_norm = self.num_norm_vectors * self.hidden_size
        return matrices + routers + self.num_layers * norms + tables * self.hidden_size + final_norm

    def weight_bytes(self, weight_dtype: str = "bf16") -> int:
        """Return the bytes of all weights.

        Parameters
        ----------
        weight_dtype : str
            Format of the matrices of the layers. Where it has less than 16 bits, the scales of
            4-bit formats are counted, and all other weights have 16 bits, as in quantised
            checkpoints.

        Examples
        --------
        >>> from schedlab.sim.hardware.models import model
        >>> model("llama-3-8b").weight_bytes("bf16"), model("llama-3-8b").weight_bytes("int4")
        (16060522496, 5701115904)
        """
        if dtype_bytes(weight_dtype) >= 2:
            return math.ceil(self.num_parameters * dtype_bytes(weight_dtype))
        matrices = self.matrix_parameters(self.num_experts)
        others = 2 * (self.num_parameters - matrices)
        return math.ceil(matrices * stored_bytes(weight_dtype) + others)

    def routed_expert_bytes(self, weight_dtype: str = "bf16") -> int:
        """Return the bytes of the experts of all layers that are chosen; 0 for a dense model."""
        experts = self.num_moe_layers * self.num_experts * self.expert_parameters
        return math.ceil(experts * stored_bytes(weight_dtype))

    def kv_bytes_per_token(
        self, dtype: str = "bf16", tensor_parallel_size: int = 1, num_layers: int | None = None
    ) -> int:
        """Return the KV cache bytes of one token on one GPU.

        Parameters
        ----------
        dtype : str
            Format of the cache.
        tensor_parallel_size : int
            GPUs that share the heads. With fewer KV heads than GPUs the heads are replicated.
        num_layers : int or None
            Layers that the GPU has; all if not given.

        Notes
        -----
        ``2 * num_layers * ceil(num_kv_heads / tp) * head_dim * bytes``; scales of a quantised
        cache are not counted.

        Examples
        --------
        >>> from schedlab.sim.hardware.models import model
        >>> model("llama-2-7b").kv_bytes_per_token("fp16")
        524288
        """
        heads = math.ceil(self.num_kv_heads / tensor_parallel_size)
        layers = self.num_layers if num_layers is None else num_layers
        return math.ceil(2 * layers * heads * self.head_dim * dtype_bytes(dtype))
