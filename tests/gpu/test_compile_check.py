"""What is compiled to be looked at, and what is read out of it, without a compiler."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from schedlab.gpu_backend import compile_check  # noqa: E402
from schedlab.gpu_backend.compile_check import Compiled, compile_launch  # noqa: E402
from schedlab.gpu_backend.kernels import decode, prefill, rope_cache  # noqa: E402
from schedlab.gpu_backend.kernels.activation import silu_and_mul_kernel  # noqa: E402
from schedlab.gpu_backend.kernels.launch import Device, Launch, Plan  # noqa: E402
from schedlab.gpu_backend.kernels.norm import add_rms_norm_kernel  # noqa: E402
from schedlab.gpu_backend.kernels.tiles import PrefillTile  # noqa: E402
from tests.gpu.test_wgmma_hazards import LOOP  # noqa: E402

A100 = Device(80, 108)


def test_step_launches_are_those_of_a_decode_batch_and_of_long_and_short_prompts():
    told = list(compile_check.step_launches(A100, head_dim=64, group=3, num_kv_heads=5))
    assert [(one.kernel, one.grid[0]) for one in told] == [
        (decode.decode_kernel, 5), (decode.reduce_kernel, 15), (prefill.prefill_kernel, 5),
        (prefill.prefill_kernel, 5), (rope_cache.rope_cache_kernel, 2048),
        (add_rms_norm_kernel, 2048), (silu_and_mul_kernel, 2048),
    ]  # fmt: skip
    shapes = [
        {name: tuple(x.shape) for name, x in one.args.items() if isinstance(x, torch.Tensor)}
        for one in told
    ]
    cache = {"k_pool": (4096, 5, 16, 64), "v_pool": (4096, 5, 16, 64)}
    prompts = {
        "q": (2048, 15, 64), **cache, "block_tables": (4, 512), "query_start": (5,),
        "context_lens": (4,), "out": (2048, 15, 64),
    }  # fmt: skip
    split = shapes[0]
    assert (split["q"], split["block_tables"], split["context_lens"], split["out"]) == (
        (64, 15, 64), (64, 512), (64,), (64, 15, 64),
    )  # fmt: skip
    assert shapes[2] == shapes[3] == prompts
    # 512 tokens of three heads fill a tile of 128 rows; one token does not.
    assert [one.constants["BLOCK_M"] for one in told[2:4]] == [128, 64]
    assert told[2].args["q"].stride(0) == (15 + 2 * 5) * 64
    assert told[2].args["scale_log2"] == pytest.approx(0.125 * 1.4426950408889634)
    assert shapes[4] == cache | {
        "q": (2048, 15, 64), "k": (2048, 5, 64), "v": (2048, 5, 64), "cos_sin": (8192, 64),
        "positions": (2048,), "slots": (2048,),
    }  # fmt: skip
    types = [told[4].args[name].dtype for name in ("q", "cos_sin", "positions", "slots")]
    assert types == [torch.bfloat16, torch.float32, torch.int64, torch.int64]
    assert set(shapes[5].values()) == {(2048, 15 * 64), (15 * 64,)}
    assert shapes[6] == {"gate_up": (2048, 2 * 14336), "out": (2048, 14336)}
    half = compile_check.step_launches(A100, head_dim=64, group=3, dtype=torch.float16)
    assert next(half).args["q"].dtype == torch.float16


def test_searched_launch_is_a_prefill_by_llama_in_the_tile():
    tile = PrefillTile(64, 128, num_warps=2, num_stages=7)
    told = compile_check.searched_launch(A100, tile)
    # 64 rows are 16 tokens of four heads: 2048 / 16 tiles and one a sequence.
    assert (told.kernel, told.grid) == (prefill.prefill_kernel, (8, 128 + 4))
    assert (told.constants["GROUP"], told.constants["HEAD_DIM"]) == (4, 128)
    assert (told.constants["BLOCK_M"], told.constants["BLOCK_N"]) == (64, 128)
    assert (told.num_warps, told.num_stages) == (2, 7)
    assert tuple(told.args["query_start"].shape) == (5,)
    assert tuple(told.args["block_tables"].shape) == (4, 512)


def param(name, *, constant=False, free=False, annotation=""):
    return SimpleNamespace(
        name=name, is_constexpr=constant, do_not_specialize=free, annotation_type=annotation
    )


def test_launch_is_compiled_as_for_its_arguments_and_told_with_its_code(monkeypatch):
    params = [
        param("x"), param("lens"), param("scale"), param("one"), param("free_one", free=True),
        param("stride"), param("wide", annotation="i64"), param("free_32", free=True),
        param("odd"), param("GROUP", constant=True), param("HEAD_DIM", constant=True),
    ]  # fmt: skip
    kernel = SimpleNamespace(
        params=params, arg_names=["x", "lens"], fn=SimpleNamespace(__name__="some_kernel")
    )
    tensors = (torch.zeros(1, dtype=torch.float16), torch.zeros(1, dtype=torch.int32))
    numbers = {
        "scale": 0.5, "one": 1, "free_one": 1, "stride": 48, "wide": 32, "free_32": 32, "odd": 17,
    }  # fmt: skip
    asked = {}

    def compiled(source, target, options):
        asked.update(source=source, target=target, options=options)
        metadata = SimpleNamespace(shared=4321)
        return SimpleNamespace(asm={"cubin": b"code"}, metadata=metadata)

    told = {
        "registers": 3, "stack_bytes": 4, "local_accesses": 5, "wide_async_copies": 6, "hgmma": 7,
        "hmma": 8, "hazards": 9,
    }  # fmt: skip
    monkeypatch.setattr(compile_check, "ASTSource", lambda *given: given)
    monkeypatch.setattr(compile_check, "GPUTarget", lambda *given: given)
    monkeypatch.setattr(compile_check, "triton", SimpleNamespace(compile=compiled))
    monkeypatch.setattr(compile_check, "_inspect", lambda code, counts: told | {"hmma": counts})
    plan = Plan(kernel, (1,), numbers, {"GROUP": 2, "HEAD_DIM": 64}, num_warps=8, num_stages=3)
    assert compile_launch(Launch(plan, tensors), 90) == Compiled(
        kernel="some_kernel", arch=90, head_dim=64, group=2, shared_bytes=4321, tile="",
        **told | {"hmma": True},
    )  # fmt: skip
    aligned = [["tt.divisibility", 16]]
    assert asked["source"] == (
        kernel,
        {"x": "*fp16", "lens": "*i32", "scale": "fp32", "one": "constexpr", "free_one": "i32",
         "stride": "i32", "wide": "i64", "free_32": "i32", "odd": "i32", "GROUP": "constexpr",
         "HEAD_DIM": "constexpr"},
        {"one": 1, "GROUP": 2, "HEAD_DIM": 64},
        {(0,): aligned, (1,): aligned, (5,): aligned, (6,): aligned},
    )  # fmt: skip
    assert asked["target"] == ("cuda", 90, 32)
    assert asked["options"] == {"num_warps": 8, "num_stages": 3, "enable_fp_fusion": True}
    bare = SimpleNamespace(params=[], arg_names=[], fn=SimpleNamespace(__name__="bare"))
    plain = compile_launch(Launch(Plan(bare, (1,), {}, {}), ()), 80)
    assert (plain.kernel, plain.head_dim, plain.group, plain.hmma) == ("bare", 0, 0, False)


SPILLS = """
        /*0190*/                   STL [R1], R88 ;                                   /* 0x0 */
        /*01a0*/                   LDL.64 R2, [R1+0x8] ;                             /* 0x0 */
        /*01b0*/                   LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64] ;      /* 0x0 */
        /*01c0*/                   LDGSTS.E.64 [R5], desc[UR4][R2.64] ;              /* 0x0 */
        /*01d0*/                   HMMA.16816.F32 R4, R8, R2, R4 ;                   /* 0x0 */
        /*01e0*/                   HMMA.16816.F32 R4, R8, R2, R4 ;                   /* 0x0 */
        /*01f0*/                   LDLX R2 ;                                         /* 0x0 */
        /*0200*/                   EXIT ;                                            /* 0x0 */
