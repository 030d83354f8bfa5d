"""A predictor that was really trained."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from schedlab.policies.predictors.forest import FOREST, Forest
from schedlab.policies.predictors.model_folder import ModelFolder
from schedlab.policies.predictors.predictor import Floats, PredictionInputs, Predictor
from schedlab.policies.predictors.prompts import prompts
from schedlab.policies.predictors.registry import register
from schedlab.policies.predictors.text_model import KINDS, TextModel

LENGTH_KINDS = (*KINDS, FOREST)


def load_length_model(folder: ModelFolder) -> TextModel | Forest:
    """Read a model that predicts lengths.

    Raises
    ------
    SpecError
        If its weights are damaged, missing or do not fit.
    """
    return Forest.load(folder) if folder.meta["kind"] == FOREST else TextModel.load(folder)


@register("trained")
class Trained(Predictor):
    """Predict output lengths from the prompts' text, by a model trained with `predictor train`.

    Parameters
    ----------
    model : str
        Its folder.
    latency_s : float, optional
        Time a prediction takes; the median measured where the model was trained, if not given.
    one_at_a_time : bool
        Whether a prediction waits for those before it, as on a single CPU thread; else each
        takes `latency_s` from arrival, as on a device with room for all.
    """

    source = "Fu et al., NeurIPS 2024 (listmle); Magnus, arXiv:2406.04785 (random_forest)"
    reads_text = True

    def __init__(
        self, model: str, latency_s: float | None = None, one_at_a_time: bool = False
    ) -> None:
        super().__init__(latency_s)
        self.model = model
        self.one_at_a_time = one_at_a_time
        # Reading the small part here makes a wrong folder an error of the specification.
        self._folder = ModelFolder.open(model, LENGTH_KINDS)
        self._measured_s = self._folder.latency_s() if latency_s is None else latency_s

    @property
    def cost_s(self) -> float:
        """Time a prediction takes, given or measured."""
        return self._measured_s

    @cached_property
    def _model(self) -> TextModel | Forest:
        return load_length_model(self._folder)

    def predict(self, inputs: PredictionInputs) -> Floats:
        """Return predicted lengths, in tokens.

        Raises
        ------
        SpecError
            If the trace holds no text.
        """
        return self._model.lengths(prompts(inputs.prompt, inputs.prompt_tokens, inputs.application))

    def describe(self) -> dict[str, Any]:
        """Return what the model is and was trained on."""
        meta = self._folder.meta
        shown = ("kind", "encoder", "data", "seed", "weights_sha256")
        return super().describe() | {key: meta[key] for key in shown if key in meta}
