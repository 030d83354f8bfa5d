"""What `import schedlab as sl` offers for notebooks and scripts: run, sweep, find, compare, ...

Thin functions over the rooms of this package; what they return shows itself as a table.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from schedlab.experiments.analysis.policy_comparison import METRICS
from schedlab.experiments.outcomes import Claims, Comparison, Findings, Measurement, Results
from schedlab.experiments.results.results_folder import replacing_folder
from schedlab.experiments.results.saved_results import read_results
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.loading import load_spec, make_spec
from schedlab.experiments.specification.own_modules import find_own_modules
from schedlab.policies import Policy, registry
from schedlab.policies.predictors.predictor import Predictor
from schedlab.policies.routers.router import Router
from schedlab.sim.construct import Registry
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.errors import SpecError
from schedlab.sim.files import read_json_object
from schedlab.sim.user_modules import is_outdated, look_in
from schedlab.traces.synthetic import DEFAULT_PRESET

if TYPE_CHECKING:
    from schedlab.experiments.sweeps.workers import Workers

Spec = str | Path | Mapping[str, Any] | ExperimentSpec
"""An experiment: its file, the name of one that comes with schedlab, its data, or itself."""

_SECTIONS = ("engine", "workload", "slo", "sweep")
_BY_CLASS = (Policy, Router, Predictor, CostModel)
"""What an experiment may hold as a class of one's own."""


def spec(experiment: Spec, /, **overrides: Any) -> ExperimentSpec:  # noqa: ANN401 - YAML values
    """Return a checked experiment.

    Parameters
    ----------
    experiment : str, Path, mapping or ExperimentSpec
        Its file, the name of one that comes with schedlab, or what a YAML would say. What a file
        names as ``module:Class`` is found beside it, until another file is given, and imported
        anew if it was edited since. A policy may be a class, or an
        object whose constructor's parameters are plain values; a router, a predictor or a cost
        model may be a class.
    **overrides
        Keys to change: ``policy="fcfs"``, ``engine={"max_num_seqs": 64}``, which leaves the other
        keys of the section as they are, or ``**{"workload.request_rate": 4}``.

    Raises
    ------
    SpecError
        If anything is wrong; the message names the key and the nearest valid choice.
    """
    if isinstance(experiment, ExperimentSpec):
        look_in(experiment.modules)
        experiment = experiment.to_data()
    if isinstance(experiment, Mapping):
        find_own_modules()
        return make_spec(_plain(experiment), _changes(overrides))
    find_own_modules(Path(experiment).absolute().parent)
    return load_spec(experiment, _changes(overrides))


def run(
    experiment: Spec,
    /,
    *,
    folder: str | Path | None = None,
    jobs: int = 1,
    **overrides: Any,  # noqa: ANN401 - YAML values
) -> Results:
    """Run an experiment: all points of its sweep, with all replications.

    Parameters
    ----------
    experiment, **overrides
        As for `spec`.
    folder : path, optional
        Where results are kept; what an earlier run wrote there is replaced. A temporary folder
        that is gone when Python ends if absent.
    jobs : int
        Processes. Policies that are defined in a notebook run in this one.

    Returns
    -------
    Results
        A table of settings, every run behind it, figures.

    Examples
    --------
    >>> small = {"trace": "fixed", "num_requests": 20, "request_rate": 4}
    >>> results = run({"workload": small}, policy="sjf", **{"policy.predictor": "oracle"})
    >>> results.rows[0].mean("completed")
    20.0
    """
    from schedlab.experiments.sweeps.sweep_all import run_into

    asked = spec(experiment, **overrides)
    with _workers([asked], jobs) as workers:
        if folder is None:
            scratch = Path(tempfile.mkdtemp(dir=_scratch().name))
            return Results(run_into(asked, scratch, workers))
        with replacing_folder(Path(folder)) as new:
            run_into(asked, new, workers)
    return load(folder)


def sweep(
    experiment: Spec,
    /,
    *,
    folder: str | Path,
    jobs: int = 1,
    **overrides: Any,  # noqa: ANN401 - YAML values
) -> Results:
    """Run what is not in a folder yet, and return all of it.

    Parameters
    ----------
    experiment, **overrides
        As for `spec`.
    folder : path
        Where points are kept under a hash of all that can change them.
    jobs : int
        Processes.

    Raises
    ------
    SchedlabError
        If points fail; the others are kept.
    """
    from schedlab.experiments.sweeps.runs import check
    from schedlab.experiments.sweeps.store import Store
    from schedlab.experiments.sweeps.sweep_all import sweep_all

    asked = spec(experiment, **overrides)
    _check_kept(asked, "sweep()", "use run()")
    with _workers([asked], jobs) as workers:
        check(sweep_all(asked, Store(Path(folder)), workers).failures)
    return load(folder)


