"""Prompts with the lengths of their answers, parted into what to learn from and what to test on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from schedlab.policies.predictors.prompts import Prompts, prompts
from schedlab.sim.errors import SpecError
from schedlab.sim.rng import stream

TEST_SHARE = 0.2
LEAST_TRAINING_PROMPTS = 50


@dataclass(frozen=True)
class Dataset:
    """Answered prompts.

    Attributes
    ----------
    prompts : Prompts
        What a predictor sees.
    output_tokens : ndarray of int64, shape (n,)
        What it is to predict.
    is_test : ndarray of bool, shape (n,)
        Which prompts are kept out of training.
    split : str
        Who parted them.
    path : Path
        The file.
    sha256 : str
        Its digest.
    """

    prompts: Prompts
    output_tokens: npt.NDArray[np.int64]
    is_test: npt.NDArray[np.bool_]
    split: str
    path: Path
    sha256: str

    @property
    def train_rows(self) -> npt.NDArray[np.int64]:
        """The prompts to learn from."""
        return np.flatnonzero(~self.is_test)

    @property
    def test_rows(self) -> npt.NDArray[np.int64]:
        """The prompts to test on."""
        return np.flatnonzero(self.is_test)

    def applications(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.str_]:
        """Return where some of the prompts come from; empty where the file does not tell."""
        return np.array([self.prompts.application[i] or "" for i in rows])


def read_dataset(
    path: Path, *, seed: int = 0, tokenizer: str = "auto", least: int = LEAST_TRAINING_PROMPTS
) -> Dataset:
    """Read a trace with text.

    Parameters
    ----------
    path : Path
        A file of any trace format that has prompts. In JSON Lines, records may name their
        ``split``, ``train`` or ``test``; else a fifth of each application's prompts, drawn at
        random, is for testing.
    seed : int
        Of that draw.
    tokenizer : str
        Counts the tokens of answers that the file gives as text only.
    least : int
        How few prompts to learn from are too few.

    Raises
    ------
    TraceError
        If the file cannot be read as a trace.
    SpecError
        If it has no text, or too few prompts to learn from.
    """
    from schedlab import traces

    path = Path(path)
    trace = traces.read(path, tokenizer=tokenizer)
    columns = prompts(trace.prompt, trace.prompt_tokens, trace.application)
    is_test = _given_split(path) if trace.report.format == "vllm_custom" else None
    split = "as given in the file"
    if is_test is None or len(is_test) != len(trace):
        is_test = _drawn_split(columns, seed)
        split = f"a random fifth of each application for testing, seed {seed}"
    if (~is_test).sum() < least or is_test.sum() < 2:
        raise SpecError(
            f"{path}: {(~is_test).sum()} prompts to learn from and {is_test.sum()} to test on; "
            f"at least {least} and 2 are needed"
        )
    return Dataset(columns, trace.output_tokens, is_test, split, path, _digest(path))


def _given_split(path: Path) -> npt.NDArray[np.bool_] | None:
    """Return which records say that they are for testing; None unless each says something."""
    from schedlab.traces.readers.source import jsonl_records

    names = [r.get("split") for chunk in jsonl_records(path, (), 65536) for r in chunk.values]
    if set(names) != {"train", "test"}:
        return None
    return np.array([name == "test" for name in names])


def _drawn_split(columns: Prompts, seed: int) -> npt.NDArray[np.bool_]:
    rng = stream(seed, "split")
    is_test = np.zeros(len(columns), dtype=bool)
    for rows in _by_application(columns):
        is_test[rng.permutation(rows)[: round(TEST_SHARE * len(rows))]] = True
    return is_test


def _by_application(columns: Prompts) -> Iterator[npt.NDArray[np.int64]]:
    names = np.array([name or "" for name in columns.application])
    for name in np.unique(names):
        yield np.flatnonzero(names == name)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
