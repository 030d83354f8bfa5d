"""Settings of property tests, and what several tests need that takes a while to make.

Property tests draw the same examples every time, however slow the machine. For more, choose a
profile by name: ``--hypothesis-profile=thorough`` draws over twenty times as many, as fixed,
``explore`` new ones; ``quick`` draws a few, for an answer while one writes.
"""

import atexit
import gc
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO

import pytest
from hypothesis import HealthCheck, settings

from tests.data_folder import data_folder

# Tests share the cores already: a library that starts a thread a core in each worker only waits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What commands print must not depend on how wide somebody's terminal is.
os.environ.pop("COLUMNS", None)

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
_ANY = settings(deadline=None, suppress_health_check=_SLOW, print_blob=True)
settings.register_profile("quick", _ANY, max_examples=5, derandomize=True)
settings.register_profile("lean", _ANY, max_examples=18, derandomize=True)
settings.register_profile("thorough", _ANY, max_examples=400, derandomize=True)
settings.register_profile("explore", _ANY, max_examples=1000)
settings.load_profile("lean")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Make ``-n auto`` one worker for each core that this process may use, eight at most."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(usable or 1, 8)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep modules and tests, which stay to the end, out of what is searched for garbage."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


# What libraries made is taken apart at the end, or some of them complain; but only then, as pytest
# searches all of it several times before.
atexit.register(gc.unfreeze)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files first that build something dear for all of their tests.

    Workers take over each other's last tests, and would build it once more.
    """
    built_in = {"test_wheel", "test_kernels_compile"}
    items.sort(key=lambda item: item.path.stem not in built_in)


@contextmanager
def _blank_figures() -> Iterator[None]:
    from matplotlib.figure import Figure

    def save(self: Figure, file: str | Path | IO[bytes], **_: object) -> None:
        if isinstance(file, str | Path):
            Path(file).write_bytes(b"<svg/>")
        else:
            file.write(b"<svg/>")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save)
        yield


@pytest.fixture
def blank_figures() -> Iterator[None]:
    """Let figures be saved without being drawn, which takes longer than what is asked here."""
    with _blank_figures():
        yield


@pytest.fixture(scope="module")
def blank_figures_of_module() -> Iterator[None]:
    """Let no test of a module draw what it saves."""
    with _blank_figures():
        yield


@pytest.fixture(scope="session")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Import the kernel timings of both recorded runs, once."""
    from schedlab.sim.cost.importers.llmservingsim import Options, import_bundle

    root = tmp_path_factory.mktemp("profiles")
    for name in ("RTX4090", "RTXPRO6000"):
        path = data_folder() / "vllm_ground_truth/perf" / name / "meta-llama/Llama-3.1-8B/bf16"
        import_bundle(path, Options()).save(root / name.lower())
    return root


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """Return what lets no file grow beyond so many bytes, as on a disk without room for more."""
    resource = pytest.importorskip("resource")

    @contextmanager
    def full(num_bytes: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return full
