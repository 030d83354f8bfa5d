"""Speculative decoding as a specification asks for it, with every name in it looked up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.speculation import SpeculationSpec
from schedlab.policies.speculation import registry
from schedlab.policies.speculation.draft_length import DraftLength
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.pipeline_executor import PipelineExecutor
from schedlab.sim.core.speculative_executor import Acceptance, SpeculativeExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.memory import MemoryBudget
from schedlab.sim.hardware.models import model
from schedlab.sim.speculation.acceptance import DrawnAcceptance
from schedlab.sim.speculation.drafters import (
    ModelDrafter,
    NgramDrafter,
    blocks_beside,
    draft_head,
    draft_model,
)
from schedlab.sim.speculation.recording import RecordedAcceptance

NGRAM_REQUEST_S = 20e-6
"""CPU time of a prompt look-up in a context of a few thousand tokens; an assumption, not measured
on a server."""


@dataclass(frozen=True)
class Speculation:
    """Who drafts, and how many tokens.

    Attributes
    ----------
    spec : SpeculationSpec
        What was asked for.
    drafter : NgramDrafter or ModelDrafter
        What drafts take.
    """

    spec: SpeculationSpec
    drafter: NgramDrafter | ModelDrafter

    @property
    def num_lookahead_tokens(self) -> int:
        """KV slots beyond the verified tokens, as vLLM gives them to drafters with a cache."""
        return 0 if self.spec.method == "ngram" else self.spec.num_speculative_tokens

    @property
    def cached_drafter(self) -> str | None:
        """Who drafts with KV of its own, told from others by what that is; None if nobody."""
        asked = self.spec
        if asked.method == "ngram":
            return None
        name = (
            asked.model if asked.method == "draft_model" else f"of {asked.num_layers or 1} layers"
        )
        return f"{asked.method} {name}"

    def num_blocks(self, memory: MemoryBudget) -> int:
        """Count the KV blocks that fit beside the drafter.

        Raises
        ------
        SpecError
            If none does.
        """
        try:
            return blocks_beside(self.drafter, memory)
        except SpecError as error:
            raise SpecError(f"engine.speculation: {error}") from None

    def draft_length(self) -> DraftLength | None:
        """Return who chooses how many tokens to draft; None if that never changes."""
        chosen = self.spec.draft_length
        if chosen.name == "fixed":
            return None
        return registry.make(chosen.name, **chosen.knobs)


def resolve_speculation(spec: ExperimentSpec, where: Deployment) -> Speculation | None:
    """Return what a specification says of speculation, None if nothing.

    Raises
    ------
    SpecError
        If a draft cannot be of use to the model, or engines cannot speculate here.
    """
    asked = spec.engine.speculation
    if asked is None:
        return None
    try:
        return Speculation(asked, _drafter(asked, where))
    except SpecError as error:
        raise SpecError(f"engine.speculation: {error}") from None


def _drafter(asked: SpeculationSpec, where: Deployment) -> NgramDrafter | ModelDrafter:
    num_layers = asked.num_layers or 1
    if asked.method == "ngram":
        return NgramDrafter(NGRAM_REQUEST_S if asked.request_s is None else asked.request_s)
    if asked.method == "draft_model":
        return draft_model(where, model(str(asked.model)))
    return draft_head(where, num_layers, 1 if asked.method == "mtp" else num_layers)


def simulated_gpu(
    pricing: Pricing, config: EngineConfig, speculation: Speculation | None, seed: int
) -> SimExecutor:
    """Return a simulated GPU, with drafts if there is speculation.

    Raises
    ------
    SpecError
        If nothing says what becomes of drafts.
    """
    if speculation is None:
        return (
            PipelineExecutor(pricing) if config.pipeline_parallel_size > 1 else SimExecutor(pricing)
        )
    acceptance = _acceptance(speculation.spec, seed)
    return SpeculativeExecutor(pricing, config, acceptance, speculation.drafter)


def _acceptance(asked: SpeculationSpec, seed: int) -> Acceptance:
    chosen = asked.acceptance
    if chosen is None:
        raise SpecError(
            "engine.speculation: the simulation does not know which drafts are accepted; say, "
            "e.g., acceptance: 0.7"
        )
    key = "recording" if chosen.recording is not None else "spread"
    try:
        if chosen.recording is not None:
            return RecordedAcceptance(Path(chosen.recording))
        rates = [chosen.rate] if chosen.rate is not None else chosen.rates
        return _drawn(tuple(rates or ()), chosen.spread, seed)
    except SpecError as error:
        raise SpecError(f"engine.speculation.acceptance.{key}: {error}") from None


@lru_cache(maxsize=8)
def _drawn(rates: tuple[float, ...], spread: float, seed: int) -> DrawnAcceptance:
    """Return one for all engines of a fleet: it draws for several requests at once."""
    return DrawnAcceptance(rates, spread, seed)