def find(
    experiment: Spec,
    /,
    *,
    folder: str | Path | None = None,
    jobs: int = 1,
    **overrides: Any,  # noqa: ANN401 - YAML values
) -> Findings:
    """Find the largest (or least) value within constraints, e.g. the most requests/s in an SLO.

    Parameters
    ----------
    experiment, **overrides
        As for `spec`; it needs ``find``, such as ``find="max workload.request_rate subject to
        p99_ttft_ms <= 1000"``.
    folder : path, optional
        Where runs are kept.
    jobs : int
        Processes.

    Raises
    ------
    SpecError
        If another process is at work in that folder.
    """
    from schedlab.experiments.search.cheapest import cheapest
    from schedlab.experiments.search.constraints import needs_tables
    from schedlab.experiments.search.find import find as search
    from schedlab.experiments.search.find import verdicts
    from schedlab.experiments.search.search_report import basis_lines, find_lines
    from schedlab.experiments.sweeps.runs import Runs
    from schedlab.experiments.sweeps.store import Store

    asked = spec(experiment, **overrides)
    if folder is not None:
        _check_kept(asked, "find(folder=...)", "leave out the folder")
    with tempfile.TemporaryDirectory() as scratch, _workers([asked], jobs) as workers:
        store = Store(Path(folder or scratch), light=not needs_tables(asked))
        runs = Runs(store, workers)
        assert asked.find is not None
        with store.lock(""):
            found = search(asked, runs)
            best = cheapest(asked, found, runs)
        told = list(best.lines) if best is not None else verdicts(asked.find, found)
        lines = [
            *find_lines(asked, found),
            *told,
            *basis_lines(runs.cost_models, list(runs.extrapolated.values())),
        ]
    return Findings(asked, found, lines)


def compare(
    results: Results | str | Path,
    metrics: str | Sequence[str] = METRICS,
    *,
    against: str | None = None,
    key: str = "policy",
) -> Comparison:
    """Say which policy beats which, by how much and how surely, over the seeds they share.

    Parameters
    ----------
    results : Results or path
        Of a sweep over policies with replications.
    metrics : str or sequence of str
        What to compare.
    against : str, optional
        Hold the others against this one; the first by default.
    key : str
        The swept key whose values are compared.
    """
    results = results if isinstance(results, Results) else load(results)
    names = [metrics] if isinstance(metrics, str) else metrics
    return results.compare(*names, against=against, key=key)


def measure(
    experiment: Spec,
    /,
    *,
    check: bool | None = None,
    **overrides: Any,  # noqa: ANN401 - YAML values
) -> Measurement:
    """Run an experiment on the real backend and in simulation, and say how far they differ.

    Parameters
    ----------
    experiment, **overrides
        As for `spec`; its ``real`` section says on which device, and how often.
    check : bool, optional
        Also run by the modelled clock: do both decide alike? On a CPU by default.

    Raises
    ------
    SchedlabError
        If PyTorch, the device or the model's memory is missing.
    """
    from schedlab.experiments.comparing.compare import compare as measured
    from schedlab.experiments.comparing.comparison_files import to_data

    asked = spec(experiment, **overrides)
    return Measurement(to_data(measured(asked, check=check), asked))


def load_measurement(folder: str | Path) -> Measurement:
    """Return what `schedlab measure` wrote into a folder."""
    return Measurement(_written(Path(folder) / "comparison.json", "points", "measure"))


def claims(
    *files: str | Path,
    jobs: int = 1,
    **overrides: Any,  # noqa: ANN401 - YAML values
) -> Claims:
    """Hold what is claimed against simulations: a verdict for each figure.

    Parameters
    ----------
    *files : str or Path
        Experiments with a claim; those of all systems that come with schedlab if none are given,
        which takes minutes.
    jobs : int
        Processes.
    **overrides
        Keys to change, e.g. ``replications=2``.
    """
    from schedlab.experiments.claims.claims import examine
    from schedlab.experiments.claims.claims import load_claims as load
    from schedlab.experiments.claims.report import data
    from schedlab.experiments.sweeps.runs import Runs
    from schedlab.experiments.sweeps.store import Store

    asked = load([Path(file) for file in files], _changes(overrides))
    with (
        tempfile.TemporaryDirectory() as scratch,
        _workers([one for _, one in asked], jobs) as them,
    ):
        runs = Runs(Store(Path(scratch)), them)
        return Claims(data([examine(path, one, runs) for path, one in asked]))


def load_claims(file: str | Path) -> Claims:
    """Return what `schedlab claims -o FOLDER` wrote into FOLDER/policies.json or claims.json."""
    return Claims(_written(Path(file), "experiments", "claims"))


def load(folder: str | Path) -> Results:
    """Return what `run`, `sweep` or the commands of these names wrote into a folder."""
    find_own_modules()  # metrics of the user's, as they are now
    return Results(read_results(Path(folder)))


