"""Compile the kernels for a GPU that is not there, and read what the compiler made of them.

``python -m schedlab.gpu_backend.compile_check`` compiles every launch of a decode step and a
prefill step for sm_80 and sm_90, and the prefill tiles of the tile search for sm_90, and prints
shared memory, registers, spills, hazards and the instructions that matter. What is compiled are the
very launches that `gpu_backend.triton_ops` would make, on tensors without memory. It says nothing
of speed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from schedlab.gpu_backend.kernels.activation import silu_and_mul_launch
from schedlab.gpu_backend.kernels.decode import decode_launches
from schedlab.gpu_backend.kernels.launch import Device, Launch
from schedlab.gpu_backend.kernels.norm import add_rms_norm_launch
from schedlab.gpu_backend.kernels.prefill import prefill_launch
from schedlab.gpu_backend.kernels.rope_cache import rope_cache_launch
from schedlab.gpu_backend.kernels.tiles import PrefillTile
from schedlab.gpu_backend.tile_search import PREFILL_TILES
from schedlab.gpu_backend.wgmma_hazards import hazards, parse, plant

DEVICES = {80: Device(80, 108), 90: Device(90, 132)}
"""An A100 and an H200."""

USUAL = (128, 4)
"""Head dimension, and query heads a KV head, of most models (Llama 3)."""

SHAPES = {80: (USUAL, (256, 4)), 90: ((64, 4), (128, 1), USUAL, (256, 4))}
"""Shapes of attention to compile for: fewer for the part that is measured less."""

SHARED_LIMIT_BYTES = {80: 166_912, 90: 232_448}
"""Most dynamic shared memory of a program (CUDA C++ Programming Guide, compute capabilities)."""

_POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
             torch.int32: "*i32", torch.int64: "*i64"}  # fmt: skip
_ALIGNED = [["tt.divisibility", 16]]
_PATTERNS = {
    "local_accesses": r"(?:LDL|STL)\b",
    "wide_async_copies": r"LDGSTS\.E\..*128\b",
    "hgmma": r"HGMMA\b",
    "hmma": r"HMMA\b",
}


class Compiled(NamedTuple):
    """What became of one kernel.

    The counts of instructions are None without cuobjdump, and of kernels without a pipeline, of
    which nothing is asked but that they do not spill: what spills has a stack.
    """

    kernel: str
    arch: int
    head_dim: int
    group: int
    shared_bytes: int
    registers: int | None
    stack_bytes: int | None
    local_accesses: int | None
    """Instructions LDL and STL: registers spilled to memory."""
    wide_async_copies: int | None
    """Asynchronous copies of 128 bits from global to shared memory."""
    hgmma: int | None
    """Warp-group tensor-core instructions (Hopper)."""
    hmma: int | None
    """Warp tensor-core instructions."""
    hazards: int | None
    """Instructions that touch registers of a warp-group product under way."""
    tile: str = ""
    """The tile tried, where it is not the table's."""


