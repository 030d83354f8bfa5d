"""The experiment specification: every key of the YAML, its type, bounds, unit and default."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from schedlab.experiments.specification.claim import Claim
from schedlab.experiments.specification.cluster import ClusterField
from schedlab.experiments.specification.cost_model import CostModelField, CostModelSpec
from schedlab.experiments.specification.engine import EngineSpec
from schedlab.experiments.specification.fields import (
    Count,
    Data,
    NonNegative,
    Positive,
    Section,
    shorthand,
    whole,
)
from schedlab.experiments.specification.frontend import FrontendField
from schedlab.experiments.specification.policy import PolicySpec
from schedlab.experiments.specification.search import FindField, MeasurementSpec, Tune
from schedlab.experiments.specification.slo import SloTargets
from schedlab.experiments.specification.workload import Workload
from schedlab.sim.user_modules import Places, places

_MAY_BE_EMPTY = ("sweep", "classes", "pools")


_MOST_NAME_BYTES = 200


class Real(Section):
    """The real backend: where the kernels run, and what its clock shows."""

    device: str = Field(default="cpu", min_length=1, description="`cpu`, `cuda` or `cuda:INDEX`.")
    clock: Literal["virtual", "wall", "reference", "modelled"] = Field(
        default="virtual",
        description="`virtual`: steps take as long as measured, waiting takes no time; `wall`: "
        "time as it passes; `reference`: `virtual` in CPU time, at the speed that the machine had "
        "when the profile was measured; `modelled`: kernels run, steps take what the cost model "
        "says.",
    )
    weights: str | None = Field(
        default=None, description="Folder with safetensors; seeded random weights if absent."
    )
    temperature: NonNegative = Field(default=0.0, description="Of sampling; 0 is greedy.")
    cuda_graphs: bool = Field(default=True, description="Replay CUDA graphs of decode steps.")
    attention_backend: str | None = Field(
        default=None,
        min_length=1,
        description="vLLM's name of one, e.g. `TRITON_ATTN`, with `backend: vllm`; its own choice "
        "if absent.",
    )
    threads: Count = Field(
        default=1, description="Threads of the kernels on a CPU; a profile is of one number."
    )
    repeats: Count = Field(
        default=3, description="Measured runs of each point in a comparison with the simulation."
    )
    throughput_bar: Positive = Field(
        default=0.05,
        description="Largest error of a throughput that a comparison calls ok, as a share.",
    )
    latency_bar: Positive = Field(
        default=0.1,
        description="The same of whatever is no throughput: latencies, preemptions, use of the KV "
        "cache.",
    )
    level_requests_per_client: Count | None = Field(
        default=None,
        description="Requests of another workload that each client sends in the three short runs "
        "before and after each measured run of a comparison, which tell at what level steps stand "
        "then: simulated runs are priced at it. If absent there are none, and the level is that of "
        "the profile.",
    )


class ValidationSpec(Section):
    """A recorded run of a real engine, to hold the prediction against."""

    measured: str = Field(
        min_length=1, description="Its requests.jsonl: queued_ts, first_token_ts, last_token_ts."
    )


def _name(value: str) -> str:
    if not value.isprintable() or value.strip(" .") == "" or len(value.encode()) > _MOST_NAME_BYTES:
        raise ValueError(
            f"must be a name that a folder can have: printable, no more than {_MOST_NAME_BYTES} "
            f"bytes, and more than dots; got {value!r}"
        )
    return value


class ExperimentSpec(Section):
    """One experiment: everything that can change its result, and what to vary.

    Build it with `specification.loading.load_spec` or `make_spec`, whose errors name file, line
    and key; the constructor alone does not check names against the registries.
    """

    name: Annotated[str, AfterValidator(_name)] = Field(
        min_length=1, description="Name in tables and figures."
    )
    seed: Annotated[int, Field(ge=0, le=2**63 - 1), BeforeValidator(whole)] = Field(
        default=0, description="Seed of every random stream; replication r uses seed + r."
    )
    model: str = Field(
        default="llama-3-8b",
        min_length=1,
        description="A known model, or a Hugging Face config.json.",
    )
    hardware: str = Field(
        default="a100-80gb", min_length=1, description="A known GPU, or a file that describes one."
    )
    cost_model: CostModelField = Field(
        default_factory=lambda: CostModelSpec(name="roofline"),
        description="`roofline`, a profile folder, or a mapping.",
    )
    backend: Literal["sim", "real", "vllm"] = Field(
        default="sim", description="A simulated device, a real one, or a real one behind vLLM."
    )
    engine: EngineSpec = Field(default_factory=EngineSpec, description="The serving engine.")
    frontend: FrontendField | None = Field(
        default=None,
        description="What stands between clients and engine, with delays and a capacity of its "
        "own: a file, or a mapping. Nothing if absent.",
    )
    policy: Annotated[PolicySpec, shorthand("name")] = Field(
        default_factory=lambda: PolicySpec(name="fcfs"),
        description="The scheduling policy: a name, or a mapping with its knobs.",
    )
    cluster: ClusterField | None = Field(
        default=None,
        description="Several engines that share the workload: how many, or a mapping. One engine "
        "if absent.",
    )
    workload: Workload = Field(description="The requests.")
    slo: SloTargets = Field(default_factory=SloTargets, description="Latency targets.")
    measure: MeasurementSpec | None = Field(
        default=None, description="What of a run is measured; all of it if absent."
    )
    real: Real = Field(default_factory=Real, description="The real backend.")
    validation: ValidationSpec | None = Field(
        default=None, description="A recorded real run, for `schedlab validate`."
    )
    replications: Annotated[int, Field(ge=1, le=10_000), BeforeValidator(whole)] = Field(
        default=1, description="Runs of each point, with different seeds."
    )
    sweep: dict[str, list[Any]] = Field(
        default_factory=dict,
        description="Dotted keys and the values they take; all combinations are run. Keys joined "
        "by commas are linked: each value is a list with one for each.",
    )
    find: FindField | None = Field(
        default=None,
        description="A largest value, for `schedlab find`; a mapping, or `max KEY between A and B "
        "subject to METRIC <= X`.",
    )
    tune: Tune | None = Field(default=None, description="A best setting, for `schedlab tune`.")
    claim: Claim | None = Field(
        default=None, description="What a paper says of it, for `schedlab claims`."
    )

    @cached_property
    def modules(self) -> Places:
        """Where modules of the user's were looked for when this was made; not part of the data."""
        return places()

    def model_post_init(self, _context: object) -> None:
        """Note where modules are looked for."""
        _ = self.modules

    def to_data(self) -> Data:
        """Return the specification as plain data that loads back to an equal one.

        Returns
        -------
        dict
            Every key with its value, defaults included; absent optional keys stay absent.
        """
        data = _plain(self)
        assert isinstance(data, dict)
        return data

    def changes(self) -> Data:
        """Return what `to_data` does, without the keys that have their default values."""
        data = _plain(self, with_defaults=False)
        assert isinstance(data, dict)
        return data


def _plain(value: object, with_defaults: bool = True) -> object:
    if isinstance(value, BaseModel):
        data = {}
        for key, field in type(value).model_fields.items():
            item = getattr(value, key)
            default = None if with_defaults else field.get_default(call_default_factory=True)
            if item is not None and item != default:
                data[key] = _plain(item, with_defaults)
        # A knob set to null says something (its default may differ), an absent section does not.
        extra = (value.model_extra or {}).items()
        data |= {key: _plain(item, with_defaults) for key, item in extra}
        return {key: item for key, item in data.items() if item or key not in _MAY_BE_EMPTY}
    if isinstance(value, Mapping):
        return {key: _plain(item, with_defaults) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, with_defaults) for item in value]
    return value
