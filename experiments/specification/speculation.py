"""The keys under `engine.speculation`: who drafts, how many tokens, and what becomes of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from schedlab.experiments.specification.fields import (
    Count,
    Data,
    Finite,
    Named,
    Seconds,
    Section,
    Shorthand,
    shorthand,
    whole,
)

Method = Literal["draft_model", "ngram", "eagle", "mtp"]

_Rate = Annotated[Finite, Field(ge=0, le=1)]


class AcceptanceSpec(Section):
    """Which drafted tokens are accepted: drawn, or as recorded."""

    rate: _Rate | None = Field(
        default=None, description="Chance that a drafted token is accepted if those before it were."
    )
    rates: Annotated[list[_Rate], Field(min_length=1)] | None = Field(
        default=None,
        description="The same for the 1st, 2nd, .. token of a draft; the last for all behind it.",
    )
    spread: Annotated[Finite, Field(ge=0, lt=0.5)] = Field(
        default=0.0,
        description="Standard deviation of the rate from request to request (Beta distribution).",
    )
    recording: str | None = Field(
        default=None,
        min_length=1,
        description="JSON Lines of a run whose drafts were written down; see speculation.md.",
    )

    @model_validator(mode="after")
    def _says_one(self) -> AcceptanceSpec:
        given = [key for key in ("rate", "rates", "recording") if getattr(self, key) is not None]
        if len(given) != 1:
            said = " and ".join(given) or "none"
            raise ValueError(f"give one of rate, rates and recording, got {said}")
        if self.recording is not None and self.spread:
            raise ValueError("spread is of drawn acceptance, not of a recording")
        return self


def _acceptance(value: object) -> object:
    is_rate = isinstance(value, int | float) and not isinstance(value, bool)
    return {"rate": value} if is_rate else value


_RATE: Data = {"type": "number", "minimum": 0, "maximum": 1}
AcceptanceField = Annotated[AcceptanceSpec, Shorthand(_acceptance, _RATE)]


class DraftLengthSpec(Named):
    """How many tokens to draft, e.g. `fixed` or `{name: by_batch_size, schedule: [[32, 0]]}`."""

    name: str = Field(min_length=1, description="A registered draft length, or `module:Class`.")


class SpeculationSpec(Section):
    """Several tokens a step: some are drafted, and the model verifies them at once."""

    method: Method = Field(
        description="Who drafts: another model, a look-up of the last tokens in what came before, "
        "or layers on top of the model (EAGLE, multi-token prediction)."
    )
    num_speculative_tokens: Annotated[int, Field(ge=1, le=64), BeforeValidator(whole)] = Field(
        description="Most tokens drafted for a request in a step."
    )
    acceptance: AcceptanceField | None = Field(
        default=None,
        description="Which of them the simulation accepts: a rate, or a mapping.",
    )
    draft_length: Annotated[DraftLengthSpec, shorthand("name")] = Field(
        default_factory=lambda: DraftLengthSpec(name="fixed"),
        description="How many tokens are drafted for whom; see speculation.md.",
    )
    model: str | None = Field(
        default=None,
        min_length=1,
        description="The draft model of `draft_model`: a known one, or a config.json.",
    )
    num_layers: Count | None = Field(
        default=None, description="Layers of `eagle` and `mtp`; 1 if absent."
    )
    request_s: Seconds | None = Field(
        default=None,
        description="Seconds of CPU that `ngram` takes for a request in a step; 20 us if absent.",
    )
    prompt_lookup_min: Count = Field(
        default=2, description="Fewest tokens that `ngram` must find again, on the real backend."
    )
    prompt_lookup_max: Count = Field(
        default=4, description="Most tokens that `ngram` looks for, on the real backend."
    )

    @model_validator(mode="after")
    def _of_its_method(self) -> SpeculationSpec:
        owners: dict[str, tuple[Method, ...]] = {
            "model": ("draft_model",),
            "num_layers": ("eagle", "mtp"),
            "request_s": ("ngram",),
        }
        for key, methods in owners.items():
            if getattr(self, key) is not None and self.method not in methods:
                raise ValueError(f"{key} is of {' and '.join(methods)}, not of {self.method}")
        if self.method == "draft_model" and self.model is None:
            raise ValueError("draft_model needs a model, e.g. model: llama-3.2-1b")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must not exceed prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )
        return self
