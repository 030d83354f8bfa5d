"""The predictor that is always right."""

from schedlab.policies.predictors.predictor import Floats, PredictionInputs, Predictor
from schedlab.policies.predictors.registry import register


@register("oracle")
class Oracle(Predictor):
    """Return the true output length: the bound that no real predictor passes."""

    emulated = True

    def predict(self, inputs: PredictionInputs) -> Floats:
        """Return the true lengths, in tokens."""
        return inputs.output_tokens.astype("float64")
