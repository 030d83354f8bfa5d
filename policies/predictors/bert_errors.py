"""The errors of a real length classifier."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import numpy.typing as npt

from schedlab.policies.predictors.predictor import Floats, PredictionInputs, Predictor
from schedlab.policies.predictors.registry import register
from schedlab.sim.errors import SpecError

NUM_CLASSES = 5
MEASURED_LATENCY_S = 0.0079
"""Median of the 85,482 predictions, on the authors' machine."""

_LENGTH, _CLASS = "output_token_length", "predicted_class5"
_NUM_SLICES = 10

# Rows: tenths of the answers by true length, the shortest first; columns: predicted class.
# Counted by us from the 85,482 published predictions (see `BertErrors.source`).
PREDICTIONS = (
    (8_430, 611, 151, 74, 26),
    (6_310, 1_547, 272, 168, 38),
    (3_885, 3_377, 557, 292, 64),
    (1_270, 5_385, 1_239, 559, 77),
    (668, 4_339, 2_524, 867, 89),
    (368, 2_617, 3_919, 1_442, 151),
    (202, 1_463, 4_058, 2_640, 187),
    (136, 913, 3_217, 4_104, 275),
    (115, 617, 2_228, 5_090, 458),
    (111, 467, 1_657, 5_174, 1_054),
)


@register("bert_errors")
class BertErrors(Predictor):
    """Predict one of 5 length classes, with the errors of a BERT trained for it.

    Draws the class that the real classifier gave to answers of the same tenth of the lengths,
    and returns the median of that class: lengths are compared by their place in the trace, so
    the errors carry over to a trace with longer or shorter answers. Published for vicuna-13b on
    LMSYS-Chat-1M, with answers cut at 512 tokens: rank correlation with the true lengths 0.63.
    What the classifier knows within a tenth is lost, which costs 0.005 of it.

    Parameters
    ----------
    path : str, optional
        A table of predictions to count instead: CSV, plain or gzip, with the columns
        ``output_token_length`` and ``predicted_class5`` (0..4, larger = longer).
    latency_s : float
        Time a prediction takes; by default what was measured for the real one.
    one_at_a_time : bool
        As in `Trained`.
    """

    emulated = True
    source = "Qiu et al. 2024, LLM-serving-with-proxy-models @ 4b86686 (Apache-2.0)"

    def __init__(
        self,
        path: str | None = None,
        latency_s: float = MEASURED_LATENCY_S,
        one_at_a_time: bool = False,
    ) -> None:
        super().__init__(latency_s)
        self.path = path
        self.one_at_a_time = one_at_a_time
        if path is not None and not Path(path).is_file():
            raise SpecError(f"no such table of predictions: {path}")

    def predict(self, inputs: PredictionInputs) -> Floats:
        """Return the median length of the predicted class, in tokens."""
        table = np.array(PREDICTIONS) if self.path is None else count_predictions(Path(self.path))
        true = inputs.output_tokens.astype(np.float64)
        # Equal lengths are spread over the tenths they fill, or a trace of few lengths had gaps.
        order = np.lexsort((inputs.rng.random(len(true)), true))
        tenth = np.empty(len(true), dtype=np.int64)
        tenth[order] = np.arange(len(true)) * len(table) // len(true)
        upto = np.cumsum(table, axis=1) / table.sum(axis=1, keepdims=True)
        drawn = (inputs.rng.random(len(true))[:, None] >= upto[tenth]).sum(axis=1)
        return np.asarray(_class_medians(table, true)[drawn])


def count_predictions(path: Path) -> npt.NDArray[np.int64]:
    """Return how often each class was predicted in each tenth of the true lengths, shape (10, 5).

    Raises
    ------
    SpecError
        If the table cannot be read, or a tenth has no answer; names the line.
    """
    length, predicted = [], []
    opened = gzip.open if path.suffix == ".gz" else open
    line = 1
    try:
        with opened(path, "rt", encoding="utf-8", newline="") as text:
            for line, row in enumerate(csv.DictReader(text), start=2):  # noqa: B007
                length.append(int(row[_LENGTH]))
                predicted.append(int(row[_CLASS]))
                if not 0 <= predicted[-1] < NUM_CLASSES:
                    raise ValueError(f"class {predicted[-1]} is not in 0..{NUM_CLASSES - 1}")
    except KeyError as error:
        raise SpecError(f"{path}:{line}: no column {error}") from None
    except (OSError, EOFError, ValueError, TypeError, csv.Error) as error:
        raise SpecError(f"{path}:{line}: {error}") from None
    if len(length) < _NUM_SLICES:
        raise SpecError(f"{path}: {len(length)} predictions, at least {_NUM_SLICES} are needed")
    edges = np.quantile(length, np.arange(1, _NUM_SLICES) / _NUM_SLICES)
    table = np.zeros((_NUM_SLICES, NUM_CLASSES), dtype=np.int64)
    np.add.at(table, (np.searchsorted(edges, length, side="left"), np.array(predicted)), 1)
    if not table.sum(axis=1).all():
        raise SpecError(f"{path}: too many equal lengths to cut them into {_NUM_SLICES} parts")
    return table


def _class_medians(table: npt.NDArray[np.int64], true: Floats) -> Floats:
    """Return the trace's length at the median place of each class's answers."""
    places = np.arange(len(table) + 1) / len(table)
    share = np.cumsum(table / table.sum(axis=1, keepdims=True), axis=0)
    share = np.concatenate([np.zeros((1, table.shape[1])), share])
    # What is never predicted needs no place.
    medians = [np.interp(upto[-1] / 2, upto, places) if upto[-1] else 0.0 for upto in share.T]
    # A class that answers longer must not be given a shorter length by the coarse places.
    return np.asarray(np.quantile(true, np.maximum.accumulate(medians)), dtype=np.float64)
