"""Weights of the decoder: seeded random numbers, or a safetensors checkpoint."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from schedlab.gpu_backend.decoder_config import DecoderConfig
from schedlab.sim.errors import SpecError
from schedlab.sim.files import read_json_object

Source = Callable[[str, tuple[int, ...]], Tensor]
"""Gives the tensor of a Hugging Face name, of the given shape."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; projections that read the same input are one matrix.

    Attributes
    ----------
    qkv : Tensor, shape ((num_heads + 2 * num_kv_heads) * head_dim, hidden_size)
    o : Tensor, shape (hidden_size, num_heads * head_dim)
    gate_up : Tensor, shape (2 * intermediate_size, hidden_size)
    down : Tensor, shape (hidden_size, intermediate_size)
    input_norm, mlp_norm : Tensor, shape (hidden_size,)
    q_norm, k_norm : Tensor, shape (head_dim,), or None
    """

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    input_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a decoder, on one device.

    Attributes
    ----------
    embedding, head : Tensor, shape (vocab_size, hidden_size)
        The same tensor if the model ties them.
    layers : tuple of LayerWeights
    norm : Tensor, shape (hidden_size,)
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


def assemble_weights(config: DecoderConfig, source: Source) -> Weights:
    """Collect a decoder's weights tensor by tensor, in Hugging Face's names and shapes.

    Parameters
    ----------
    config : DecoderConfig
        What is needed.
    source : callable
        Called once with each name and its shape, always in the same order.
    """
    shape = config.shape
    hidden, inner, head = shape.hidden_size, shape.intermediate_size, shape.head_dim
    q_rows, kv_rows = shape.num_heads * head, shape.num_kv_heads * head

    def layer(i: int) -> LayerWeights:
        def get(name: str, *size: int) -> Tensor:
            return source(f"model.layers.{i}.{name}.weight", size)

        return LayerWeights(
            qkv=torch.cat([
                get("self_attn.q_proj", q_rows, hidden),
                get("self_attn.k_proj", kv_rows, hidden),
                get("self_attn.v_proj", kv_rows, hidden),
            ]),
            o=get("self_attn.o_proj", hidden, q_rows),
            gate_up=torch.cat([
                get("mlp.gate_proj", inner, hidden), get("mlp.up_proj", inner, hidden),
            ]),
            down=get("mlp.down_proj", hidden, inner),
            input_norm=get("input_layernorm", hidden),
            mlp_norm=get("post_attention_layernorm", hidden),
            q_norm=get("self_attn.q_norm", head) if shape.qk_norm else None,
            k_norm=get("self_attn.k_norm", head) if shape.qk_norm else None,
        )  # fmt: skip

    embedding = source("model.embed_tokens.weight", (shape.vocab_size, hidden))
    layers = tuple(layer(i) for i in range(shape.num_layers))
    norm = source("model.norm.weight", (hidden,))
    tied = shape.tied_embeddings
    output = embedding if tied else source("lm_head.weight", (shape.vocab_size, hidden))
    return Weights(embedding, layers, norm, output)


def random_source(
    config: DecoderConfig, seed: int, device: torch.device, dtype: torch.dtype
) -> Source:
    """Return seeded random tensors under which activations keep their size.

    Notes
    -----
    Matrices are normal with variance ``1 / fan_in``; those that write to the residual stream are
    smaller by ``sqrt(2 * num_layers)``, so that it does not grow with depth. Queries are 4 and
    values 2 times as large: attention then looks at few tokens, and what comes out depends on
    them (without that, every request soon repeats one token, and tests would compare nothing).
    The numbers depend on the device's generator: CPU and CUDA give different weights.
    """
    generator = torch.Generator(device).manual_seed(seed)
    residual = 1.0 / math.sqrt(2 * config.shape.num_layers)
    scales = {"q_proj": 4.0, "v_proj": 2.0, "o_proj": residual, "down_proj": residual}

    def source(name: str, size: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(size, device=device, dtype=dtype)
        if len(size) == 1:
            return tensor.normal_(1.0, 0.1, generator=generator)
        std = scales.get(name.split(".")[-2], 1.0) / math.sqrt(size[1])
        return tensor.normal_(0.0, std, generator=generator)

    return source


def safetensors_source(folder: Path, device: torch.device, dtype: torch.dtype) -> Source:
    """Return the tensors of a Hugging Face checkpoint folder.

    Parameters
    ----------
    folder : Path
        Holds ``model.safetensors``, or shards and ``model.safetensors.index.json``.

    Raises
    ------
    SpecError
        If files or tensors are missing or of another shape, or the model has biases.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise SpecError(f"{folder}: reading weights needs `pip install safetensors`") from error

    files = _files_by_tensor(folder, safe_open)
    biased = next((name for name in files if name.endswith("_proj.bias")), None)
    if biased is not None:
        raise SpecError(f"{folder}: {biased}: projections with biases are not supported")

    def source(name: str, size: tuple[int, ...]) -> Tensor:
        if name not in files:
            near = difflib.get_close_matches(name, files, n=1)
            hint = f" (it has {near[0]})" if near else ""
            raise SpecError(f"{folder}: tensor {name} is missing{hint}")
        with safe_open(files[name], framework="pt", device=str(device)) as file:
            tensor: Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != size:
            raise SpecError(
                f"{files[name]}: {name} has shape {tuple(tensor.shape)}, the model needs {size}"
            )
        return tensor.to(dtype)

    return source


def _files_by_tensor(folder: Path, safe_open: Callable[..., object]) -> dict[str, Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        names = read_json_object(index).get("weight_map")
        if not isinstance(names, dict) or any(
            not isinstance(file, str) or Path(file).name != file for file in names.values()
        ):
            raise SpecError(f"{index}: weight_map must map tensors to names of files beside it")
        return {name: folder / file for name, file in names.items()}
    if not single.exists():
        raise SpecError(f"{folder}: has neither {single.name} nor {index.name}")
    with safe_open(single, framework="pt") as file:  # type: ignore[attr-defined]
        return dict.fromkeys(file.keys(), single)
