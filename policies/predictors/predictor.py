"""What every output-length predictor is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from schedlab.policies.knobs import Knobs

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
        that claims to predict must not read it; inside a server it is empty.
    application, prompt : sequence of str, optional
        Where the requests come from, and their text.
    prompt_ids : sequence of sequence of int, optional
        Token ids of the prompts; known inside a server, but not of a trace.
    rng : numpy.random.Generator
        The stream ``"predictor"``.
    """

    prompt_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    rng: np.random.Generator
    application: npt.NDArray[np.object_] | None = None
    prompt: npt.NDArray[np.object_] | None = None
    prompt_ids: npt.NDArray[np.object_] | None = None


class Predictor(Knobs):
    """Says how long answers will be, or in which order they will end; smaller is shorter.

    Parameters
    ----------
    latency_s : float, optional
        Time a prediction takes; the scheduler sees the request that much later. None only where
        a subclass knows it from a measurement.
    """

    source: ClassVar[str] = ""
    emulated: ClassVar[bool] = False
    """Whether it derives its predictions from the true lengths."""
    reads_text: ClassVar[bool] = False
    """Whether it cannot predict without the text of a prompt."""
    one_at_a_time: bool = False
    """Whether a prediction waits until those of earlier requests are made."""

    def __init__(self, latency_s: float | None = 0.0) -> None:
        if latency_s is not None and not 0.0 <= latency_s < math.inf:
            raise ValueError(f"latency_s must be finite and >= 0, got {latency_s}")
        self.latency_s = latency_s

    @property
    def cost_s(self) -> float:
        """Time a prediction takes, in seconds."""
        return self.latency_s or 0.0

    def delay_s(self, arrival_ns: npt.NDArray[np.int64]) -> Floats:
        r"""Return how long after its arrival each request has its prediction.

        Parameters
        ----------
        arrival_ns : ndarray of int64, shape (n,)
            Arrival times, not decreasing.

        Returns
        -------
        ndarray of float64, shape (n,)
            Seconds: `cost_s`, or, with `one_at_a_time`, the time in a first-come, first-served
            queue before it as well: :math:`d_i = \max_{j \le i} (a_j + (i - j + 1) c) - a_i`.
        """
        cost_ns = round(self.cost_s * 1e9)
        if not self.one_at_a_time:
            return np.full(len(arrival_ns), cost_ns / 1e9)
        served_ns = np.arange(len(arrival_ns) + 1) * cost_ns
        begun_ns = np.maximum.accumulate(arrival_ns - served_ns[:-1])
        return np.asarray((begun_ns + served_ns[1:] - arrival_ns) / 1e9)

    def describe(self) -> dict[str, Any]:
        """Return what a results file says of it."""
        return {"latency_s": self.cost_s, "one_at_a_time": self.one_at_a_time}

    def predict(self, inputs: PredictionInputs) -> Floats:
        """Return one prediction a request, shape (n,)."""
        raise NotImplementedError(f"{type(self).__name__} does not override predict()")

    def refine(self, inputs: PredictionInputs) -> npt.NDArray[np.object_] | None:
        """Return the `Refinement` of each request, shape (n,), if it is asked again, else None.

        Called once, after `predict`.
        """
        return None
