"""The identity of a result: a hash over everything that can change it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from schedlab.experiments.running.provenance import versions
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.identity import spec_hash
from schedlab.sim.user_modules import sources

_ROOT = Path(__file__).resolve().parents[2]
# Of experiments only what reads a specification and runs it: the rest reads results.
_COMPUTE_A_RESULT = (
    "sim", "policies", "traces", "experiments/running", "experiments/specification",
)  # fmt: skip
_MODULE_AND_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def point_hash(spec: ExperimentSpec) -> str:
    """Return the identity of the result of one point.

    Parameters
    ----------
    spec : ExperimentSpec
        One point: no sweep, one replication.

    Returns
    -------
    str
        SHA-256 (hex) over `spec_hash` (every key, defaults included, but for the name; of files
        what they contain), `code_version`, the versions of schedlab, Python, NumPy, SciPy and
        SimPy, and the source of what is given as ``module:Class`` with the modules of their own
        they import, as they were loaded.

    Raises
    ------
    OSError
        If a file the specification names cannot be read.

    Notes
    -----
    Not in it, because it must not change a result: machine, number of workers, name, git commit
    (a commit that leaves the simulator's sources alone leaves results valid).
    """
    parts = {
        "spec": spec_hash(spec),
        "code": code_version(with_gpu_backend=spec.backend != "sim"),
        "versions": versions(),
        "own_modules": own_modules(spec),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@cache
def code_version(with_gpu_backend: bool = False) -> str:
    """Return the version of the simulator: a hash of the sources that compute a result.

    Parameters
    ----------
    with_gpu_backend : bool
        Whether what runs on a device is part of it.

    Returns
    -------
    str
        SHA-256 (hex) over path and content of every file of sim, policies, traces,
        experiments/running and experiments/specification, but for hidden ones and copies that
        editors leave.
    """
    places = (*_COMPUTE_A_RESULT, *(("gpu_backend",) if with_gpu_backend else ()))
    paths = [p for place in places for p in (_ROOT / place, *(_ROOT / place).rglob("*"))]
    files = [path for path in paths if path.is_file()]
    digest = hashlib.sha256()
    for path in sorted(files):
        # An editor's own files (.engine.py.swp, engine.py~) come and go while it is open.
        is_source = not (path.name.startswith(".") or path.name.endswith("~"))
        if is_source and "__pycache__" not in path.parts:
            digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def own_modules(spec: ExperimentSpec) -> dict[str, str]:
    """Return the SHA-256 of each module of the user's that a point names, or that those import."""
    modules = [text.partition(":")[0] for text in own_classes(own_parts(spec))]
    return {name: hashlib.sha256(text).hexdigest() for name, text in sources(modules).items()}


def own_parts(spec: ExperimentSpec) -> object:
    """Return as nested data what of a specification may name classes of the user's."""
    cluster = None if spec.cluster is None else spec.cluster.model_dump()
    drafts = None if spec.engine.speculation is None else spec.engine.speculation.model_dump()
    return (
        spec.policy.model_dump(),
        spec.cost_model.model_dump(),
        spec.workload.format,
        cluster,
        drafts,
    )


def own_classes(value: object) -> Iterator[str]:
    """Yield every ``module:Class`` in nested data."""
    if isinstance(value, dict):
        for item in value.values():
            yield from own_classes(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from own_classes(item)
    elif isinstance(value, str) and _MODULE_AND_CLASS.fullmatch(value):
        yield value
