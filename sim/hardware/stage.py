"""The stages of a pipeline: which layers of a model are where."""

from __future__ import annotations

import math
from dataclasses import dataclass

from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.dtypes import dtype_bytes, stored_bytes
from schedlab.sim.hardware.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Stage:
    """Successive layers of a model, and what stands before and behind them.

    Attributes
    ----------
    num_layers : int
        How many.
    num_dense_layers : int
        Of a mixture of experts: those of them that have a dense MLP instead.
    is_first : bool
        Whether it has the embedding.
    is_last : bool
        Whether it has the last normalisation, the language-model head and the sampler.
    """

    num_layers: int
    num_dense_layers: int
    is_first: bool
    is_last: bool


def stages(model: ModelShape, count: int) -> tuple[Stage, ...]:
    """Divide a model among the stages of a pipeline, as vLLM does.

    Parameters
    ----------
    model : ModelShape
        The model.
    count : int
        Stages.

    Raises
    ------
    SpecError
        If there are fewer layers than stages.

    Notes
    -----
    ``num_layers // count`` layers each; of those left over one each goes to the last stage but one
    and further to the front, because the last stage has the head beside its layers. Source: vLLM
    0.32, vllm/distributed/utils.py, get_pp_indices().

    Examples
    --------
    >>> from schedlab.sim.hardware.models import model
    >>> [stage.num_layers for stage in stages(model("llama-3.1-70b"), 3)]
    [27, 27, 26]
    """
    if not 1 <= count <= model.num_layers:
        raise SpecError(
            f"pipeline_parallel_size {count}: {model.name} has {model.num_layers} layers to "
            f"divide; from 1 to {model.num_layers} stages are possible"
        )
    each, left = divmod(model.num_layers, count)
    divided: list[Stage] = []
    before = 0
    for place in range(count):
        num_layers = each + (1 if count - 1 - left <= place < count - 1 else 0)
        after = before + num_layers
        dense = model.num_dense_among_first(after) - model.num_dense_among_first(before)
        divided.append(Stage(num_layers, dense, place == 0, place == count - 1))
        before = after
    return tuple(divided)


def stage_weight_bytes(model: ModelShape, stage: Stage, weight_dtype: str) -> int:
    """Return the bytes of the weights of a stage, over all its devices.

    Those of all stages add up to `ModelShape.weight_bytes`, but for an embedding that is the head
    as well, which the first and the last stage both have.

    Parameters
    ----------
    model : ModelShape
        The model.
    stage : Stage
        A part of it.
    weight_dtype : str
        As for `ModelShape.weight_bytes`.
    """
    mixtures = stage.num_layers - stage.num_dense_layers if model.num_experts else 0
    mixture = model.num_experts * model.expert_parameters
    mixture += model.mlp_parameters(model.shared_intermediate_size)
    matrices = stage.num_layers * model.attention_parameters + mixtures * mixture
    matrices += (stage.num_layers - mixtures) * model.mlp_parameters(model.intermediate_size)
    norm = model.num_norm_vectors * model.hidden_size
    others = mixtures * model.num_experts * model.hidden_size
    others += stage.num_layers * (2 * norm + (2 * model.head_dim if model.qk_norm else 0))
    if stage.is_first:
        others += (model.vocab_size + model.num_position_embeddings) * model.hidden_size
    if stage.is_last:
        has_table = stage.is_first and model.tied_embeddings
        others += norm + (0 if has_table else model.vocab_size * model.hidden_size)
    if dtype_bytes(weight_dtype) >= 2:
        return math.ceil((matrices + others) * dtype_bytes(weight_dtype))
    return math.ceil(matrices * stored_bytes(weight_dtype) + 2 * others)