def cuobjdump() -> Path | None:
    """Return the disassembler that comes with triton, if it does."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return tool if tool.exists() else None


def step_launches(
    device: Device,
    *,
    head_dim: int,
    group: int,
    num_kv_heads: int = 8,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[Launch]:
    """Yield every launch of a decode step of 64 rows and of a prefill of 2048 tokens."""

    def meta(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    num_heads = group * num_kv_heads
    k_pool, v_pool = (meta(4096, num_kv_heads, block_size, head_dim) for _ in "kv")
    for num_tokens, num_seqs in ((64, 64), (2048, 4)):
        fused = meta(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
        q, k, v = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        out = meta(num_tokens, num_heads, head_dim)
        tables = meta(num_seqs, 512, dtype=torch.int32)
        context_lens = meta(num_seqs, dtype=torch.int32)
        scale = head_dim**-0.5
        if num_tokens == num_seqs:
            yield from decode_launches(device, q, k_pool, v_pool, tables, context_lens, scale, out)
            continue
        starts = meta(num_seqs + 1, dtype=torch.int32)
        for max_query_tokens in (512, 1):
            yield prefill_launch(
                device, q, k_pool, v_pool, tables, starts, context_lens, max_query_tokens,
                scale, out,
            )  # fmt: skip
        yield rope_cache_launch(
            q, k, v, meta(8192, head_dim, dtype=torch.float32),
            meta(num_tokens, dtype=torch.int64), meta(num_tokens, dtype=torch.int64),
            k_pool, v_pool,
        )  # fmt: skip
        x = out.flatten(1)
        yield add_rms_norm_launch(x, x, meta(x.shape[1]), 1e-5, x, x)
        yield silu_and_mul_launch(meta(num_tokens, 2 * 14336), meta(num_tokens, 14336))


def searched_launch(device: Device, tile: PrefillTile) -> Launch:
    """Return the launch of a prefill of 2048 tokens by Llama-3-8B in a given tile."""
    q, out = (torch.empty(2048, 32, 128, dtype=torch.bfloat16, device="meta") for _ in "qo")
    pool = torch.empty(4096, 8, 16, 128, dtype=torch.bfloat16, device="meta")
    tables, starts, context_lens = (
        torch.empty(*size, dtype=torch.int32, device="meta") for size in ((4, 512), (5,), (4,))
    )
    return prefill_launch(
        device, q, pool, pool, tables, starts, context_lens, 512, 128**-0.5, out, tile
    )


def compile_launch(launch: Launch, arch: int) -> Compiled:
    """Compile a launch as the JIT would for its arguments, and inspect the machine code.

    Raises
    ------
    triton.compiler.errors.CompilationError
        If the kernel does not compile.
    ValueError
        If the disassembler's output is not understood.
    """
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attrs: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, param in enumerate(launch.kernel.params):
        if param.is_constexpr:
            signature[param.name] = "constexpr"
            constants[param.name] = launch.constants[param.name]
            continue
        value = launch.args[param.name]
        specialized = not param.do_not_specialize
        if isinstance(value, Tensor):
            signature[param.name] = _POINTERS[value.dtype]
            attrs[(i,)] = _ALIGNED
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        elif value == 1 and specialized:
            signature[param.name] = "constexpr"
            constants[param.name] = 1
        else:
            signature[param.name] = param.annotation_type or "i32"
            if specialized and value % 16 == 0:
                attrs[(i,)] = _ALIGNED
    source = ASTSource(launch.kernel, signature, constants, attrs)
    options = {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": True,
    }
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    code = _inspect(built.asm["cubin"], counts=_has_pipeline(launch))
    return Compiled(
        kernel=launch.kernel.fn.__name__,
        arch=arch,
        head_dim=launch.constants.get("HEAD_DIM", 0),
        group=launch.constants.get("GROUP", 0),
        shared_bytes=built.metadata.shared,
        tile="",
        **code,
    )


def _has_pipeline(launch: Launch) -> bool:
    """Tell whether a kernel loads its next tiles while it works: the attention does."""
    return launch.num_stages > 1


@cache  # two launches may be one binary, and the disassembler takes longer than the compiler
def _inspect(cubin: bytes, *, counts: bool) -> dict[str, int | None]:
    """Return registers, stack and, if asked for, counts of instructions of a binary."""
    if (tool := cuobjdump()) is None:
        return dict.fromkeys(["registers", "stack_bytes", *_PATTERNS, "hazards"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)

        def dump(option: str) -> str:
            asked = [str(tool), option, str(path)]
            done = subprocess.run(asked, check=True, capture_output=True, text=True)
            return str(done.stdout)

        usage = dump("--dump-resource-usage")
        sass = dump("--dump-sass") if counts else ""
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise ValueError(f"cuobjdump's resource usage is not understood: {usage!r}")
    resources = {"registers": int(found[1]), "stack_bytes": int(found[2])}
    return resources | (_count(sass) if counts else dict.fromkeys([*_PATTERNS, "hazards"]))


def _count(sass: str) -> dict[str, int | None]:
    """Return counts of instructions of a disassembled binary."""
    code = parse(sass)
    operations = Counter(instruction.name for instruction in code)
    counts = {
        name: sum(count for operation, count in operations.items() if re.match(pattern, operation))
        for name, pattern in _PATTERNS.items()
    }
    # A checker that finds nothing is believed only where it finds what was planted.
    if counts["hgmma"] and not hazards(plant(code)):
        raise ValueError("a hazard planted in the machine code was not found")
    return {**counts, "hazards": len(hazards(code))}


def main() -> None:
    """Compile everything and print one JSON object a line."""
    import json

    for arch, device in DEVICES.items():
        for head_dim, group in SHAPES[arch]:
            for launch in step_launches(device, head_dim=head_dim, group=group):
                # In the kernels without a pipeline a shape is the width of a row: once is enough.
                if _has_pipeline(launch) or (head_dim, group) == USUAL:
                    print(json.dumps(compile_launch(launch, arch)._asdict()), flush=True)
    for tile in PREFILL_TILES:
        built = compile_launch(searched_launch(DEVICES[90], tile), 90)._replace(tile=str(tile))
        print(json.dumps(built._asdict()), flush=True)


if __name__ == "__main__":
    main()
