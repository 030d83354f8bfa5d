"""What each kernel is told: every argument by name, worked out by hand from strides that differ."""

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from schedlab.gpu_backend import triton_ops  # noqa: E402
from schedlab.gpu_backend.kernels import decode, launch, prefill, rope_cache  # noqa: E402
from schedlab.gpu_backend.kernels.activation import silu_and_mul_launch  # noqa: E402
from schedlab.gpu_backend.kernels.launch import Device  # noqa: E402
from schedlab.gpu_backend.kernels.norm import add_rms_norm_launch  # noqa: E402
from schedlab.gpu_backend.kernels.tiles import DecodeTile, PrefillTile  # noqa: E402

HOPPER = Device(arch=90, num_sms=10)
# Three rows of 6 heads of 64, two KV heads; 9 blocks of 16 tokens; every stride its own.
QKV = torch.zeros(3, 10 * 64)
Q = QKV[:, : 6 * 64].view(3, 6, 64)
OUT = torch.zeros(3, 7, 64)[:, :6]
POOLS = torch.zeros(9, 2, 2, 16, 64)
K_POOL, V_POOL = POOLS[:, 0], POOLS[:, 1]
TABLES = torch.zeros(3, 11, dtype=torch.int32)[:, :5]
LENS = torch.tensor([80, 17, 1], dtype=torch.int32)
START = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
LOG2_E = 1 / math.log(2)


def plain(args):
    """Leave the tensors out, which are told apart by being the same object."""
    return {name: one for name, one in args.items() if not isinstance(one, torch.Tensor)}


def test_decode_launches_tell_strides_slots_and_tiles():
    tile = DecodeTile(block_n=32, min_tiles=2, programs_per_sm=3, num_warps=8, num_stages=5)
    split, merge = decode.decode_launches(
        HOPPER, Q, K_POOL, V_POOL, TABLES, LENS, 0.5, OUT, tile
    )  # fmt: skip
    # 10 multiprocessors times 3 over 2 KV heads: 15 splits aimed at, and one more a row; a table of
    # 5 blocks holds 80 tokens, two splits of at least 64 at the most, so six slots do.
    assert (split.grid, merge.grid) == ((2, 6), (6, 3))
    common = {"num_rows": 3, "num_slots": 6, "target_splits": 15, "stride_out": 7 * 64}
    assert plain(merge.args) == common
    scale_log2 = split.args["scale_log2"]
    assert scale_log2 == pytest.approx(0.5 * LOG2_E, rel=1e-15)
    assert plain(split.args) == common | {
        "scale_log2": scale_log2, "stride_table": 11, "stride_q": 640, "stride_block": 4096,
    }  # fmt: skip
    cut = {"GROUP": 3, "HEAD_DIM": 64, "BLOCK_B": 32, "BLOCK_N": 32, "MIN_TILES": 2}
    assert split.constants == cut | {"BLOCK_G": 16, "BLOCK_SIZE": 16}
    assert merge.constants == cut | {"BLOCK_S": 16}
    assert (split.num_warps, split.num_stages) == (8, 5)
    assert (merge.num_warps, merge.num_stages) == (4, 1)
    given = {
        "q": Q, "k_pool": K_POOL, "v_pool": V_POOL, "block_tables": TABLES, "context_lens": LENS,
        "out": OUT,
    }  # fmt: skip
    assert all(split.args[name] is one for name, one in given.items())
    assert merge.args["context_lens"] is LENS
    assert merge.args["out"] is OUT
    for name, shape in (("partial_out", (2, 6, 3, 64)), ("partial_lse", (2, 6, 3))):
        assert merge.args[name] is split.args[name]
        assert (tuple(split.args[name].shape), split.args[name].dtype) == (shape, torch.float32)


def test_decode_launches_of_many_rows_and_a_large_group_take_powers_of_two():
    q = torch.zeros(33, 20, 64)
    tables = torch.zeros(33, 1000, dtype=torch.int32)
    lens = torch.zeros(33, dtype=torch.int32)
    pool = torch.zeros(2, 1, 16, 64)
    split, _ = decode.decode_launches(HOPPER, q, pool, pool, tables, lens, 1.0, q)
    assert (split.constants["BLOCK_B"], split.constants["BLOCK_G"]) == (64, 32)
    # Of the table for float32: 8 programs a multiprocessor, one KV head; long tables bound nothing.
    assert split.grid == (1, 80 + 33)
    assert (split.constants["BLOCK_N"], split.constants["MIN_TILES"], split.num_stages) == (
        32,
        4,
        2,
    )
    many_heads = torch.zeros(2, 100, 16, 64)
    few = decode.decode_launches(
        HOPPER, q.new_zeros(33, 100, 64), many_heads, many_heads, tables, lens, 1.0, q
    )[0]
    assert few.args["target_splits"] == 1


