"""That compiled kernels called directly are those that Triton's JIT would call, with its arguments.

Run by `test_direct_launches` in a process of its own, in which Triton compiles.
"""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from schedlab.gpu_backend import compile_check
from schedlab.gpu_backend.kernels import launch as launch_module
from schedlab.gpu_backend.kernels.launch import Device, Launch, Plan
from tests.gpu.stand_in import DEVICE, StandInDriver

HOPPER = Device(90, 132)
MEMORY = torch.zeros(64 * 64, dtype=torch.uint8)
PLACES = itertools.cycle(range(60))
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64)
LIMIT = 2**31
INTEGERS = (
    0, 1, 2, 8, 15, 16, 17, 24, 32, 48, 4096, 4097, -1, -15, -16, LIMIT - 1, LIMIT - 16, LIMIT,
    LIMIT + 1, LIMIT + 16, -LIMIT, -LIMIT - 1, 2**40, 2**40 + 1, 2**63, True, False,
)  # fmt: skip
FLOATS = (0.0, 1.0, 16.0, 0.3)


@pytest.fixture
def driver(monkeypatch):
    """Stand in for the driver, with nothing compiled; count what goes through the JIT."""
    driver = StandInDriver()
    driver.by_jit = 0
    jit_run = JITFunction.run

    def counted(self, *args, **given):
        driver.by_jit += 1
        return jit_run(self, *args, **given)

    monkeypatch.setattr(JITFunction, "run", counted)
    monkeypatch.setattr(launch_module, "_BUILT", {})
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    yield driver
    # Binaries are unloaded by the driver that loaded them.
    launch_module._BUILT.clear()
    for launch in usual():
        launch.kernel.device_caches.clear()


def usual(dtype=torch.bfloat16):
    """Return each kernel's launch, on memory that is there."""
    given = compile_check.step_launches(HOPPER, head_dim=64, group=4, dtype=dtype)
    return [changed(one, tensors=tuple(memory(x.dtype) for x in one.tensors)) for one in given]


def changed(launch, tensors=None, **changes):
    """Return a launch of other tensors or another plan."""
    names = ("kernel", "grid", "numbers", "constants", "num_warps", "num_stages")
    plan = Plan(**{name: changes.get(name, getattr(launch.plan, name)) for name in names})
    return Launch(plan, launch.tensors if tensors is None else tensors)


def memory(dtype, offset=0):
    """Return a tensor whose address is `offset` bytes behind a multiple of 64, its own for long."""
    start = -MEMORY.data_ptr() % 64 + 64 * next(PLACES) + offset
    return MEMORY[start : start + 64].view(dtype)


def by_jit(launch):
    """Launch the way it is done without a short cut."""
    launch.kernel[launch.grid](
        *launch.tensors, **launch.plan.numbers, **launch.constants,
        num_warps=launch.num_warps, num_stages=launch.num_stages, enable_fp_fusion=True,
    )  # fmt: skip


def told(noted):
    """Return a launch without who watches it, and with tensors as what Triton's C code makes of
    them."""
    args = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in noted.args]
    return noted[:4], [(type(a), a) for a in args]


def check_as_jit(launch, driver):
    """Launch twice and by the JIT: the same thrice. Return how often the short cut was taken."""
    before = driver.by_jit
    launch.run()
    launch.run()
    short = 2 - (driver.by_jit - before)
    by_jit(launch)
    first, second, right = (told(noted) for noted in driver.launches[-3:])
    assert first == right
    assert second == right
    return short


def test_every_kernel_is_called_as_the_jit_calls_it(driver):
    kernels = usual()
    assert len({launch.kernel.fn for launch in kernels}) == 6
    for launch in kernels:
        driver.stream += 1
        assert check_as_jit(launch, driver) == 1
    # From now on nothing goes through the JIT but what is compared with.
    before, compiled = driver.by_jit, len(driver.binaries)
    for launch in kernels:
        other = changed(launch, grid=(3, 5))
        assert check_as_jit(other, driver) == 2
    assert driver.by_jit == before + len(kernels)
    assert len(driver.binaries) == compiled


