"""How to serve a model on the GPUs at hand: deployment, limits and policy, searched in turn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from schedlab.experiments.running.resolved import resolve
from schedlab.experiments.running.workload import load_workload
from schedlab.experiments.search.constraints import with_values
from schedlab.experiments.search.find import Found, find_all, settled
from schedlab.experiments.search.vllm_defaults import Limits, default_limits, release
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.specification.search import Find
from schedlab.experiments.specification.sweep import Point
from schedlab.experiments.statistics import (
    Change,
    Estimate,
    corrected,
    estimate,
    paired_change,
)
from schedlab.experiments.sweeps.runs import Runs
from schedlab.sim.errors import SchedlabError, SpecError
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.models import model

_RATE = "workload.request_rate"
_SCREENING_SEEDS = 2
_FINAL_SEEDS = 5
_LEAST_RUN_S = 30.0
"""Seconds over which requests arrive, at least: a short burst is served at any rate, for it is
over before a queue has grown."""
_MOST_REQUESTS = 20_000
_WORTH_AN_OPTION = 0.02
"""By what share a value must beat vLLM's own before it is worth writing it down."""
_MOST_SEQS = (32, 64, 128, 256, 512, 1024)
_MOST_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
_POLICIES = ("fcfs", "edf", "shortest_prompt", "prefill_first")
NOT_IN_VLLM = ("dynamic", "magnus", "multi_bin", "prompt_buckets", "static")
"""Policies that vLLM cannot run; docs/vllm.md says why."""

ASK_A_COST_MODEL = ("fair_batching", "fastserve", "hygen", "qoserve", "scorpio")
"""Policies that vLLM runs where it is given a cost model, which a line for it does not."""

_VLLM_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}

UNNAMED = "YOUR_MODEL"
"""Stands in a line for a model that nobody has said what vLLM calls it."""


@dataclass(frozen=True)
class Question:
    """What an operator asks.

    Attributes
    ----------
    model, hardware : str
        As the keys of an experiment.
    num_gpus : int
        GPUs at hand, at most.
    workload : mapping
        The section of an experiment, without a request rate, with the requests of a run to begin
        with.
    slo : mapping
        The section of an experiment: targets of a request.
    attainment : float
        Share of requests that must hold them.
    vllm : str
        Release.
    policies : sequence of str
        Policies to try; empty for those that the release runs and that need nothing else.
    cost_model : str
        As the key of an experiment.
    rate : float or None
        Requests a second that must be served; then the fewest GPUs that do are looked for.
    usd_per_hour : float or None
        Of a GPU, instead of the table's.
    served : str
        What `vllm serve` calls the model; empty where that is for the reader to fill in.
    dtype : str
        Of weights and arithmetic, as the key of an experiment; empty for its default, bf16.
    """

    model: str
    hardware: str
    num_gpus: int
    workload: Mapping[str, Any]
    slo: Mapping[str, float]
    attainment: float = 0.9
    vllm: str = "0.32"
    policies: Sequence[str] = ()
    cost_model: str = "roofline"
    rate: float | None = None
    usd_per_hour: float | None = None
    served: str = ""
    dtype: str = ""


class Candidate(NamedTuple):
    """A way to serve.

    Attributes
    ----------
    tensor_parallel_size, replicas : int
        GPUs of an engine, and engines.
    max_num_seqs, max_num_batched_tokens : int
        Limits of each engine.
    policy : str
        Who schedules.
    """

    tensor_parallel_size: int
    replicas: int
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str = "fcfs"

    @property
    def num_gpus(self) -> int:
        """GPUs of all engines."""
        return self.tensor_parallel_size * self.replicas

    @property
    def label(self) -> str:
        """In a line."""
        name = f"TP {self.tensor_parallel_size} x {self.replicas}"
        return (
            f"{name}, {self.max_num_seqs} seqs, {self.max_num_batched_tokens} tokens, {self.policy}"
        )


class Tried(NamedTuple):
    """A candidate, why it was tried, and what it serves."""

    stage: str
    candidate: Candidate
    found: Found

    @property
    def rate(self) -> float:
        """Mean requests a second over the seeds; 0 where it cannot serve."""
        return 0.0 if self.found.error or self.found.bound == "below" else self.found.value.mean