def test_prefill_launch_tells_strides_and_a_tile_for_each_beginning():
    tile = PrefillTile(block_m=16, block_n=8, num_warps=2, num_stages=7)
    told = prefill.prefill_launch(
        HOPPER, Q, K_POOL, V_POOL, TABLES, START, LENS, 1, 0.25, OUT, tile
    )
    # Tiles of 16 rows hold five tokens of three heads: 3 tokens fill none, one more a sequence.
    assert told.grid == (2, 0 + 3)
    scale_log2 = told.args["scale_log2"]
    assert scale_log2 == pytest.approx(0.25 * LOG2_E, rel=1e-15)
    assert plain(told.args) == {
        "scale_log2": scale_log2, "num_seqs": 3, "stride_table": 11, "stride_q": 640,
        "stride_out": 448, "stride_block": 4096,
    }  # fmt: skip
    assert told.constants == {
        "GROUP": 3, "HEAD_DIM": 64, "BLOCK_SIZE": 16, "BLOCK_M": 16, "BLOCK_N": 8,
        "SEARCH_WIDTH": 128,
    }  # fmt: skip
    assert (told.num_warps, told.num_stages) == (2, 7)
    given = {
        "q": Q, "k_pool": K_POOL, "v_pool": V_POOL, "block_tables": TABLES, "query_start": START,
        "context_lens": LENS, "out": OUT,
    }  # fmt: skip
    assert all(told.args[name] is one for name, one in given.items())
    long = prefill.prefill_launch(
        HOPPER, Q, K_POOL, V_POOL, TABLES, START, LENS, 30, 0.25, OUT
    )  # fmt: skip
    assert long.constants["BLOCK_M"] == 64, "of the table for float32, where 90 rows are not few"
    longer = prefill.prefill_launch(
        HOPPER, torch.zeros(53, 6, 64), K_POOL, V_POOL, TABLES, START, LENS, 1, 1.0, OUT, tile
    )
    assert longer.grid == (2, 10 + 3)


def test_rope_launch_tells_strides_of_every_part_and_warps_for_its_width():
    k, v = QKV[:, 384:512].view(3, 2, 64), torch.zeros(3, 3, 64)[:, :2]
    cos_sin, positions, slots = torch.zeros(5, 64), LENS, START
    told = rope_cache.rope_cache_launch(Q, k, v, cos_sin, positions, slots, K_POOL, V_POOL)
    assert told.grid == (3,)
    assert plain(told.args) == {
        "stride_q": 640, "stride_k": 640, "stride_v": 192, "stride_block": 4096
    }  # fmt: skip
    assert told.constants == {"NUM_HEADS": 6, "NUM_KV_HEADS": 2, "HEAD_DIM": 64, "BLOCK_SIZE": 16}
    given = (Q, k, v, cos_sin, positions, slots, K_POOL, V_POOL)
    names = ("q", "k", "v", "cos_sin", "positions", "slots", "k_pool", "v_pool")
    assert all(told.args[name] is one for name, one in zip(names, given, strict=True))
    warps = [
        rope_cache.rope_cache_launch(
            torch.zeros(1, heads, 64), k, v, cos_sin, positions, slots, K_POOL, V_POOL
        ).num_warps
        for heads in (63, 64, 65)
    ]
    assert (told.num_warps, warps) == (4, [4, 8, 8])


def test_norm_launch_reads_the_input_twice_where_there_is_no_residual():
    x, residual = torch.zeros(3, 1500)[:, :900], torch.zeros(3, 1000)[:, :900]
    weight, normed, total = torch.zeros(900), torch.zeros(3, 900), torch.ones(3, 900)
    both = add_rms_norm_launch(x, residual, weight, 1e-5, normed, total)
    alone = add_rms_norm_launch(x, None, weight, 1e-6, normed, x)
    assert (both.grid, both.num_warps, both.num_stages) == ((3,), 2, 1)
    assert plain(both.args) == {"eps": 1e-5, "stride_x": 1500, "stride_residual": 1000}
    assert plain(alone.args) == {"eps": 1e-6, "stride_x": 1500, "stride_residual": 0}
    assert both.constants == {"HIDDEN": 900, "BLOCK": 1024, "HAS_RESIDUAL": True}
    assert alone.constants == {"HIDDEN": 900, "BLOCK": 1024, "HAS_RESIDUAL": False}
    given = {"x": x, "residual": residual, "weight": weight, "normed": normed, "total": total}
    assert all(both.args[name] is one for name, one in given.items())
    assert alone.args["residual"] is x
    assert alone.args["total"] is x
    warps = [
        add_rms_norm_launch(torch.zeros(1, n), None, weight, 1e-5, normed, x).num_warps
        for n in (100, 512, 1024, 8192, 20_000)
    ]
    assert warps == [1, 1, 2, 16, 16]


