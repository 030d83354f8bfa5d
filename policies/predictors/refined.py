"""A predictor that is asked again while an answer is generated."""

import math

import numpy as np
import numpy.typing as npt

from schedlab.policies.predictors.predictor import Floats, PredictionInputs, Predictor
from schedlab.policies.predictors.registry import register
from schedlab.sim.request import Refinement


@register("refined")
class Refined(Predictor):
    r"""Return the true length with an error, and while an answer is generated what is left of it.

    Emulates a classifier that reads the serving model's hidden states (TRAIL). Both errors are
    normal, of a mean absolute size in tokens, :math:`\sigma = \sqrt{\pi/2}\,\mathrm{MAE}`, as in
    the noise that TRAIL's authors give their oracle. The first is on the whole answer, at least
    one token; those that follow are on the tokens left, at least none, so that a prediction
    sharpens as the end comes near. All draws are independent: TRAIL smooths successive predictions
    of an answer over time, which is not emulated. The defaults are what the authors measured on
    Alpaca answers of up to 512 tokens of Llama-3-8B; other answers have other errors.

    Parameters
    ----------
    first_mae_tokens : float
        Mean absolute error of the prediction from the prompt.
    refined_mae_tokens : float
        Mean absolute error of a prediction of the tokens left.
    every_tokens : int
        Tokens of an answer after which it is asked again. The engine does not wait for it.
    latency_s : float
        Time the prediction from the prompt takes; the scheduler sees the request that much later.
    """

    emulated = True
    source = "TRAIL (ICLR 2025, arXiv:2410.01035), harvard-cns/TRAIL-llm-scheduling, README"

    def __init__(
        self,
        first_mae_tokens: float = 46.1,
        refined_mae_tokens: float = 33.9,
        every_tokens: int = 8,
        latency_s: float = 0.0,
    ) -> None:
        super().__init__(latency_s)
        for name, mae in (
            ("first_mae_tokens", first_mae_tokens),
            ("refined_mae_tokens", refined_mae_tokens),
        ):
            if not 0.0 <= mae < math.inf:
                raise ValueError(f"{name} must be finite and >= 0, got {mae}")
        if every_tokens < 1:
            raise ValueError(f"every_tokens must be at least 1, got {every_tokens}")
        self.first_mae_tokens = first_mae_tokens
        self.refined_mae_tokens = refined_mae_tokens
        self.every_tokens = every_tokens

    def predict(self, inputs: PredictionInputs) -> Floats:
        """Return what it says of whole answers before they begin, in tokens."""
        error = _normal(inputs.rng, self.first_mae_tokens, len(inputs.output_tokens))
        return np.maximum(inputs.output_tokens + error, 1.0)

    def refine(self, inputs: PredictionInputs) -> npt.NDArray[np.object_]:
        """Return what it says of each answer while it is generated."""
        times = (inputs.output_tokens - 1) // self.every_tokens
        ends = np.cumsum(times)
        number = np.arange(1, int(times.sum()) + 1) - np.repeat(ends - times, times)
        seen = number * self.every_tokens
        left = np.repeat(inputs.output_tokens, times) - seen
        error = _normal(inputs.rng, self.refined_mae_tokens, len(seen))
        totals = (seen + np.maximum(left + error, 0.0)).tolist()
        refinements = np.empty(len(times), dtype=object)
        for i, (end, count) in enumerate(zip(ends.tolist(), times.tolist(), strict=True)):
            refinements[i] = Refinement(self.every_tokens, totals[end - count : end])
        return refinements


def _normal(rng: np.random.Generator, mae: float, count: int) -> Floats:
    return np.asarray(rng.standard_normal(count) * (mae * math.sqrt(math.pi / 2.0)))
