"""Latencies beside what was predicted for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LatencyErrors:
    """Measured and predicted latencies of the same requests.

    Attributes
    ----------
    measured_ms, predicted_ms : dict of str to float
        By name.
    """

    measured_ms: dict[str, float]
    predicted_ms: dict[str, float]

    @property
    def errors(self) -> dict[str, float]:
        """Signed relative error of each latency, as a fraction; positive = predicted too slow."""
        return {name: self.predicted_ms[name] / ms - 1 for name, ms in self.measured_ms.items()}

    def latencies_ms(self) -> dict[str, dict[str, float]]:
        """Return measured, predicted and error of each latency, as plain data."""
        return {
            name: {"measured": ms, "predicted": self.predicted_ms[name], "error": error}
            for (name, ms), error in zip(
                self.measured_ms.items(), self.errors.values(), strict=True
            )
        }
