"""A trained model on disk: plain JSON and arrays, nothing that could run code."""

from __future__ import annotations

import hashlib
import math
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import SpecError
from schedlab.sim.files import read_json_object

SCHEMA = 1
META, WEIGHTS, REPORT = "meta.json", "weights.npz", "report.json"

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class ModelFolder:
    """A folder that ``schedlab predictor train`` wrote.

    ``meta.json`` says what the model is and what it was trained on, ``weights.npz`` holds its
    arrays, ``report.json`` how good it is and how long a prediction took where it was trained.

    Attributes
    ----------
    path : Path
        The folder.
    meta : dict
        What ``meta.json`` holds.
    """

    path: Path
    meta: dict[str, Any]

    @classmethod
    def open(cls, path: str | Path, kinds: Collection[str]) -> ModelFolder:
        """Read what a model is, but not its weights.

        Parameters
        ----------
        path : str or Path
            The folder.
        kinds : collection of str
            The kinds of model that will do.

        Raises
        ------
        SpecError
            If there is no such folder, it is no model, or a model of another kind or schema.
        """
        path = Path(path)
        if not path.is_dir():
            raise SpecError(f"no model folder {path} (schedlab predictor train makes one)")
        if not (path / META).is_file():
            raise SpecError(f"{path} is no trained model: it has no {META}")
        meta = read_json_object(path / META)
        if meta.get("schema") != SCHEMA:
            raise SpecError(
                f"{path / META}: model schema {meta.get('schema')!r}, this version reads {SCHEMA}; "
                "train it again"
            )
        for key in ("kind", "weights_sha256"):
            if not isinstance(meta.get(key), str):
                raise SpecError(f"{path / META}: key {key!r} is missing")
        if meta["kind"] not in kinds:
            raise SpecError(
                f"{path} is a model of kind {meta['kind']}; wanted is {' or '.join(sorted(kinds))}"
            )
        return cls(path, meta)

    def get(self, key: str, kind: type | tuple[type, ...]) -> Any:  # noqa: ANN401 - from JSON
        """Return an entry of the meta data.

        Raises
        ------
        SpecError
            If it is missing or not of type `kind`.
        """
        value = self.meta.get(key)
        if not isinstance(value, kind):
            raise SpecError(f"{self.path / META}: key {key!r} is missing or of a wrong type")
        return value

    def arrays(self, names: Collection[str]) -> Arrays:
        """Return the weights of these names.

        Raises
        ------
        SpecError
            If the file is missing, is not the one that ``meta.json`` was written for, or lacks
            an array.
        """
        path = self.path / WEIGHTS
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            if digest != self.meta["weights_sha256"]:
                raise SpecError(f"{path} is not the file that {META} was written for")
            with np.load(path, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
        except OSError as error:
            raise SpecError(f"{path}: cannot read: {error.strerror or error}") from error
        except (ValueError, zipfile.BadZipFile) as error:
            raise SpecError(f"{path}: not readable as arrays: {error}") from error
        missing = sorted(set(names) - set(arrays))
        if missing:
            raise SpecError(f"{path}: array {missing[0]!r} is missing")
        return arrays

    def latency_s(self) -> float:
        """Return the median time a prediction took where the model was trained, in seconds.

        Raises
        ------
        SpecError
            If the report does not tell.
        """
        path = self.path / REPORT
        latency = read_json_object(path).get("latency_s")
        median = latency.get("median") if isinstance(latency, dict) else None
        if not isinstance(median, float) or not 0.0 <= median < math.inf:
            raise SpecError(f"{path}: key 'latency_s.median' is missing; give latency_s yourself")
        return median
