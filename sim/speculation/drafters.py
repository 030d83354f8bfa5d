"""What making drafts takes: time in each step, and memory beside the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.roofline import RooflineCostModel
from schedlab.sim.cost.shape import BatchShape, UnevenSteps
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.memory import MemoryBudget
from schedlab.sim.hardware.model_shape import ModelShape

_GIB = 1024**3


@dataclass(frozen=True)
class NgramDrafter:
    """Looks for the last tokens in what came before them, on the host (prompt lookup).

    Parameters
    ----------
    request_s : float
        Seconds of CPU for each request with drafts, one after the other.
    """

    request_s: float

    reads_contexts = False
    weight_bytes = 0
    kv_bytes_per_token = 0
    whole_kv_bytes_per_token = 0

    def step_ns(
        self, verified: BatchShape, drafts: int, rows: list[int], met_tokens: Sequence[int] = ()
    ) -> int:
        """Return what a step spends on drafts; see `speculative_executor.Drafter`."""
        return int(self.request_s * 1e9 + 0.5) * (rows[0] if rows else 0)

    def pass_tokens(self, verified: BatchShape, rows: list[int]) -> list[int]:
        """Return no pass: no model drafts."""
        return []

    def uneven_ns(self, steps: UnevenSteps, drafts: int, rows: list[list[int]]) -> list[int]:
        """Return what each of some steps spends; see `speculative_executor.Drafter`."""
        request_ns = int(self.request_s * 1e9 + 0.5)
        return [request_ns * of_step[0] for of_step in rows]


@dataclass(frozen=True)
class ModelDrafter:
    """A smaller model, or layers on top of the model, with a KV cache of their own.

    Parameters
    ----------
    cost_model : CostModel
        What it takes.
    weight_bytes, kv_bytes_per_token : int
        Its memory on one device.
    whole_kv_bytes_per_token : int
        That on all of them, of which each part counts once: what goes to another engine.

    Notes
    -----
    As in vLLM, its first pass computes all tokens of the step, prompts and drafts to be verified
    among them, so that its KV cache follows that of the model; each further one a token a request.
    All passes of a step follow each other and nothing else runs meanwhile. While nothing is drafted
    it does not run; what it then lacks in its cache is not made up for. Where engines share its
    experts, those get the tokens of all engines in each pass.
    """

    cost_model: CostModel
    weight_bytes: int
    kv_bytes_per_token: int
    whole_kv_bytes_per_token: int

    reads_contexts = True

    def step_ns(
        self, verified: BatchShape, drafts: int, rows: list[int], met_tokens: Sequence[int] = ()
    ) -> int:
        """Return what a step spends on drafts; see `speculative_executor.Drafter`."""
        price = self.cost_model.step_ns
        context, num_decodes = verified.decode_context_sum_tokens, verified.num_decodes
        total = 0
        if _runs_first(verified, rows):
            # Of the drafts to be verified none is continued here.
            first = replace(
                verified,
                swapped_bytes=0,
                rows_sampled=verified.rows_sampled - drafts,
                gathered_tokens=met_tokens[0] if met_tokens else 0,
            )
            total = price(first)[0]
        for i, count in enumerate(rows[1:], 1):
            if not count:
                break
            read = context * count // num_decodes + i * count
            total += price(
                BatchShape(
                    num_decodes=count,
                    decode_context_sum_tokens=read,
                    decode_context_max_tokens=verified.decode_context_max_tokens + i,
                    rows_sampled=count,
                    decode_context_min_tokens=verified.decode_context_min_tokens + i,
                    gathered_tokens=met_tokens[i] if met_tokens else 0,
                )
            )[0]
        return total

    def pass_tokens(self, verified: BatchShape, rows: list[int]) -> list[int]:
        """Return the new tokens of each pass; see `speculative_executor.Drafter`."""
        first = verified.num_new_tokens if _runs_first(verified, rows) else 0
        return [first, *rows[1:]]

    def uneven_ns(self, steps: UnevenSteps, drafts: int, rows: list[list[int]]) -> list[int]:
        """Return what each of some steps spends; see `speculative_executor.Drafter`."""
        shapes = steps.shapes()
        return [self.step_ns(shapes[i], drafts, of_step) for i, of_step in enumerate(rows)]


def _runs_first(verified: BatchShape, rows: list[int]) -> bool:
    """Whether the model that drafts computes the tokens of a step."""
    return bool(verified.chunks) or (len(rows) > 0 and rows[0] > 0)


def draft_model(target: Deployment, draft: ModelShape) -> ModelDrafter:
    """Return a drafter that is a model of its own, on the devices of the other.

    Raises
    ------
    SpecError
        If their vocabularies differ.
    """
    if draft.vocab_size != target.model.vocab_size:
        raise SpecError(
            f"{draft.name} has a vocabulary of {draft.vocab_size} tokens, {target.model.name} one "
            f"of {target.model.vocab_size}: its drafts cannot be verified"
        )
    return _drafter(target, draft, _weight_bytes(target, draft))


def draft_head(target: Deployment, num_layers: int, layers_per_pass: int) -> ModelDrafter:
    """Return a drafter of layers on top of the model (EAGLE, multi-token prediction).

    Parameters
    ----------
    target : Deployment
        The model, on its devices.
    num_layers : int
        Layers like those of the model.
    layers_per_pass : int
        How many of them a pass computes: all (EAGLE), or the one of the token to draft (MTP).

    Notes
    -----
    Each pass joins two hidden vectors to one, computes its layers and the head of the model, which
    it shares, as it shares the embeddings. The joining product of 2 h^2 weights is counted as a
    wider MLP of the same size.
    """
    model = target.model
    wider = -(-2 * model.hidden_size // model.num_mlp_matrices)
    width = model.intermediate_size + (0 if model.num_experts else wider)
    layer = replace(
        model,
        name=f"{model.name} draft head",
        num_layers=layers_per_pass,
        intermediate_size=width,
    )
    bare = replace(layer, num_layers=num_layers)
    tables = model.vocab_size * (1 if model.tied_embeddings else 2) + model.num_position_embeddings
    shared = 2.0 * tables * model.hidden_size
    drafter = _drafter(target, layer, _weight_bytes(target, bare, shared))
    kv, whole = _kv_bytes(target, bare)
    return replace(drafter, kv_bytes_per_token=kv, whole_kv_bytes_per_token=whole)


def _drafter(target: Deployment, model: ModelShape, weight_bytes: int) -> ModelDrafter:
    where = replace(target, model=model, config=None)
    return ModelDrafter(RooflineCostModel(where), weight_bytes, *_kv_bytes(target, model))


def _weight_bytes(target: Deployment, model: ModelShape, without: float = 0.0) -> int:
    """Return the bytes of a drafter's weights on one device, but for some that it need not hold."""
    stored = target.stored_dtype
    elsewhere = model.routed_expert_bytes(stored) * (1 - 1 / target.data_parallel_size)
    return int((model.weight_bytes(stored) - without - elsewhere) / target.tensor_parallel_size)


def _kv_bytes(target: Deployment, model: ModelShape) -> tuple[int, int]:
    """Return the bytes of a token's KV on one device, and on all of them together."""
    return (
        model.kv_bytes_per_token(target.kv_dtype, target.tensor_parallel_size),
        model.kv_bytes_per_token(target.kv_dtype, 1),
    )


def blocks_beside(drafter: NgramDrafter | ModelDrafter, memory: MemoryBudget) -> int:
    """Count the KV blocks that fit beside a drafter; each holds its KV of the same tokens, too.

    Raises
    ------
    SpecError
        If none does.
    """
    per_token = memory.kv_bytes_per_token + drafter.kv_bytes_per_token
    num_blocks = (memory.kv_bytes - drafter.weight_bytes) // (per_token * memory.block_size)
    if num_blocks < 1:
        raise SpecError(
            f"the draft does not fit: its weights take {drafter.weight_bytes / _GIB:.1f} GiB on a "
            f"device, and the model leaves {memory.kv_bytes / _GIB:.1f} GiB for them and for KV"
        )
    return num_blocks
