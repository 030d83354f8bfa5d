"""A CUDA driver without a GPU: Triton compiles for sm_90, and launches are noted, not made."""

from typing import Any, NamedTuple

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher

DEVICE = 97
"""No device of this machine: what is compiled for it stays out of the way of a real one's."""


class Noted(NamedTuple):
    """What Triton's C code would have been asked to launch."""

    grid: tuple[int, int, int]
    stream: int
    function: int
    metadata: tuple[int, ...]
    watchers: tuple[Any, Any]
    args: tuple[Any, ...]


class StandInDriver:
    """Takes the place of triton's CudaDriver; see `triton.runtime.driver.set_active`."""

    def __init__(self):
        self.device = DEVICE
        self.stream = 7
        self.launches: list[Noted] = []
        self.binaries: list[tuple[str, bytes]] = []
        self.utils = self

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        assert device == self.device
        return self.stream

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device):
        return {"max_shared_mem": 232_448}

    def load_binary(self, name, binary, shared, device):
        """Return module, function, registers, spills and threads; functions are numbered."""
        self.binaries.append((name, binary))
        return 1, len(self.binaries), 32, 0, 1024

    def unload_module(self, module):
        pass

    def launcher_cls(self, source, metadata):
        return _Launcher(self, metadata)


class _Launcher(CudaLauncher):
    """Triton's own way from a compiled kernel to its C code, which alone is stood in."""

    def __init__(self, driver, metadata):
        self._driver = driver
        self.num_ctas = metadata.num_ctas
        for name in ("global_scratch", "profile_scratch"):
            setattr(self, f"{name}_size", getattr(metadata, f"{name}_size"))
            setattr(self, f"{name}_align", getattr(metadata, f"{name}_align"))
        self.launch_cooperative_grid = metadata.launch_cooperative_grid
        self.launch_pdl = metadata.launch_pdl
        # Of Triton 3.9.
        self.gsan_enabled = False
        self.arg_annotations = self.kernel_signature = None

    def __call__(self, x, y, z, stream, function, metadata, told, enter, leave, *args):
        noted = Noted((x, y, z), stream, function, metadata, (enter, leave), args)
        self._driver.launches.append(noted)
        super().__call__(x, y, z, stream, function, metadata, told, enter, leave, *args)

    def launch(self, *args):
        pass
