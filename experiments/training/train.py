"""Train a predictor, report how good it is and what it cost, and write its folder."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.experiments.training.batches import (
    NUM_NEIGHBORS,
    Batches,
    estimates,
    read_batches,
    split,
    train_serving_time,
)
from schedlab.experiments.training.dataset import TEST_SHARE, Dataset
from schedlab.experiments.training.network import (
    Examples,
    Int64,
    examples,
    load_torch,
    train_network,
)
from schedlab.experiments.training.quality import application_means, kendall_tau, quality
from schedlab.experiments.training.trees import load_sklearn, train_forest
from schedlab.policies.predictors.forest import FOREST, Forest
from schedlab.policies.predictors.model_folder import META, REPORT, SCHEMA, WEIGHTS, Arrays
from schedlab.policies.predictors.sentence_encoder import weights_digest
from schedlab.policies.predictors.serving_time import SERVING_TIME, ServingTime
from schedlab.policies.predictors.text_model import HASHED, TextModel
from schedlab.sim.files import replacing, write_text

CURVE_PROMPTS = (1_000, 3_000, 8_000)
NUM_TIMED = 200

Report = dict[str, Any]
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Training:
    """What to train.

    Attributes
    ----------
    kind : str
        ``listmle``, ``pointwise``, ``buckets`` or ``random_forest``.
    encoder : str
        Who reads the text for the first three; see `TextModel`.
    num_buckets : int
        Classes of ``buckets``.
    seed : int
        Of everything drawn.
    """

    kind: str
    encoder: str = HASHED
    num_buckets: int = 10
    seed: int = 0


def train(
    training: Training,
    data: Dataset,
    folder: Path,
    *,
    learning_curve: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Train a predictor of output lengths and write its folder.

    The weights and ``meta.json`` depend on data, seed and versions only; ``report.json`` holds
    measured times as well.

    Parameters
    ----------
    training : Training
        What to train.
    data : Dataset
        Answered prompts.
    folder : Path
        An empty folder to write to.
    learning_curve : bool
        Also train on 1,000, 3,000 and 8,000 prompts, as far as there are so many.
    progress : callable, optional
        Called with (trainings done, trainings in all, what comes next).

    Returns
    -------
    dict
        What ``report.json`` holds.

    Raises
    ------
    SpecError
        If a package or an encoder is missing.
    """
    rows = data.train_rows
    sizes = [n for n in CURVE_PROMPTS if n < len(rows)] if learning_curve else []
    trainer = _Trainer(training, data)
    curve = []
    for done, size in enumerate([*sizes, len(rows)]):
        if progress is not None:
            progress(done, len(sizes) + 1, f"learning from {size:,} prompts")
        # The file may be sorted; a smaller training set is a random part of the whole one.
        some = np.sort(np.random.default_rng(training.seed).permutation(rows)[:size])
        begun = time.process_time()
        model = trainer.train(some)
        seconds = time.process_time() - begun
        found = measure(model, data, data.test_rows, seed=training.seed)
        curve.append(
            {
                "num_prompts": size,
                "generated_tokens": int(data.output_tokens[some].sum()),
                "kendall_tau": found["kendall_tau"],
                "interval": found["interval"],
                "training_cpu_s": seconds,
            }
        )
    report = {
        "kind": training.kind,
        "encoder": training.encoder if training.kind != FOREST else None,
        "data": data.path.name,
        "split": data.split,
        "test": found,
        "learning_curve": curve,
        "features_cpu_s": trainer.features_cpu_s,
        "training_cpu_s": seconds,
        "latency_s": latency(model, data),
    }
    meta = {
        "kind": training.kind,
        "data": {
            "file": data.path.name,
            "sha256": data.sha256,
            "split": data.split,
            "num_train": len(rows),
            "num_test": len(data.test_rows),
        },
        "seed": training.seed,
        "versions": _versions(training.kind),
        "test": {key: found[key] for key in ("kendall_tau", "interval")},
    }
    if isinstance(model, Forest):
        meta["applications"] = model.applications
    else:
        meta["encoder"] = model.encoder
        if model.encoder != HASHED:
            meta["encoder_sha256"] = weights_digest(model.encoder)
    write_model(folder, meta, model.arrays, report)
    return report


class _Trainer:
    """Trains one kind on parts of a data set; features are made once."""

    def __init__(self, training: Training, data: Dataset) -> None:
        self._training = training
        self._data = data
        self._rows = data.train_rows
        # Imported before the clock starts; who lacks a package learns it before the work.
        if training.kind == FOREST:
            load_sklearn()
        else:
            load_torch()
        begun = time.process_time()
        self._examples: Examples | None = None
        if training.kind != FOREST:
            prompts, true = data.prompts.take(self._rows), data.output_tokens[self._rows]
            self._examples = examples(prompts, true, training.encoder)
        self.features_cpu_s = time.process_time() - begun

    def train(self, rows: Int64) -> TextModel | Forest:
        """Learn from some of the training prompts."""
        data, chosen = self._data, self._training
        if self._examples is None:
            return train_forest(data.prompts.take(rows), data.output_tokens[rows], seed=chosen.seed)
        some = self._examples.take(np.searchsorted(self._rows, rows))
        return train_network(chosen.kind, some, num_buckets=chosen.num_buckets, seed=chosen.seed)


