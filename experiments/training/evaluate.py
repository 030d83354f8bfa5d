"""Test a trained model on data, its own or other."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np

from schedlab.experiments.training.batches import read_batches
from schedlab.experiments.training.dataset import read_dataset
from schedlab.experiments.training.train import Report, estimator_quality, latency, measure
from schedlab.policies.predictors.model_folder import ModelFolder
from schedlab.policies.predictors.serving_time import SERVING_TIME, ServingTime
from schedlab.policies.predictors.trained import LENGTH_KINDS, load_length_model
from schedlab.sim.errors import SpecError
from schedlab.sim.files import replacing


def evaluate(model: Path, data: Path, *, tokenizer: str = "auto") -> Report:
    """Return a report on a model.

    Parameters
    ----------
    model : Path
        Its folder.
    data : Path
        Answered prompts, or, for a serving-time estimator, a results folder. Of the very file
        that the model learned from only the prompts kept out are used, of any other all.
    tokenizer : str
        Counts the tokens of answers that the file gives as text only.

    Returns
    -------
    dict
        As `train` returns, without the learning curve.

    Raises
    ------
    SchedlabError
        If either cannot be read, or they do not fit each other.
    """
    folder = ModelFolder.open(model, [*LENGTH_KINDS, SERVING_TIME])
    if folder.meta["kind"] == SERVING_TIME:
        return _evaluate_estimator(model, data)
    seed = folder.get("seed", int)
    trained_on = folder.get("data", dict)
    read = read_dataset(data, seed=seed, tokenizer=tokenizer, least=0)
    same = read.sha256 == trained_on.get("sha256")
    rows = read.test_rows if same else np.arange(len(read.prompts))
    predictor = load_length_model(folder)
    note = "tested on the prompts kept out of training"
    if not same:
        note = f"tested on all of {data.name}; the model learned from {trained_on.get('file')}"
    return {
        "kind": folder.meta["kind"],
        "data": data.name,
        "test": measure(predictor, read, rows, seed=seed, own_data=same),
        "latency_s": latency(predictor, read),
        "notes": [note],
    }


def write_held_out(model: Path, data: Path, out: Path, *, tokenizer: str = "auto") -> int:
    """Write the prompts that a model did not learn from, as a trace of format vllm_custom.

    Parameters
    ----------
    model : Path
        A model folder.
    data : Path
        The file it was trained on.
    out : Path
        The file to write, JSON Lines; compressed if it ends in ``.gz``.
    tokenizer : str
        As in training.

    Returns
    -------
    int
        How many prompts were written, in the order of `data`.

    Raises
    ------
    SchedlabError
        If the model learned from another file, or a file cannot be read.
    """
    folder = ModelFolder.open(model, LENGTH_KINDS)
    trained_on = folder.get("data", dict)
    read = read_dataset(data, seed=folder.get("seed", int), tokenizer=tokenizer, least=0)
    if read.sha256 != trained_on.get("sha256"):
        raise SpecError(f"{model} learned from {trained_on.get('file')}, not from this {data.name}")
    lines = [
        json.dumps(
            {
                "application": read.prompts.application[i],
                "prompt": read.prompts.text[i],
                "prompt_tokens": int(read.prompts.prompt_tokens[i]),
                "output_tokens": int(read.output_tokens[i]),
            }
        )
        for i in read.test_rows
    ]
    content = ("\n".join(lines) + "\n").encode()
    with replacing(out) as temporary:
        temporary.write_bytes(gzip.compress(content, mtime=0) if out.suffix == ".gz" else content)
    return len(lines)


def _evaluate_estimator(model: Path, data: Path) -> Report:
    estimator = ServingTime.load(str(model))
    seen = read_batches(data)
    rows = np.arange(len(seen.serving_time_s))
    found, median = estimator_quality(estimator, seen, float(seen.serving_time_s.mean()), rows)
    notes = ["tested on all batches of the run, also on those it learned from if it is the same"]
    return {
        "kind": SERVING_TIME,
        "data": data.name,
        "test": found,
        "latency_s": {"median": median},
        "notes": notes,
    }
