"""A predictor whose error is dialled."""

import math

import numpy as np

from schedlab.policies.predictors.predictor import Floats, PredictionInputs, Predictor
from schedlab.policies.predictors.registry import register

_MOST_SIGMA = 50.0
"""Errors of a factor of e to it are common then; of larger ones no exponential is finite."""


@register("noisy")
class Noisy(Predictor):
    r"""Return the true length with an error of a given size.

    Give either `sigma` or `kendall_tau`.

    Parameters
    ----------
    sigma : float, optional
        Multiply the true length by :math:`e^{\sigma\varepsilon}`, with standard normal
        :math:`\varepsilon`; 0 is exact.
    kendall_tau : float, optional
        Rank correlation to reach with the true lengths, in [0, 1]. A Gaussian copula:
        :math:`s = \rho u + \sqrt{1-\rho^2}\,\varepsilon` with
        :math:`u = \Phi^{-1}(\mathrm{rank}/(n+1))`, :math:`\rho = \sin(\pi\tau/2)`, mapped back
        to lengths by the trace's own quantiles, so that the marginal stays that of the trace.
        Ties in the true lengths are broken at random.
    factor : float
        Systematic over-estimate (> 1) or under-estimate (< 1).
    latency_s : float
        Time a prediction takes; the scheduler sees the request that much later.
    """

    emulated = True
    source = "copula: Kendall's tau of a bivariate normal is 2/pi * arcsin(rho) (Kendall 1938)"

    def __init__(
        self,
        sigma: float | None = None,
        kendall_tau: float | None = None,
        factor: float = 1.0,
        latency_s: float = 0.0,
    ) -> None:
        super().__init__(latency_s)
        if (sigma is None) == (kendall_tau is None):
            raise ValueError("noisy takes exactly one of sigma and kendall_tau")
        if sigma is not None and not 0.0 <= sigma <= _MOST_SIGMA:
            raise ValueError(f"sigma must be between 0 and {_MOST_SIGMA:g}, got {sigma}")
        if kendall_tau is not None and not 0.0 <= kendall_tau <= 1.0:
            raise ValueError(f"kendall_tau must be in [0, 1], got {kendall_tau}")
        if not 0.0 < factor < math.inf:
            raise ValueError(f"factor must be finite and > 0, got {factor}")
        self.sigma = sigma
        self.kendall_tau = kendall_tau
        self.factor = factor

    def predict(self, inputs: PredictionInputs) -> Floats:
        """Return noisy lengths, in tokens."""
        true = inputs.output_tokens.astype(np.float64)
        if self.sigma is not None:
            error = np.exp(self.sigma * inputs.rng.standard_normal(len(true)))
            return np.asarray(true * error * self.factor)
        assert self.kendall_tau is not None
        return self._by_rank(true, self.kendall_tau, inputs.rng) * self.factor

    @staticmethod
    def _by_rank(true: Floats, kendall_tau: float, rng: np.random.Generator) -> Floats:
        from scipy.special import ndtr, ndtri

        n = len(true)
        rank = np.empty(n)
        rank[np.lexsort((rng.random(n), true))] = np.arange(1, n + 1)
        rho = math.sin(math.pi * kendall_tau / 2)
        noise = rng.standard_normal(n)
        score = rho * ndtri(rank / (n + 1)) + math.sqrt(1 - rho * rho) * noise
        return np.asarray(np.quantile(true, ndtr(score)))
