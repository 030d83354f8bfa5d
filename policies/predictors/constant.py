"""The predictor that knows nothing."""

import numpy as np

from schedlab.policies.predictors.predictor import Floats, PredictionInputs, Predictor
from schedlab.policies.predictors.registry import register


@register("constant")
class Constant(Predictor):
    """Return the same length for everyone: a length-aware policy falls back to arrival order.

    Parameters
    ----------
    tokens : float
        What it always says, > 0.
    latency_s : float
        Time a prediction takes; the scheduler sees the request that much later.
    """

    def __init__(self, tokens: float = 256.0, latency_s: float = 0.0) -> None:
        super().__init__(latency_s)
        if not tokens > 0:
            raise ValueError(f"tokens must be > 0, got {tokens}")
        self.tokens = tokens

    def predict(self, inputs: PredictionInputs) -> Floats:
        """Return `tokens` for each request."""
        return np.full(len(inputs.prompt_tokens), self.tokens)