def test_binaries_that_differ_are_told_apart(driver):
    (silu,) = (one for one in usual() if one.kernel.__name__ == "silu_and_mul_kernel")
    gate_up, out = silu.tensors
    unaligned, wide = memory(torch.bfloat16, 2), memory(torch.float32)
    cases = [
        silu,
        changed(silu, (unaligned, out)),
        changed(silu, (gate_up, unaligned)),
        changed(silu, (gate_up, wide)),
        changed(silu, numbers={"stride_gate_up": 1}),
        changed(silu, numbers={"stride_gate_up": 17}),
        changed(silu, constants=silu.constants | {"WIDTH": 64}),
        changed(silu, num_warps=8),
    ]
    for launch in [*cases, *reversed(cases)]:
        check_as_jit(launch, driver)
    assert len(driver.binaries) == len(cases)


def test_devices_and_kernels_are_told_apart(driver):
    silu = usual()[-1]
    twin = triton.jit(silu.kernel.fn, do_not_specialize=("stride_gate_up",))
    for launch in (silu, changed(silu, kernel=twin)) * 2:
        for driver.device in (DEVICE, DEVICE + 1):
            check_as_jit(launch, driver)
    assert len(driver.binaries) == 4
    twin.device_caches.clear()


def test_no_argument_gets_a_variant_that_the_jit_made_for_another(driver, monkeypatch):
    """Many arguments through the JIT's own tests of them, without its compiler."""

    def not_compiled(kernel):
        def compile_(key, signature, device, *rest):
            built = driver.launcher_cls(None, SimpleNamespace(
                num_ctas=1, global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0,
                profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=False,
            ))  # fmt: skip
            made = SimpleNamespace(
                run=built, function=next(functions), packed_metadata=(4, 1, 0),
                launch_metadata=lambda *_: None,
            )  # fmt: skip
            kernel.device_caches[device][0][key] = made
            return made

        return compile_

    functions, draw = itertools.count(), random.Random(0)
    short = 0
    for launch in (one for dtype in (torch.bfloat16, torch.float32) for one in usual(dtype)):
        monkeypatch.setattr(launch.kernel, "_do_compile", not_compiled(launch.kernel))
        for _ in range(400):
            # Few changes at a time, so that variants are met again.
            tensors, numbers = list(launch.tensors), dict(launch.plan.numbers)
            for _ in range(draw.randint(0, 2)):
                i, name = draw.randrange(len(tensors)), draw.choice(sorted(numbers))
                dtype = draw.choice((tensors[i].dtype, *DTYPES))
                tensors[i] = memory(dtype, draw.choice((0, 8, 16, 24, 32)))
                usual_kind = FLOATS if type(numbers[name]) is float else INTEGERS
                numbers[name] = draw.choice(usual_kind * 4 + FLOATS + INTEGERS)
            short += check_as_jit(changed(launch, tuple(tensors), numbers=numbers), driver)
    assert short > 2000


def test_who_watches_launches_is_told_of_each(driver):
    silu = usual()[-1]
    seen = []
    hook = triton.knobs.runtime.launch_enter_hook
    silu.run()
    hook.add(seen.append)
    try:
        silu.run()
    finally:
        hook.remove(seen.append)
    silu.run()
    assert driver.by_jit == 2
    assert [any(noted.watchers) for noted in driver.launches] == [True, True, False]


def test_a_triton_that_is_called_otherwise_is_left_to_itself(driver, monkeypatch):
    monkeypatch.setattr(launch_module, "_DIRECT", False)
    assert check_as_jit(changed(usual()[-1]), driver) == 0


def test_arguments_that_are_not_the_kernels_or_in_another_order_are_refused():
    silu, norm = usual()[-1], usual()[-2]
    with pytest.raises(ValueError, match="'BLOCK'] are not the constants of"):
        changed(
            silu, numbers={}, constants={**silu.plan.numbers, **silu.constants},
        )  # fmt: skip
    with pytest.raises(ValueError, match="'BLOCK', 'WIDTH'] are not the last of"):
        changed(silu, constants=dict(reversed(silu.constants.items())))
    with pytest.raises(ValueError, match="'stride_residual', 'stride_x'"):
        changed(norm, numbers=dict(reversed(norm.plan.numbers.items())))
