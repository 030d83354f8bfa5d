"""The workload section of a specification: which requests arrive, and when."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from schedlab.experiments.specification.arrivals import ArrivalsField
from schedlab.experiments.specification.fields import (
    Count,
    NonNegative,
    Positive,
    Section,
    Shorthand,
    measurable,
    shorthand,
    whole,
)
from schedlab.experiments.specification.lengths import LengthsField
from schedlab.experiments.specification.sessions import DurationsField, SessionsSpec
from schedlab.experiments.specification.traffic_class import TrafficClassSpec


def _rate(value: object) -> object:
    return math.inf if value == "inf" else value


def _all_at_once_or_measurable(value: float) -> float:
    return value if value == math.inf else measurable(value)


Rate = Annotated[
    float,
    Field(gt=0),
    AfterValidator(_all_at_once_or_measurable),
    Shorthand(_rate, {"const": "inf"}),
]


def _pair(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class LoadTestField(Section):
    """A load test known by rates and quantiles, whose requests are drawn anew."""

    file: str = Field(min_length=1, description="JSON of load tests; see benchmark.md.")
    run: str | None = Field(
        default=None, description="Id of the test; may be absent where the file holds one."
    )


class Workload(Section):
    """Which requests arrive, and when."""

    load_test: Annotated[LoadTestField, shorthand("file")] | None = Field(
        default=None,
        description="A load test known by rates and quantiles, instead of a trace: arrivals, "
        "lengths and shared prompts as its generator made them.",
    )
    trace: str | None = Field(
        default=None,
        description="Path of a trace file, or the name of a preset or of a trace that "
        "`schedlab trace fetch` brought.",
    )
    format: str = Field(
        default="auto",
        description="Format of the trace file, or `module:READER`; `auto` detects it.",
    )
    sessions: SessionsSpec | None = Field(
        default=None,
        description="Conversations and agents, drawn instead of a trace: later requests of a "
        "session come when earlier ones are answered.",
    )
    follow_sessions: bool = Field(
        default=False,
        description="Let the requests of a trace that names sessions wait for the answers before "
        "them, instead of coming at their times.",
    )
    session_rate: Rate | None = Field(
        default=None,
        description="Sessions per second, starts redrawn as Poisson; `.inf` is all at once; if "
        "absent the trace's own starts.",
    )
    think_s: DurationsField | None = Field(
        default=None,
        description="Times between an answer and the next request of a trace's session, instead "
        "of its own, in seconds; tools keep theirs.",
    )
    num_requests: Annotated[int, Field(ge=1, le=100_000_000), BeforeValidator(whole)] | None = (
        Field(
            default=None,
            description="Requests: the first so many of a trace, or how many to synthesize.",
        )
    )
    resample: bool = Field(
        default=False,
        description="Draw `num_requests` rows of the trace at random, with replacement; "
        "arrivals must be drawn as well.",
    )
    request_rate: Rate | None = Field(
        default=None,
        description="Requests per second, arrivals redrawn as Poisson; `.inf` is all at once; "
        "if absent the trace's own arrival times.",
    )
    burstiness: Positive | None = Field(
        default=None,
        description="Gamma shape of the gaps drawn for `request_rate`; 1 is Poisson, "
        "less is burstier.",
    )
    arrivals: ArrivalsField | None = Field(
        default=None, description="Another arrival process, instead of `request_rate`."
    )
    rate_scale: Positive | None = Field(
        default=None, description="Speed-up of the trace's own arrival times; 2 is twice the rate."
    )
    max_concurrency: Count | None = Field(
        default=None,
        description="Most requests (of sessions: sessions) in the system; the rest wait outside, "
        "at the client.",
    )
    slice: Annotated[tuple[NonNegative, Positive], BeforeValidator(_pair)] | None = Field(
        default=None, description="Part of the trace used, [start, end) in seconds."
    )
    max_total_tokens: Count | None = Field(
        default=None,
        description="Most prompt plus output tokens of a request, for `too_long` drop and "
        "clip_prompt; `max_model_len` if absent.",
    )
    too_long: Literal["reject", "drop", "clip_prompt"] = Field(
        default="reject",
        description="What becomes of requests that are longer; always counted. `reject` lets the "
        "engine turn away what exceeds `max_model_len`.",
    )
    prompt_tokens: LengthsField | None = Field(
        default=None,
        description="Prompt lengths, instead of the trace's; a number is that many tokens.",
    )
    output_tokens: LengthsField | None = Field(
        default=None,
        description="Output lengths, instead of the trace's; a number is that many tokens.",
    )
    classes: dict[str, TrafficClassSpec] = Field(
        default_factory=dict,
        description="Classes of requests by name, drawn by their shares; the name is the tenant.",
    )
    tokenizer: str = Field(
        default="auto",
        description="Counts the tokens of traces that hold only text; see the traces page.",
    )

    @model_validator(mode="after")
    def _one_story(self) -> Workload:
        if self.load_test is not None:
            return self._load_test_alone()
        if self.sessions is not None:
            return self._sessions_alone()
        if self.trace is None and (self.prompt_tokens is None or self.output_tokens is None):
            raise ValueError(
                "give trace, load_test, sessions, or both prompt_tokens and output_tokens"
            )
        self._check_classes()
        if self.num_requests is None and (self.trace is None or self.resample):
            raise ValueError("num_requests is required without a trace, and with resample")
        if self.request_rate is not None and self.arrivals is not None:
            raise ValueError("give request_rate or arrivals, not both")
        process = self.arrivals.process if self.arrivals else None
        if process == "closed_loop" and self.max_concurrency is None:
            raise ValueError("arrivals: closed_loop needs max_concurrency")
        if self.session_rate is not None and (self.request_rate or self.arrivals):
            raise ValueError("give session_rate, request_rate or arrivals, not two of them")
        if self.trace is None and (self.think_s is not None or self.follow_sessions):
            key = "follow_sessions" if self.follow_sessions else "think_s"
            raise ValueError(f"{key}: is of the sessions of a trace; give trace, or sessions")
        if self.rate_scale is not None and process not in (None, "replay"):
            raise ValueError(f"rate_scale speeds up the trace's own times, not {process}")
        if self.rate_scale is not None and self.request_rate is not None:
            raise ValueError(
                "rate_scale speeds up the trace's own times; request_rate redraws them"
            )
        if self.burstiness is not None and (
            self.request_rate is None or math.isinf(self.request_rate)
        ):
            raise ValueError("burstiness needs a finite request_rate")
        if self.slice is not None and self.slice[0] >= self.slice[1]:
            raise ValueError(f"slice must end after it starts, got {list(self.slice)}")
        return self

    def _sessions_alone(self) -> Workload:
        for key in (
            "trace", "resample", "request_rate", "burstiness", "slice", "rate_scale",
            "prompt_tokens", "output_tokens", "classes", "follow_sessions", "think_s",
        ):  # fmt: skip
            if getattr(self, key):
                instead = "; session_rate says how many begin" if key == "request_rate" else ""
                raise ValueError(
                    f"{key}: not with sessions, which say that, or have no use for it{instead}"
                )
        if (self.session_rate is None) == (self.arrivals is None):
            raise ValueError("sessions start by session_rate or by arrivals: give one of the two")
        self._check_closed_loop()
        return self

    def _check_closed_loop(self) -> None:
        if self.arrivals is None:
            return
        if self.arrivals.process == "replay":
            raise ValueError("arrivals: sessions that are drawn have no times to replay")
        if self.arrivals.process == "closed_loop" and self.max_concurrency is None:
            raise ValueError("arrivals: closed_loop needs max_concurrency")

    def _load_test_alone(self) -> Workload:
        for key in (
            "sessions", "follow_sessions", "session_rate", "think_s", "trace", "resample",
            "request_rate", "burstiness", "arrivals", "slice", "prompt_tokens", "output_tokens",
            "classes",
        ):  # fmt: skip
            if getattr(self, key):
                raise ValueError(f"{key}: load_test says that; give one of the two")
        return self

    def _check_classes(self) -> None:
        for name in self.classes:
            if not re.fullmatch(r"[\w-]+", name):
                raise ValueError(f"classes: {name!r} is no name: letters, digits, - and _ only")
        own = [name for name, one in self.classes.items() if one.has_arrivals]
        if not own:
            return
        if len(own) < len(self.classes):
            other = next(name for name in self.classes if name not in own)
            raise ValueError(f"classes: {own[0]} has arrivals of its own, so {other} needs some")
        for key in ("request_rate", "arrivals", "rate_scale", "max_concurrency"):
            if getattr(self, key) is not None:
                raise ValueError(f"{key}: the classes have arrivals of their own; give it to them")
        if self.num_requests is None:
            raise ValueError("num_requests is required where classes have arrivals of their own")
