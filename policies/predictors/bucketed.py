"""A predictor that tells only a class of lengths."""

import numpy as np

from schedlab.policies.predictors.predictor import Floats, PredictionInputs, Predictor
from schedlab.policies.predictors.registry import register


@register("bucketed")
class Bucketed(Predictor):
    """Return the middle of the bucket an answer falls into, sometimes the wrong bucket's.

    Emulates length classifiers (Qiu et al. 2024 use 3 or 5 classes; S3 uses 10). Buckets have
    equal mass: their edges are quantiles of the trace's output lengths.

    Parameters
    ----------
    num_buckets : int
        Number of classes, >= 2.
    accuracy : float
        Share of requests put into the right bucket; the others go to a neighbouring one.
    """

    emulated = True

    def __init__(self, num_buckets: int = 5, accuracy: float = 1.0, latency_s: float = 0.0) -> None:
        super().__init__(latency_s)
        if num_buckets < 2:
            raise ValueError(f"num_buckets must be at least 2, got {num_buckets}")
        if not 0.0 <= accuracy <= 1.0:
            raise ValueError(f"accuracy must be in [0, 1], got {accuracy}")
        self.num_buckets = num_buckets
        self.accuracy = accuracy

    def predict(self, inputs: PredictionInputs) -> Floats:
        """Return the median length of the predicted bucket, in tokens."""
        true, n = inputs.output_tokens, self.num_buckets
        edges = np.quantile(true, np.arange(1, n) / n)
        bucket = np.searchsorted(edges, true, side="left")
        wrong = inputs.rng.random(len(true)) >= self.accuracy
        side = np.where(inputs.rng.random(len(true)) < 0.5, -1, 1)
        side = np.where(bucket == 0, 1, np.where(bucket == n - 1, -1, side))
        bucket = np.where(wrong, bucket + side, bucket)
        middles = np.quantile(true, (np.arange(n) + 0.5) / n)
        return np.asarray(middles[bucket], dtype=np.float64)