class Kernel:
    """Notes how it is run."""

    def __getitem__(self, grid):
        return lambda *tensors, **given: self.__dict__.update(
            grid=grid, tensors=tensors, given=given
        )


def test_launch_runs_its_kernel_with_all_it_has_and_fused_multiplications():
    kernel = Kernel()
    plan = launch.Plan(kernel, (2, 3), {"n": 1}, {"B": 2}, num_warps=8, num_stages=4)
    launch.Launch(plan, (Q,)).run()
    assert kernel.grid == (2, 3)
    assert kernel.tensors == (Q,)
    assert kernel.given == {
        "n": 1, "B": 2, "num_warps": 8, "num_stages": 4, "enable_fp_fusion": True,
    }  # fmt: skip


def test_device_is_told_by_capability_and_an_old_one_is_refused(monkeypatch):
    class Properties:
        name, major, minor, multi_processor_count = "Tesla T4", 7, 5, 40

    launch._cuda_device.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    with pytest.raises(launch.SpecError, match=r"Tesla T4 has compute capability 7\.5"):
        launch._cuda_device(0)
    Properties.major, Properties.minor = 8, 0
    assert launch._cuda_device(1) == Device(arch=80, num_sms=40)
    Properties.major, Properties.minor = 10, 3
    assert launch._cuda_device(2) == Device(arch=103, num_sms=40)
    launch._cuda_device.cache_clear()
    assert launch.device_of(Q) == launch.INTERPRETER


def test_pools_and_heads_that_kernels_would_misread_are_refused():
    def decode_of(q=Q, k=K_POOL, v=V_POOL, out=OUT):
        triton_ops.paged_decode(q, k, v, TABLES, LENS, 1.0, out)

    wide = torch.zeros(3, 6, 128)[:, :, :64]
    with pytest.raises(ValueError, match="heads of q must be contiguous"):
        decode_of(q=wide)
    with pytest.raises(ValueError, match="heads of out must be contiguous"):
        decode_of(out=wide)
    with pytest.raises(ValueError, match="v_pool"):
        decode_of(v=V_POOL.contiguous())
    turned = torch.zeros(9, 16, 2, 64).transpose(1, 2)
    with pytest.raises(ValueError, match="blocks of a pool must be contiguous"):
        decode_of(k=turned, v=turned)

    def rope_of(k, v):
        triton_ops.rope_and_cache(Q, k, v, Q, LENS, START, K_POOL, V_POOL)

    good, bad = torch.zeros(3, 2, 64), torch.zeros(3, 2, 128)[:, :, :64]
    with pytest.raises(ValueError, match="heads of k must"):
        rope_of(bad, good)
    with pytest.raises(ValueError, match="heads of v must"):
        rope_of(good, bad)


def test_activation_launch_halves_what_it_is_given():
    gate_up, out = torch.zeros(3, 5000)[:, :2400], torch.zeros(3, 1200)
    told = silu_and_mul_launch(gate_up, out)
    assert told.args["gate_up"] is gate_up
    assert told.args["out"] is out
    # Blocks of 1024 columns of each token.
    assert told.grid == (3, 2)
    assert plain(told.args) == {"stride_gate_up": 5000}
    assert told.constants == {"WIDTH": 1200, "BLOCK": 1024}
    assert (told.num_warps, told.num_stages) == (4, 1)


def test_launches_on_tensors_of_the_same_shapes_share_a_plan():
    wide, other = torch.zeros(3, 5000), torch.zeros(3, 5000)
    out = torch.zeros(3, 1200)
    first = silu_and_mul_launch(wide[:, :2400], out)
    assert silu_and_mul_launch(other[:, 100:2500], torch.ones(3, 1200)).plan is first.plan
    for gate_up, into in ((wide[:, :2400].clone(), out), (wide[:2, :2400], out[:2])):
        assert silu_and_mul_launch(gate_up, into).plan is not first.plan
