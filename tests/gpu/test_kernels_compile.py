"""What the compiler makes of the kernels for an A100 and an H200, with neither at hand.

The compiler runs in a process of its own, as triton decides at import whether it interprets.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from schedlab.gpu_backend import compile_check  # noqa: E402
from schedlab.gpu_backend.kernels.tiles import PrefillTile, decode_tile  # noqa: E402
from schedlab.gpu_backend.tile_search import PREFILL_TILES  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
ATTENTION = ("decode_kernel", "prefill_kernel")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiled():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "schedlab.gpu_backend.compile_check"],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [compile_check.Compiled(**json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture
def table(compiled):
    return [c for c in compiled if not c.tile]


@pytest.fixture
def disassembled(table):
    if compile_check.cuobjdump() is None:
        pytest.skip("this triton comes without cuobjdump, so the machine code cannot be read")
    return table


def test_every_kernel_compiles_for_both_architectures(compiled):
    for arch in (80, 90):
        assert {c.kernel for c in compiled if c.arch == arch} == {
            "decode_kernel", "reduce_kernel", "prefill_kernel", "rope_cache_kernel",
            "add_rms_norm_kernel", "silu_and_mul_kernel",
        }  # fmt: skip


def test_shared_memory_fits_the_architecture(table):
    for c in table:
        # More than the limit compiles all the same, and fails only when it is loaded.
        assert c.shared_bytes <= compile_check.SHARED_LIMIT_BYTES[c.arch], c
    # The buffers of the pipeline are there at all.
    assert all(c.shared_bytes >= 16_384 for c in table if c.kernel in ATTENTION)


def test_tiles_of_other_parts_than_data_centre_ones_fit_them(table):
    # Compute capabilities 8.6, 8.9 and 12.x use Ampere's tiles and have 99 KiB.
    assert all(c.shared_bytes <= 99 * 1024 for c in table if c.arch == 80)


def test_prefill_on_hopper_holds_three_tiles_of_keys_and_values(table):
    (shared_bytes,) = {
        c.shared_bytes
        for c in table
        if (c.kernel, c.arch, c.head_dim, c.group) == ("prefill_kernel", 90, 128, 4)
        and c.shared_bytes > 2 * 64 * 1024
    }
    queries, keys_and_values = 2 * 128 * 128, 2 * 2 * 128 * 128
    assert shared_bytes == queries + 3 * keys_and_values


def test_searched_tiles_are_compiled_and_at_least_the_four_stages_of_64_fit(compiled):
    by_tile = {c.tile: c for c in compiled if c.tile}
    assert len(by_tile) == len(PREFILL_TILES)
    four = by_tile[str(PrefillTile(128, 64, num_warps=8, num_stages=4))]
    assert four.shared_bytes <= compile_check.SHARED_LIMIT_BYTES[90]


def test_no_register_of_a_product_under_way_is_touched(compiled):
    # compile_check itself proves on every binary that a planted hazard is found.
    if compile_check.cuobjdump() is None:
        pytest.skip("this triton comes without cuobjdump")
    assert [c for c in compiled if c.hazards] == []


def test_decode_keeps_at_least_two_tiles_of_keys_in_flight_on_hopper(compiled):
    for c in compiled:
        if c.kernel == "decode_kernel" and c.arch == 90:
            tile = decode_tile(compile_check.DEVICES[90], c.head_dim, torch.bfloat16)
            keys_and_values_bytes = 2 * 2 * tile.block_n * c.head_dim
            assert c.shared_bytes >= 2 * keys_and_values_bytes, c


def test_no_kernel_spills_registers(disassembled):
    for c in disassembled:
        if c.head_dim <= 128:
            assert (c.stack_bytes, c.local_accesses or 0) == (0, 0), c


def test_attention_copies_the_cache_asynchronously_in_128_bits(disassembled):
    for c in disassembled:
        if c.kernel in ATTENTION:
            assert c.wide_async_copies, c


def test_prefill_uses_warp_group_instructions_on_hopper_and_tensor_cores_on_ampere(disassembled):
    for c in disassembled:
        if c.kernel == "prefill_kernel":
            assert (c.hgmma, c.hmma)[c.arch == 80], c
            assert (c.hgmma, c.hmma)[c.arch != 80] == 0, c


def test_decode_uses_tensor_cores(disassembled):
    assert all(c.hmma for c in disassembled if c.kernel == "decode_kernel")