@dataclass(frozen=True)
class Recommendation:
    """The answer.

    Attributes
    ----------
    question : Question
        What was asked.
    limits : Limits
        What vLLM would set by itself.
    excluded : mapping of str to str
        Deployments that do not run at all, and why.
    tried : sequence of Tried
        Everything tried, in order.
    best : Tried
        The choice, on seeds that it was not chosen by, with runs long enough.
    default : Tried
        vLLM's own limits, all GPUs sharing each layer, on the same seeds; the same as `best`
        if that is it.
    change : Change or None
        By how much the choice serves more; None if they are the same, or one has no answer.
    expected : mapping of str to Estimate
        Metrics of the choice at `at_rate`, over the seeds.
    at_rate : float
        The rate asked for, else the one found.
    max_model_len : int
        Tokens of the longest request that memory and model allow.
    is_cut : bool
        Whether that is less than the model allows.
    usd_per_million_tokens : float
        Of output tokens at `at_rate`; NaN where no price is known.
    """

    question: Question
    limits: Limits
    excluded: Mapping[str, str]
    tried: Sequence[Tried]
    best: Tried
    default: Tried
    change: Change | None
    expected: Mapping[str, Estimate]
    at_rate: float
    max_model_len: int
    is_cut: bool
    usd_per_million_tokens: float


def recommend(asked: Question, runs: Runs) -> Recommendation:
    """Search how to serve.

    Parameters
    ----------
    asked : Question
        Model, GPUs, workload, targets.
    runs : Runs
        Runs what is asked.

    Returns
    -------
    Recommendation
        Deployments are compared with vLLM's own limits; then, for the best, the token budget, the
        seats and the policy are varied one after the other. A value that does not serve 2 % more
        than vLLM's own is not worth an option. All that is by two seeds, in runs of half a minute
        at least (20,000 requests at most); the choice and vLLM's own settings are then searched
        again on five others, with runs as long as the answer asks for.

    Raises
    ------
    SpecError
        If something is unknown, or the model fits no deployment.
    SchedlabError
        If no candidate holds the targets.
    """
    search = _Search(asked, runs)
    best = search.deployments()
    best = search.vary("token budget", best, "max_num_batched_tokens", _MOST_TOKENS)
    best = search.vary("seats", best, "max_num_seqs", _MOST_SEQS)
    best = search.vary("policy", best, "policy", search.policies)
    if not best.rate > 0:
        raise SchedlabError(
            f"nothing tried holds the targets for {asked.attainment:.0%} of requests, not even at "
            f"{best.found.value.mean:.3g} requests/s: fewer demands, or more and faster GPUs"
        )
    return search.confirmed(best)


