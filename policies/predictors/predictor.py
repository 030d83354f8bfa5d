"""What every output-length predictor is."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PredictionInputs:
    """The requests to predict, in columns of equal length.

    Attributes
    ----------
    prompt_tokens : ndarray of int64, shape (n,)
        Prompt lengths.
    output_tokens : ndarray of int64, shape (n,)
        True output lengths, for predictors that emulate one with a known error. A predictor
        that claims to predict must not read it.
    application, prompt : sequence of str, optional
        Where the requests come from, and their text.
    rng : numpy.random.Generator
        The stream ``"predictor"``.
    """

    prompt_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    rng: np.random.Generator
    application: npt.NDArray[np.object_] | None = None
    prompt: npt.NDArray[np.object_] | None = None


class Predictor:
    """Says how long answers will be, or in which order they will end; smaller is shorter.

    Parameters
    ----------
    latency_s : float
        Time a prediction takes; the scheduler sees the request that much later.
    """

    source: ClassVar[str] = ""
    emulated: ClassVar[bool] = False
    """Whether it derives its predictions from the true lengths."""

    def __init__(self, latency_s: float = 0.0) -> None:
        if not 0.0 <= latency_s < math.inf:
            raise ValueError(f"latency_s must be finite and >= 0, got {latency_s}")
        self.latency_s = latency_s

    def predict(self, inputs: PredictionInputs) -> Floats:
        """Return one prediction a request, shape (n,)."""
        raise NotImplementedError(f"{type(self).__name__} does not override predict()")

    @classmethod
    def knobs(cls) -> dict[str, inspect.Parameter]:
        """Return the constructor's parameters by name."""
        parameters = dict(inspect.signature(cls.__init__).parameters)
        parameters.pop("self", None)
        return parameters

    def get_params(self) -> dict[str, Any]:
        """Return the constructor's parameters as they are now."""
        return {name: getattr(self, name) for name in type(self).knobs()}