def known_policies() -> dict[str, type[Policy]]:
    """Return the registered policies by name, sorted.

    Examples
    --------
    >>> known_policies()["sjf"].needs_prediction
    True
    """
    return {name: registry.policy_class(name) for name in registry.names()}


def synthesize(
    file: str | Path,
    num_requests: int,
    *,
    preset: str = DEFAULT_PRESET,
    rate: float | None = None,
    seed: int = 0,
) -> Path:
    """Draw a trace from a preset, write it, and return where: for ``workload.trace``.

    Parameters
    ----------
    file : str or Path
        Ends in ``.csv``, ``.csv.gz`` or ``.parquet``.
    num_requests : int
        How many.
    preset : str
        See `schedlab trace presets`.
    rate : float, optional
        Mean requests a second in place of the preset's.
    seed : int
        Of what is drawn.
    """
    from schedlab import traces

    drawn = traces.synthesize(num_requests, preset=preset, rate=rate, seed=seed)
    return traces.write(drawn, file)


def _written(file: Path, key: str, command: str) -> dict[str, Any]:
    """Return what a command wrote as JSON."""
    data = read_json_object(file)
    if not isinstance(data.get(key), list):
        raise SpecError(f"{file}: was not written by schedlab {command}: it has no list {key}")
    return data


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of this process for what nobody keeps."""
    return tempfile.TemporaryDirectory(prefix="schedlab-")


def _changes(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments as changes of keys: a section changes what it mentions."""
    changes: dict[str, Any] = {}
    for key, value in overrides.items():
        if key in _SECTIONS and isinstance(value, Mapping):
            changes |= {f"{key}.{inner}": _plain(item) for inner, item in value.items()}
        else:
            changes[key] = _plain(value)
    return changes


def _plain(value: object) -> Any:  # noqa: ANN401 - what YAML holds
    """Return data with policies that are classes or objects written as YAML would name them."""
    if isinstance(value, Mapping):
        data = {key: _plain(item) for key, item in value.items()}
        chosen = data.get("name")  # {"name": MyPolicy, "knob": 1}
        return chosen | data | {"name": chosen["name"]} if isinstance(chosen, dict) else data
    if hasattr(value, "tolist"):  # numbers, arrays and series of numpy and pandas
        return _plain(value.tolist())
    if isinstance(value, list | tuple | range | Iterator):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Policy):
        return _named(type(value)) | _plain(value.get_params())
    if isinstance(value, type) and issubclass(value, _BY_CLASS):
        return _named(value)
    return value


def _named(cls: type) -> dict[str, Any]:
    """Return a class as YAML would name it; that of a policy is its label, too."""
    for name in registry.names():
        if registry.policy_class(name) is cls:
            return {"name": name}
    if "." in cls.__qualname__:
        raise SpecError(
            f"{cls.__qualname__}: a class inside a function or a class cannot be found by name; "
            "define it at the top of a module or notebook"
        )
    name = f"{cls.__module__}:{cls.__name__}"
    if is_outdated(cls):
        raise SpecError(
            f"{cls.__name__}: was imported before its module was changed, or from another folder: "
            f"import it again, or name it {name!r}"
        )
    path = {"name": name}
    return path | {"label": cls.__name__} if issubclass(cls, Policy) else path


def _is_interactive(asked: ExperimentSpec) -> bool:
    """Say whether a class is defined in the session itself, where no other process finds it."""
    from schedlab.experiments.running.point_hash import own_classes

    return any(path.startswith("__main__:") for path in own_classes(asked.to_data()))


def _is_known_here_alone(asked: ExperimentSpec) -> bool:
    """Say whether no other process finds a class: of the session itself, or registered by it."""
    names = Registry.registered_elsewhere
    return _is_interactive(asked) or any(text in names for text in _texts(asked.to_data()))


def _texts(data: object) -> Iterator[str]:
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, list | tuple):
        for item in data:
            yield from _texts(item)
    elif isinstance(data, str):
        yield data


def _check_kept(asked: ExperimentSpec, what: str, instead: str) -> None:
    """Raise SpecError of a class whose source is in no file: an edit would find old results."""
    if _is_interactive(asked):
        raise SpecError(
            f"{what} keeps results by the source of a policy, which one that is defined in a "
            f"notebook has not: put it into a module of its own, or {instead}"
        )


@contextmanager
def _workers(asked: Sequence[ExperimentSpec], jobs: int) -> Iterator[Workers]:
    from schedlab.experiments.sweeps.workers import InProcess, Processes

    if isinstance(jobs, bool) or not isinstance(jobs, SupportsIndex) or index(jobs) < 1:
        raise SpecError(f"jobs must be a whole number >= 1, got {jobs!r}")
    alone = jobs == 1 or any(map(_is_known_here_alone, asked))
    with InProcess(raising=True) if alone else Processes(jobs) as workers:
        yield workers
