"""Kernels that made a table are found again from it, and no fit leaves the bounds of a device."""

from dataclasses import asdict

import numpy as np
import pytest

from schedlab.sim.cost.efficiency import AllReduce, Elementwise, Experts, Gemm, Host, Sampler
from schedlab.sim.cost.learning.fit import _PLAIN, fit_gemm, mean_error
from schedlab.sim.cost.learning.predict import PREDICT, gemm_us
from schedlab.sim.cost.learning.tables import Table
from schedlab.sim.hardware.gpus import gpu

H100 = gpu("h100-80gb")


def grid(**axes):
    arrays = np.meshgrid(*(np.array(values, dtype=float) for values in axes.values()))
    return {name: array.ravel() for name, array in zip(axes, arrays, strict=True)}


MADE = {
    "elementwise": [Elementwise(4e-6, 0.6), Elementwise(1e-6, 1.0)],
    "sampler": [Sampler(50e-6, 12.0), Sampler(120e-6, 2.5)],
    "experts": [Experts(30e-6, 0.5, 0.7), Experts(9e-6, 0.9, 0.3)],
    "all_reduce": [AllReduce(12e-6, 2e-6, 0.7, 0.2), AllReduce(4e-6, 0.0, 0.4, 0.5)],
}
COLUMNS = {
    "elementwise": grid(bytes=[1e3, 1e5, 1e7, 1e8, 1e9]),
    "sampler": grid(logits=[1e3, 1e6, 1e7, 1e8, 1e9]),
    "experts": grid(
        tokens=[1, 16, 300, 4096, 16384], hidden=[2048, 4096], width=[768, 14336], top=[2, 8],
        experts=[8, 128], slices=[1], shares=[1, 2], even=[0, 1],
    ),
    "all_reduce": grid(bytes=[1e3, 1e5, 1e7, 1e9], devices=[2, 4, 8]),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "which"), [(kind, i) for kind in MADE for i in (0, 1)])
def test_fit_of_a_plain_kernel_finds_the_numbers_that_made_its_table(kind, which):
    kernel, columns = MADE[kind][which], COLUMNS[kind]
    table = columns | {"us": PREDICT[kind](kernel, columns, H100)}
    # Half of the rows in a table of their own, as from another source.
    parts = [{key: column[i::2] for key, column in table.items()} for i in (0, 1)]
    tables = [Table("h100-80gb", kind, "made", part) for part in parts]
    found = asdict(_PLAIN[kind](tables, H100))
    assert found == pytest.approx(asdict(kernel), rel=0.02, abs=2e-8)
    assert mean_error(PREDICT[kind](type(kernel)(**found), columns, H100), table) < 0.01


def test_fit_of_launches_is_their_median_over_all_tables():
    tables = [
        Table("h100-80gb", "launch", "made", {"us": np.array(us)})
        for us in ([9.0, 1.0], [4.0, 5.0, 80.0])
    ]
    assert asdict(_PLAIN["launch"](tables, H100)) == pytest.approx(asdict(Host(5e-6)))


PRODUCTS = grid(m=[1, 16, 64, 100, 256, 1024, 4096], n=[4096, 8192, 28672], k=[4096, 8192])


@pytest.mark.parametrize(
    "made",
    [
        Gemm(4e-6, 0.85, 0.7, 0.4, 0.1), Gemm(2e-6, 0.9, 0.5, 0.0, 0.5),
        Gemm(5.5e-6, 0.6, 0.9, 0.95, 0.0), Gemm(0.1e-6, 0.6, 0.6, 0.7, 0.25),
    ],
)  # fmt: skip
def test_fit_of_products_keeps_every_number_within_its_bounds(made):
    table = PRODUCTS | {"us": gemm_us(made, PRODUCTS, H100, "bf16")}
    found = fit_gemm([Table("h100-80gb", "gemm bf16", "made", table)], H100, "bf16")
    assert found.latency_s >= 0.5e-6
    assert min(found.bandwidth_share, found.flops_share) >= 0.05
    assert max(found.bandwidth_share, found.flops_share) <= 1
    assert 0 <= found.tile_share <= 0.75
    assert 0 <= found.wave_share <= 0.25
    inside = made.wave_share <= 0.25 and made.tile_share <= 0.75 and made.latency_s >= 0.5e-6
    if inside:
        assert asdict(found) == pytest.approx(asdict(made), rel=0.02, abs=1e-3)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_start_of_products_is_at_most_what_the_smallest_of_any_table_take(order):
    slow, quick = (
        PRODUCTS | {"us": gemm_us(Gemm(latency, 0.8, 0.7, 0.2, 0.1), PRODUCTS, H100, "bf16")}
        for latency in (90e-6, 1e-6)
    )
    both = [slow, quick]
    tables = [Table("h100-80gb", "gemm bf16", "made", both[i]) for i in order]
    smallest_us = np.quantile(quick["us"], 0.01)
    assert 1.5 * smallest_us > 6
    found = fit_gemm(tables, H100, "bf16")
    assert found.latency_s <= 1.5e-6 * smallest_us * 1.001