def measure(
    model: TextModel | Forest, data: Dataset, rows: Int64, *, seed: int, own_data: bool = True
) -> Report:
    """Return the quality of a model on some prompts; see `quality.quality`.

    Parameters
    ----------
    model : TextModel or Forest
        The predictor.
    data : Dataset
        Answered prompts.
    rows : ndarray of int64
        Those to predict.
    seed : int
        Of the resampling.
    own_data : bool
        Whether the other prompts of `data` may tell the means of applications.
    """
    true = data.output_tokens.astype(np.float64)
    asked, known = data.applications(rows), data.applications(data.train_rows)
    means = application_means(true[data.train_rows], known, asked) if own_data else None
    predicted = model.lengths(data.prompts.take(rows))
    return quality(predicted, true[rows], asked, means, seed)


def latency(model: TextModel | Forest, data: Dataset) -> dict[str, float | int]:
    """Return how long single predictions take on this machine, features included, in seconds."""
    rows = data.test_rows[:NUM_TIMED]
    singles = [data.prompts.take(rows[i : i + 1]) for i in range(len(rows))]
    model.lengths(singles[0])
    taken = []
    for single in singles:
        begun = time.perf_counter()
        model.lengths(single)
        taken.append(time.perf_counter() - begun)
    p99 = float(np.quantile(taken, 0.99))
    return {"median": float(np.median(taken)), "p99": p99, "num_predictions": len(taken)}


def train_estimator(run_folder: Path, folder: Path, *, seed: int) -> Report:
    """Train the serving-time estimator on the batches of a run and write its folder.

    A fifth of the batches, drawn at random, is for testing.

    Parameters
    ----------
    run_folder : Path
        A results folder; see `read_batches`.
    folder : Path
        An empty folder to write to.
    seed : int
        Of that draw.

    Raises
    ------
    SchedlabError
        If the folder holds no run of sealed batches with predictions.
    """
    seen = read_batches(run_folder)
    learned, tested = split(len(seen.serving_time_s), TEST_SHARE, seed)
    estimator = train_serving_time(seen, learned)
    mean_s = float(seen.serving_time_s[learned].mean())
    found, median = estimator_quality(estimator, seen, mean_s, tested)
    report = {
        "kind": SERVING_TIME,
        "data": run_folder.name,
        "num_left_out": seen.num_left_out,
        "num_train": len(learned),
        "test": found,
        "latency_s": {"median": median},
    }
    source = (run_folder / "requests.parquet").read_bytes()
    meta = {
        "kind": SERVING_TIME,
        "data": {"file": run_folder.name, "sha256": hashlib.sha256(source).hexdigest()},
        "num_neighbors": NUM_NEIGHBORS,
        "seed": seed,
        "versions": _versions(SERVING_TIME),
    }
    arrays = {
        "batches": estimator.batches,
        "scale": estimator.scale,
        "serving_time_s": estimator.serving_time_s,
    }
    write_model(folder, meta, arrays, report)
    return report


def estimator_quality(
    estimator: ServingTime, seen: Batches, mean_s: float, rows: Int64
) -> tuple[Report, float]:
    """Return errors of an estimator on some batches, beside a constant's, and its latency.

    Parameters
    ----------
    estimator : ServingTime
        Under test.
    seen : Batches
        Batches with their times.
    mean_s : float
        The constant: a mean serving time, in seconds.
    rows : ndarray of int64
        Batches to test on.
    """
    begun = time.perf_counter()
    estimated = estimates(estimator, seen.shape[rows])
    latency_s = (time.perf_counter() - begun) / len(rows)
    true = seen.serving_time_s[rows]
    found = {
        "num_batches": len(rows),
        "kendall_tau": kendall_tau(estimated, true),
        "mean_absolute_error_s": float(np.abs(estimated - true).mean()),
        "median_relative_error": float(np.median(np.abs(estimated - true) / true)),
        "mean_absolute_error_of_mean_s": float(np.abs(mean_s - true).mean()),
    }
    return found, latency_s


def write_model(folder: Path, meta: dict[str, Any], arrays: Arrays, report: Report) -> None:
    """Write a model folder that `ModelFolder.open` reads; no pickle, the same bytes each time."""
    with replacing(folder / WEIGHTS) as temporary, temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **{name: arrays[name] for name in sorted(arrays)})
    digest = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    meta = {"schema": SCHEMA, **meta, "weights_sha256": digest}
    for name, content in ((REPORT, report), (META, meta)):
        write_text(folder / name, json.dumps(content, indent=1) + "\n")


def _versions(kind: str) -> dict[str, str]:
    used = ["numpy"]
    used += {FOREST: ["scikit-learn", "scipy"], SERVING_TIME: []}.get(kind, ["torch"])
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in used}}