class _Search:
    """What was tried so far."""

    def __init__(self, asked: Question, runs: Runs) -> None:
        self.asked, self._runs = asked, runs
        self._release = release(asked.vllm)
        self._gpu = gpu(asked.hardware)
        self._limits = default_limits(self._gpu, self._release)
        self.policies = self._allowed_policies()
        self.length: int = asked.workload["num_requests"]
        self.tried: list[Tried] = []
        self.excluded: dict[str, str] = {}

    def _allowed_policies(self) -> tuple[str, ...]:
        for name in self.asked.policies:
            if name in NOT_IN_VLLM:
                raise SpecError(f"policy {name} does not run in vLLM (docs/vllm.md)")
            if name in ASK_A_COST_MODEL:
                raise SpecError(
                    f"policy {name} runs in vLLM with a cost model in its configuration, which is "
                    "not written here (docs/vllm.md says how)"
                )
        return tuple(self.asked.policies) or _POLICIES

    def deployments(self) -> Tried:
        """Try every way to divide the GPUs, with vLLM's own limits."""
        sizes = [2**i for i in range(12) if 2**i <= self.asked.num_gpus]
        num_heads = model(self.asked.model).num_heads
        candidates = []
        for size in sizes:
            whole = self.asked.num_gpus // size
            counts = range(1, whole + 1) if self.asked.rate is not None else (whole,)
            for replicas in counts:
                name = f"tensor parallel {size}"
                if num_heads % size:
                    self.excluded[name] = f"{num_heads} attention heads are not divided by {size}"
                    continue
                candidate = Candidate(size, replicas, *self._limits[:2])
                try:
                    resolve(self._spec(candidate, 1))
                except SpecError as error:
                    self.excluded[name] = str(error)
                    continue
                candidates.append(candidate)
        if not candidates:
            reasons = set(self.excluded.values())
            named = (f"{name}: {why}" for name, why in self.excluded.items())
            raise SpecError("; ".join(reasons if 1 == len(reasons) < len(self.excluded) else named))
        # What may raise does so before anything runs.
        first = self._spec(candidates[0], 1)
        load_workload(first, resolve(first).config.max_model_len)
        for name in self.policies:
            try:
                resolve(self._spec(candidates[0]._replace(policy=name), 1))
            except SpecError as error:
                raise SpecError(f"--policy {name}: {error}") from error
        best = self._best(self._try("deployment", candidates), candidates[-1])
        while self.length < (enough := min(_MOST_REQUESTS, math.ceil(_LEAST_RUN_S * best.rate))):
            # By steps: rates of short runs are far too high, and so would the next length be.
            self.length = min(enough, 4 * self.length)
            self.tried.clear()
            best = self._best(self._try("deployment", candidates), candidates[-1])
        return best

    def vary(self, stage: str, best: Tried, field: str, values: Sequence[Any]) -> Tried:
        """Try other values of one field; the present one stays unless another is worth it."""
        own = best.candidate
        others = [own._replace(**{field: value}) for value in values]
        others = [
            one for one in others
            if one != own and one.max_num_batched_tokens >= one.max_num_seqs
        ]  # fmt: skip
        tried = self._try(stage, others, near=best.rate)
        if not tried:
            return best
        top = max(tried, key=lambda one: one.rate)
        return top if top.rate > (1.0 + _WORTH_AN_OPTION) * best.rate else best

    def confirmed(self, chosen: Tried) -> Recommendation:
        """Search the choice and vLLM's own settings on new seeds, in runs that are long enough."""
        asked = self.asked
        whole = max((t.candidate for t in self.tried if t.stage == "deployment"),
                    key=lambda one: (one.num_gpus, one.tensor_parallel_size))  # fmt: skip
        pair = list(dict.fromkeys([chosen.candidate, whole]))
        find = self._find(0.02)

        def again(length: int | None) -> list[Point]:
            return self._points(pair, _FINAL_SEEDS, length, first_seed=_SCREENING_SEEDS)

        found = settled(again, self.length, find, self._runs, "--num-requests {}")
        finals = [Tried("confirmed", one, answer) for one, answer in zip(pair, found, strict=True)]
        best, default = finals[0], finals[-1]
        if best.found.error:
            raise SchedlabError(best.found.error)
        change = None
        if len(pair) > 1 and not any(t.found.error or t.found.bound for t in finals):
            (change,) = corrected([paired_change(best.found.values, default.found.values)])
        metrics, at_rate = best.found.metrics, best.found.value.mean
        if asked.rate is not None:
            at_rate = asked.rate
            points = self._points([best.candidate], _FINAL_SEEDS, best.found.num_requests,
                                  first_seed=_SCREENING_SEEDS, rate=at_rate)  # fmt: skip
            metrics = tuple(
                one.metrics for one in self._runs.points([(p.spec, p.label) for p in points])
            )
        expected = {name: estimate([one[name] for one in metrics]) for name in metrics[0]}
        usd = asked.usd_per_hour or self._gpu.usd_per_hour or math.nan
        tokens_per_s = expected["output_throughput"].mean
        config = resolve(self._spec(best.candidate, 1)).config
        return Recommendation(
            asked, self._limits, self.excluded, [*self.tried, *finals], best, default, change,
            expected, at_rate, config.max_model_len,
            config.max_model_len < model(asked.model).max_model_len,
            usd_per_million_tokens(usd, best.candidate.num_gpus, tokens_per_s),
        )  # fmt: skip

    def _try(
        self, stage: str, candidates: Sequence[Candidate], near: float | None = None
    ) -> list[Tried]:
        if not candidates:
            return []
        points = self._points(candidates, _SCREENING_SEEDS, self.length)
        expect = {one.label: [near] * _SCREENING_SEEDS for one in candidates} if near else None
        found = find_all(points, self._find(0.05), self._runs, expect)
        tried = [Tried(stage, one, answer) for one, answer in zip(candidates, found, strict=True)]
        self.tried += tried
        return tried

    def _best(self, tried: Sequence[Tried], simplest: Candidate) -> Tried:
        """Return the deployment that serves most; with a rate to serve, the fewest GPUs that do."""
        enough = [one for one in tried if self.asked.rate and one.rate >= self.asked.rate]
        if enough:
            fewest = min(one.candidate.num_gpus for one in enough)
            return max((one for one in enough if one.candidate.num_gpus == fewest),
                       key=lambda one: one.rate)  # fmt: skip
        return max(tried, key=lambda one: (one.rate, one.candidate == simplest))

    def _find(self, tolerance: float) -> Find:
        constraints = {"slo_attainment": self.asked.attainment}
        return Find(maximize=_RATE, at_least=constraints, tolerance=tolerance)

    def _points(
        self,
        candidates: Sequence[Candidate],
        seeds: int,
        length: int | None,
        first_seed: int = 0,
        rate: float | None = None,
    ) -> list[Point]:
        points = []
        for candidate in candidates:
            start = rate or self.asked.rate or float(candidate.num_gpus)
            spec = self._spec(candidate, start, length)
            for i in range(seeds):
                one = spec.model_copy(update={"seed": spec.seed + first_seed + i})
                points.append(Point(one, {"setting": candidate.label}, i, candidate.label))
        return points

    def _spec(self, candidate: Candidate, rate: float, length: int | None = None) -> ExperimentSpec:
        asked = self.asked
        data: dict[str, Any] = {
            "name": "recommend",
            "model": asked.model,
            "hardware": asked.hardware,
            "cost_model": asked.cost_model,
            "engine": {
                "profile": f"vllm-{asked.vllm}",
                "max_num_seqs": candidate.max_num_seqs,
                "max_num_batched_tokens": candidate.max_num_batched_tokens,
                "tensor_parallel_size": candidate.tensor_parallel_size,
                "gpu_memory_utilization": self._release.gpu_memory_utilization,
                **({"dtype": asked.dtype} if asked.dtype else {}),
            },
            "policy": candidate.policy,
            "workload": {**asked.workload, "request_rate": rate},
            "slo": dict(asked.slo),
        }
        if candidate.replicas > 1:
            # vLLM's own balancing between engines of --data-parallel-size.
            router = {"name": "vllm", "staleness_ms": 100}
            data["cluster"] = {"count": candidate.replicas, "router": router}
        spec = make_spec(data)
        return spec if length is None else with_values(spec, {"workload.num_requests": length})