"""


def inspected(
    monkeypatch, sass, usage="Function k:\n REG:77 STACK:24 SHARED:0 LOCAL:0", counts=True
):
    asked = []
    compile_check._inspect.cache_clear()

    def run(arguments, **options):
        tool, option, path = arguments
        asked.append((tool, option, Path(path).read_bytes(), options))
        return SimpleNamespace(stdout=sass if option == "--dump-sass" else usage)

    monkeypatch.setattr(compile_check, "cuobjdump", lambda: Path("tool"))
    monkeypatch.setattr(compile_check, "subprocess", SimpleNamespace(run=run))
    found = compile_check._inspect(b"binary", counts=counts)
    options = {"check": True, "capture_output": True, "text": True}
    assert asked == [
        ("tool", option, b"binary", options)
        for option in ("--dump-resource-usage", "--dump-sass")[: 1 + counts]
    ]
    return found


def test_machine_code_is_told_by_registers_stack_and_instructions_of_each_kind(monkeypatch):
    counts = {"registers": 77, "stack_bytes": 24, "hazards": 0}
    assert inspected(monkeypatch, LOOP) == counts | {
        "local_accesses": 0, "wide_async_copies": 0, "hgmma": 3, "hmma": 0,
    }  # fmt: skip
    assert inspected(monkeypatch, SPILLS) == counts | {
        "local_accesses": 2, "wide_async_copies": 1, "hgmma": 0, "hmma": 2,
    }  # fmt: skip
    names = ("local_accesses", "wide_async_copies", "hgmma", "hmma", "hazards")
    found = inspected(monkeypatch, SPILLS, counts=False)
    assert found == {"registers": 77, "stack_bytes": 24, **dict.fromkeys(names)}
    touching = LOOP.replace("IADD3 R5, R5, 0x1, RZ", "MOV R155, RZ")
    assert inspected(monkeypatch, touching)["hazards"] == 1
    with pytest.raises(ValueError, match="resource usage is not understood: 'REG:7'"):
        inspected(monkeypatch, LOOP, "REG:7")
    monkeypatch.setattr(compile_check, "hazards", lambda code: [])
    with pytest.raises(ValueError, match="planted in the machine code was not found"):
        inspected(monkeypatch, LOOP)
    assert inspected(monkeypatch, SPILLS)["hgmma"] == 0, "nothing is planted where nothing can be"
    monkeypatch.setattr(compile_check, "cuobjdump", lambda: None)
    compile_check._inspect.cache_clear()
    assert compile_check._inspect(b"", counts=True) == dict.fromkeys(
        ("registers", "stack_bytes", *names)
    )


def test_instructions_are_counted_by_whole_names_from_their_beginning(monkeypatch):
    named = {
        "local_accesses": ["LDL", "LDL.64", "STL.128"],
        "wide_async_copies": ["LDGSTS.E.BYPASS.LTC128B.128", "LDGSTS.E.128"],
        "hgmma": ["HGMMA", "HGMMA.64x64x16.F32", "HGMMA.64x8x16.F32", "HGMMA.SP"],
        "hmma": ["HMMA.16816.F32"],
        # What has such a name inside of its own is another instruction.
        "none of them": ["ULDL", "LDLX", "XSTL.64", "LDGSTS.E.LTC128B.64", "ULDGSTS.E.128",
                         "LDGSTS.128", "UTCHMMA", "QHMMA.16832", "HMMAX", "QGMMA", "UTCHGMMA"],
    }  # fmt: skip
    code = [SimpleNamespace(name=name) for names in named.values() for name in names]
    monkeypatch.setattr(compile_check, "parse", lambda sass: code)
    monkeypatch.setattr(compile_check, "plant", lambda given: given)
    monkeypatch.setattr(compile_check, "hazards", lambda given: given[:2])
    counts = {name: len(names) for name, names in named.items() if name != "none of them"}
    assert compile_check._count("") == {**counts, "hazards": 2}


def test_everything_is_compiled_once_and_told_a_line_each(monkeypatch, capsys):
    fields = dict.fromkeys(Compiled._fields[4:-1], 1)

    def compiled(launch, arch):
        get = launch.constants.get
        return Compiled(str(launch.kernel), arch, get("HEAD_DIM", 0), get("GROUP", 0), **fields)

    def launches(device, *, head_dim, group):
        sizes = {"HEAD_DIM": head_dim, "GROUP": group}
        yield Launch(Plan(f"tiled on {device.num_sms}", (1,), {}, sizes, num_stages=2), ())
        yield Launch(Plan("rows", (1,), {}, sizes), ())

    monkeypatch.setattr(compile_check, "compile_launch", compiled)
    monkeypatch.setattr(compile_check, "step_launches", launches)
    tile = PrefillTile(8, 2, num_warps=3, num_stages=4)
    monkeypatch.setattr(compile_check, "PREFILL_TILES", (tile,))
    compile_check.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    told = [(row["kernel"], row["arch"], row["head_dim"], row["group"]) for row in rows[:-1]]
    assert told == [
        ("tiled on 108", 80, 128, 4), ("rows", 80, 128, 4), ("tiled on 108", 80, 256, 4),
        ("tiled on 132", 90, 64, 4), ("tiled on 132", 90, 128, 1), ("tiled on 132", 90, 128, 4),
        ("rows", 90, 128, 4), ("tiled on 132", 90, 256, 4),
    ]  # fmt: skip
    assert {row["tile"] for row in rows[:-1]} == {""}
    searched = rows[-1]
    assert (searched["arch"], searched["head_dim"], searched["tile"]) == (90, 128, str(tile))


def test_disassembler_is_the_one_beside_triton(monkeypatch, tmp_path):
    place = SimpleNamespace(__file__=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(compile_check, "triton", place)
    assert compile_check.cuobjdump() is None
    tool = tmp_path / "backends/nvidia/bin/cuobjdump"
    tool.parent.mkdir(parents=True)
    tool.touch()
    assert compile_check.cuobjdump() == tool
