"""A predictor that tells only a class of lengths."""

from typing import Literal

import numpy as np

from schedlab.policies.predictors.predictor import Floats, PredictionInputs, Predictor
from schedlab.policies.predictors.registry import register

_Says = Literal["middle", "lower", "upper"]


@register("bucketed")
class Bucketed(Predictor):
    """Return a length for the bucket an answer falls into, sometimes for a neighbouring one.

    Emulates length classifiers. Buckets have equal mass, with edges at quantiles of the trace's
    output lengths (those of Qiu et al. 2024, of which they use 3 or 5, are percentiles, too), or
    equal width. S3 (Jin et al. 2023, arXiv:2306.06000), whose text was not at hand, is said to have
    ten as wide as a tenth of the longest sequence and to reserve the upper end of one; TetriInfer
    (Hu et al. 2024, arXiv:2401.11181, sections 3.3.2 and 5.2.3) counts on the lower end of buckets
    of 200 tokens, of which it finds 74.9 %, as a close account of it has it. What a wrong
    prediction of theirs looks like is not told.

    Parameters
    ----------
    num_buckets : int
        Number of classes of equal mass, >= 2; of no meaning with `bucket_tokens`.
    accuracy : float
        Share of requests put into the right bucket; the others go to a neighbouring one.
    latency_s : float
        Time a prediction takes; the scheduler sees the request that much later.
    bucket_tokens : int or None
        Width of all buckets: the first is of answers below so many tokens; None = equal mass.
    says : {"middle", "lower", "upper"}
        What is returned of a bucket: of equal mass its median or an edge, of equal width its
        middle or an end; at least one token.
    """

    emulated = True

    def __init__(
        self,
        num_buckets: int = 5,
        accuracy: float = 1.0,
        latency_s: float = 0.0,
        bucket_tokens: int | None = None,
        says: _Says = "middle",
    ) -> None:
        super().__init__(latency_s)
        if num_buckets < 2:
            raise ValueError(f"num_buckets must be at least 2, got {num_buckets}")
        if not 0.0 <= accuracy <= 1.0:
            raise ValueError(f"accuracy must be in [0, 1], got {accuracy}")
        if bucket_tokens is not None and bucket_tokens < 1:
            raise ValueError(f"bucket_tokens must be at least 1, or null, got {bucket_tokens}")
        if says not in ("middle", "lower", "upper"):
            raise ValueError(f"says must be middle, lower or upper, got {says!r}")
        self.num_buckets = num_buckets
        self.accuracy = accuracy
        self.bucket_tokens = bucket_tokens
        self.says = says

    def predict(self, inputs: PredictionInputs) -> Floats:
        """Return the length that the predicted bucket says, in tokens."""
        true, width = inputs.output_tokens, self.bucket_tokens
        if width is None:
            n = self.num_buckets
            bucket = np.searchsorted(np.quantile(true, np.arange(1, n) / n), true, side="left")
        else:
            bucket = true // width
            n = int(bucket.max(initial=0)) + 1
        wrong = inputs.rng.random(len(true)) >= self.accuracy
        side = np.where(inputs.rng.random(len(true)) < 0.5, -1, 1)
        side = np.where(bucket == 0, 1, np.where(bucket == n - 1, -1, side))
        bucket = np.where(wrong, bucket + side, bucket)
        # With one bucket there is a neighbour above it, if its width is known.
        places = np.arange(n + 1) + {"lower": 0.0, "middle": 0.5, "upper": 1.0}[self.says]
        lengths = np.quantile(true, places[:n] / n) if width is None else places * width
        return np.asarray(np.maximum(lengths[bucket], 1.0), dtype=np.float64)