def usd_per_million_tokens(usd_per_hour: float, num_gpus: int, tokens_per_s: float) -> float:
    """Return what a million output tokens cost on GPUs of that price an hour each."""
    return usd_per_hour * num_gpus / 3600 / tokens_per_s * 1e6


def serve_line(found: Recommendation) -> str:
    """Return the command that starts what is recommended; what vLLM sets by itself is not in it."""
    asked, best = found.question, found.best.candidate
    parts = [f"vllm serve {asked.served or UNNAMED}"]
    if asked.dtype:
        parts.append(f"--dtype {_VLLM_DTYPES[asked.dtype]}")
    if best.tensor_parallel_size > 1:
        parts.append(f"--tensor-parallel-size {best.tensor_parallel_size}")
    if best.replicas > 1:
        parts.append(f"--data-parallel-size {best.replicas}")
    if found.is_cut:
        parts.append(f"--max-model-len {found.max_model_len // 1024 * 1024 or found.max_model_len}")
    if best.max_num_seqs != found.limits.max_num_seqs:
        parts.append(f"--max-num-seqs {best.max_num_seqs}")
    if best.max_num_batched_tokens != found.limits.max_num_batched_tokens:
        parts.append(f"--max-num-batched-tokens {best.max_num_batched_tokens}")
    if best.policy == "priority":
        parts.append("--scheduling-policy priority")
    elif best.policy != "fcfs":
        config = f'\'{{"schedlab": {{"policy": {{"name": "{best.policy}"}}}}}}\''
        parts.append("--scheduler-cls schedlab.gpu_backend.vllm.scheduler.PolicyScheduler")
        parts.append(f"--additional-config {config}")
    return " \\\n    ".join(parts)
