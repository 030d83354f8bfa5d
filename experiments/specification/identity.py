"""Hashes of specifications: equal ones ask the same question."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.fields import Data
from schedlab.experiments.specification.named_files import content_hash
from schedlab.experiments.specification.paths import SCRATCH, changed_paths


def spec_hash(spec: ExperimentSpec) -> str:
    """Return the identity of an experiment: equal hashes ask the same question.

    Parameters
    ----------
    spec : ExperimentSpec
        One point, or a whole sweep.

    Returns
    -------
    str
        SHA-256 (hex) of canonical JSON of every key that can change a result (not name, claim,
        engine.trial_requests, labels of policies and the folder that a tier lies in), with files
        replaced by the SHA-256 of what they contain: neither moving a trace nor renaming an
        experiment changes it.
        Program versions are not part of it; results carry them beside the hash.

    Raises
    ------
    OSError
        If a file the specification names cannot be read.
    """
    data = changed_paths(spec.to_data(), Path(), _without_scratch)
    assert isinstance(data, dict)
    del data["name"]
    data.pop("claim", None)
    del data["engine"]["trial_requests"]
    pools = data.get("cluster", {}).get("pools", {}).values()
    swept = data.get("sweep", {}).get("policy", ())
    for policy in (data["policy"], *swept, *(pool.get("policy") for pool in pools)):
        if isinstance(policy, dict):
            policy.pop("label", None)
    return data_hash(data)


def _without_scratch(path: str, key: str) -> str | None:
    return None if key == SCRATCH else path


def data_hash(data: Data) -> str:
    """Return a hash of plain data in which files count by what they contain.

    Parameters
    ----------
    data : dict
        Nested plain data; absolute paths of what exists stand for its content.

    Returns
    -------
    str
        SHA-256 (hex) of canonical JSON.

    Raises
    ------
    OSError
        If a file that exists cannot be read.
    """
    return hashlib.sha256(
        json.dumps(_canonical(data), sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def _canonical(value: object) -> object:
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # Most are names, which cost less to look at than paths to make.
    if isinstance(value, str) and ("/" in value or "\\" in value):
        path = Path(value)
        if path.is_absolute() and path.exists():
            return content_hash(path)
    return value
