"""The folder of a finished point: its files, and what they say without its tables."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedlab.experiments.results.results_folder import MARKER
from schedlab.experiments.results.tables import warnings
from schedlab.experiments.specification.named_files import name_files
from schedlab.sim.errors import SchedlabError
from schedlab.sim.files import read_json_object, write_text
from schedlab.sim.result_head import read_head
from schedlab.sim.text import json_number
from schedlab.sim.yaml_lines import dump_yaml

if TYPE_CHECKING:
    from schedlab.experiments.specification.experiment import ExperimentSpec
    from schedlab.sim.record.columns import Columns
    from schedlab.sim.result import RunResult

POINT_FILE = "point.json"
"""Beside a result: its content hash, how long it took, and what qualifies it."""


@dataclass(frozen=True)
class PointMetrics:
    """What a finished point gave, without its tables.

    Attributes
    ----------
    label : str
        Its settings in one line.
    settings : mapping of str to str
        Swept key to its value, as short text.
    replication : int
        0-based; points of the same number had the same seed.
    policy : str
        What the policy is called: its label, or its name.
    metrics : mapping of str to float
        Those that every run has; NaN where there was nothing to measure. Any other metric, e.g.
        ``largest(latency=itl)`` or ``my_module:cost``, is computed when it is asked for.
    folder : Path
        Where result.json and the tables are.
    warnings : sequence of str
        What qualifies the metrics.
    cost_model : mapping
        What the cost model says of itself.
    prediction : object
        Provenance of the predictions; None if nothing was predicted.
    seconds : float
        How long the run took; NaN if nobody noted it.
    requests_sha256 : str
        Hash of the table of requests: runs of the same hash did the same.
    """

    label: str
    settings: Mapping[str, str]
    replication: int
    policy: str
    metrics: Mapping[str, float]
    folder: Path = Path()
    warnings: Sequence[str] = ()
    cost_model: Mapping[str, Any] = field(default_factory=dict)
    prediction: object = None
    seconds: float = math.nan
    requests_sha256: str = ""

    def load(self) -> RunResult:
        """Return the run with its tables; see `load_run`."""
        return load_run(self.folder)

    def head(self) -> Mapping[str, Any]:
        """Return metrics and provenance as they were written, as plain data."""
        return _head(self.folder)

    def spec(self) -> Mapping[str, Any]:
        """Return the experiment of the run, as its result tells it.

        Raises
        ------
        SchedlabError
            If the result tells of none.
        """
        provenance = self.head().get("provenance")
        found = provenance.get("spec") if isinstance(provenance, dict) else None
        if not isinstance(found, dict) or not isinstance(found.get("engine"), dict):
            raise SchedlabError(
                f"{self.folder / 'result.json'}: schedlab.provenance.spec is no experiment"
            )
        return found


class _Metrics(dict[str, float]):
    """Metrics of a saved run; what result.json does not have is computed from the tables."""

    def __init__(self, saved: Mapping[str, Any], folder: Path) -> None:
        super().__init__({name: _measured(name, value) for name, value in saved.items()})
        self._folder = folder
        self._computed: dict[str, float] = {}

    def __missing__(self, name: str) -> float:
        if name not in self._computed:
            self._computed[name] = load_run(self._folder).metric(name)
        return self._computed[name]


def _measured(name: str, value: object) -> float:
    try:
        return json_number(value)
    except ValueError:
        raise TypeError(f"metric {name!r} is {value!r}") from None


def load_run(folder: Path) -> RunResult:
    """Return the run of a folder with its tables.

    Raises
    ------
    SchedlabError
        As `RunResult.load`; or if the table of requests is not the one that was written with what
        is noted of it. One that is read in parts, of millions of requests, is taken as it is.
    """
    from schedlab.sim.result import RunResult

    result = RunResult.load(folder)
    noted = folder / POINT_FILE
    if isinstance(result.requests, dict) and noted.exists():
        written = read_json_object(noted).get("requests_sha256")
        if written is not None and written != _table_hash(result.requests):
            raise SchedlabError(
                f"{folder / 'requests.parquet'}: not the table of this run: requests_sha256 of "
                f"{POINT_FILE} is that of another one; run it again"
            )
    return result


def write_point(
    result: RunResult,
    spec: ExperimentSpec,
    folder: Path,
    content_hash: str,
    seconds: float,
    light: bool = False,
) -> None:
    """Write the files of one run.

    Parameters
    ----------
    result : RunResult
        The run.
    spec : ExperimentSpec
        The point that was run.
    folder : Path
        Where to; it must exist.
    content_hash : str
        `point_hash` of the point.
    seconds : float
        How long the run took.
    light : bool
        Whether to leave out the tables.
    """
    write_text(folder / "spec.yaml", dump_yaml(name_files(spec.to_data())))
    result.save(folder, light)
    noted = {
        "content_hash": content_hash,
        **({"light": True} if light else {}),
        "requests_sha256": _table_hash(result.requests),
        "seconds": round(seconds, 3),
        "warnings": warnings(result),
    }
    if spec.policy.label is not None:
        noted["policy_label"] = spec.policy.label
    write_text(folder / POINT_FILE, json.dumps(noted, indent=1) + "\n")


def read_point(
    folder: Path,
    label: str | None = None,
    settings: Mapping[str, str] | None = None,
    replication: int = 0,
) -> PointMetrics:
    """Read what a finished point gave.

    Parameters
    ----------
    folder : Path
        What `write_point` wrote, or `RunResult.save`.
    label, settings, replication : optional
        Which point it is; called by the experiment's name if no label is given.

    Raises
    ------
    SchedlabError
        If a file is missing or not ours.
    """
    head = _head(folder)
    # A result that was saved by hand has no notes beside it.
    noted = read_json_object(folder / POINT_FILE) if (folder / POINT_FILE).exists() else {}
    try:
        found = PointMetrics(
            label=head["name"] if label is None else label,
            settings=settings or {},
            replication=replication,
            policy=noted.get("policy_label", head["policy"]),
            metrics=_Metrics(head["metrics"], folder),
            folder=folder,
            warnings=_lines(noted.get("warnings", [])),
            cost_model=head["provenance"]["cost_model"],
            prediction=head["provenance"].get("prediction"),
            seconds=noted.get("seconds", math.nan),
            requests_sha256=noted.get("requests_sha256", ""),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise SchedlabError(f"{folder}: not the result of a point ({error!r})") from error
    return found if noted else replace(found, warnings=warnings(found.load()))


def _lines(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(line, str) for line in value):
        raise TypeError(f"warnings {value!r}")
    return value


def content_hash_of(folder: Path, light: bool = True) -> str | None:
    """Return whose result a folder holds; None if anything is missing or unreadable.

    Unless `light`, a result without its tables lacks something, too.
    """
    try:
        noted = read_json_object(folder / POINT_FILE)
        files = read_json_object(folder / MARKER)["files"]
        read_json_object(folder / "result.json")
        whole = all((folder / name).is_file() for name in files)
        return str(noted["content_hash"]) if whole and (light or not noted.get("light")) else None
    except (SchedlabError, KeyError, TypeError):
        return None


def _table_hash(columns: Columns) -> str:
    digest = hashlib.sha256()
    for name in sorted(columns):
        column = columns[name]
        if column.dtype == object:  # text, as it is read
            column = column.astype(str)
        digest.update(f"{name} {column.dtype.str}\n".encode())
        digest.update(column.tobytes())
    return digest.hexdigest()


def _head(folder: Path) -> Mapping[str, Any]:
    return read_head(folder / "result.json")
