"""How long a sealed batch will take, told from batches that were run before."""

from __future__ import annotations

import numpy as np

from schedlab.policies.predictors.model_folder import ModelFolder
from schedlab.policies.predictors.predictor import Floats

SERVING_TIME = "knn"
_ARRAYS = ("batches", "scale", "serving_time_s")


class ServingTime:
    """Magnus' estimator: the mean over the nearest batches by size and padded lengths.

    Nearness is in the logarithms of (number of requests, padded prompt tokens, padded predicted
    output tokens), each divided by its deviation in the training set: batches that differ by the
    same factors are equally far apart. Nearer batches count more, by the inverse of the distance.

    Parameters
    ----------
    batches : ndarray of float64, shape (num_batches, 3)
        The batches seen, as logarithms.
    scale : ndarray of float64, shape (3,)
        Deviation of each column.
    serving_time_s : ndarray of float64, shape (num_batches,)
        How long each took.
    num_neighbors : int
        How many batches an estimate looks at.
    """

    def __init__(
        self, batches: Floats, scale: Floats, serving_time_s: Floats, num_neighbors: int
    ) -> None:
        self.batches = batches
        self.scale = scale
        self.serving_time_s = serving_time_s
        self.num_neighbors = num_neighbors

    @classmethod
    def load(cls, path: str) -> ServingTime:
        """Read a model folder.

        Raises
        ------
        SpecError
            If it is not one, or not of this kind.
        """
        folder = ModelFolder.open(path, [SERVING_TIME])
        arrays = folder.arrays(_ARRAYS)
        return cls(
            arrays["batches"],
            arrays["scale"],
            arrays["serving_time_s"],
            folder.get("num_neighbors", int),
        )

    def estimate_s(self, size: int, prompt_tokens: int, output_tokens: float) -> float:
        """Return the expected time of a batch, in seconds.

        Parameters
        ----------
        size : int
            Requests in it.
        prompt_tokens : int
            Length of its longest prompt, to which all are padded.
        output_tokens : float
            Largest predicted output.
        """
        batch = logarithms(np.array([[size, prompt_tokens, output_tokens]], dtype=np.float64))
        distance = np.sqrt((((self.batches - batch) / self.scale) ** 2).sum(axis=1))
        count = min(self.num_neighbors, len(distance))
        near = np.argpartition(distance, count - 1)[:count]
        weight = 1.0 / (distance[near] + 1e-9)
        return float(weight @ self.serving_time_s[near] / weight.sum())


def logarithms(batches: Floats) -> Floats:
    """Return the columns in which batches are compared."""
    return np.asarray(np.log(np.maximum(batches, 1.0)))
