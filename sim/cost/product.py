"""A matrix product: what it computes in whole tiles, and how that overlaps with its traffic."""

from __future__ import annotations

import math
from typing import Final

from schedlab.sim.cost.efficiency import Gemm
from schedlab.sim.hardware.gpus import Gpu

TILE: Final = 128
"""Rows and columns of a product that one thread block computes; half as many rows where there are
no more."""

OVERLAP: Final = 3.0
"""How sharply arithmetic and traffic of a product hide behind each other:
``(a**OVERLAP + b**OVERLAP)**(1/OVERLAP)``, a maximum with a round corner."""


class Product:
    """One product of a model on a device, by the rows it is asked for.

    Parameters
    ----------
    gemm : Gemm
        What kernels of its formats reach.
    inputs, outputs : float
        Columns of its two factors, on one device.
    weight_bytes : float
        What is read once, whatever the rows.
    row_bytes : float
        What each row reads and writes.
    peak_flops_per_s : float
        Of the device, in the format of the arithmetic.
    device : Gpu
        The device.
    """

    __slots__ = (
        "_bandwidth_share", "_column_tiles", "_flops_per_column", "_flops_share", "_latency_s",
        "_memory_bytes_per_s", "_num_sms", "_outputs", "_peak_flops_per_s", "_plain_share",
        "_row_bytes", "_tile_share", "_wave_share", "_weight_bytes",
    )  # fmt: skip

    def __init__(
        self,
        gemm: Gemm,
        inputs: float,
        outputs: float,
        weight_bytes: float,
        row_bytes: float,
        peak_flops_per_s: float,
        device: Gpu,
    ) -> None:
        self._latency_s: float = gemm.latency_s
        self._bandwidth_share: float = gemm.bandwidth_share
        self._flops_share: float = gemm.flops_share
        self._tile_share: float = gemm.tile_share
        self._wave_share: float = gemm.wave_share
        self._plain_share: float = 1.0 - gemm.tile_share - gemm.wave_share
        self._flops_per_column = 2.0 * inputs
        self._outputs = outputs
        self._column_tiles = math.ceil(outputs / TILE)
        self._weight_bytes = weight_bytes
        self._row_bytes = row_bytes
        self._peak_flops_per_s = peak_flops_per_s
        self._memory_bytes_per_s: float = device.memory_bytes_per_s
        self._num_sms: int = device.num_sms

    def arithmetic(self, rows: float) -> float:
        """Return the operations that the product takes the time of, at least those it has."""
        tile = float(TILE) if rows > TILE / 2 else TILE / 2
        padded = math.ceil(rows / tile) * tile
        tiles = math.ceil(padded / TILE) * self._column_tiles
        wave = math.ceil(tiles / self._num_sms) * self._num_sms * TILE * TILE
        area = self._plain_share * rows + self._tile_share * padded
        return self._flops_per_column * (area * self._outputs + self._wave_share * wave)

    def seconds(self, rows: float) -> float:
        """Return how long the product takes."""
        traffic_s = (self._weight_bytes + rows * self._row_bytes) / self._memory_bytes_per_s
        arithmetic_s = self.arithmetic(rows) / self._peak_flops_per_s
        computing_s, moving_s = arithmetic_s / self._flops_share, traffic_s / self._bandwidth_share
        overlapped_s = math.pow(
            math.pow(computing_s, OVERLAP) + math.pow(moving_s, OVERLAP), 1 / OVERLAP
        )
        return self._latency_s + overlapped_s
