"""The GPU table and GPUs from files."""

import json
import pickle
import re
from dataclasses import replace

import pytest

from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu, gpu_names
from schedlab.sim.hardware.models import model

FIELDS = {
    "memory_bytes": 96_000_000_000,
    "memory_bytes_per_s": 1.5e12,
    "flops_per_s": {"bf16": 400e12},
    "interconnect_bytes_per_s": 64e9,
    "pcie_bytes_per_s": 64e9,
    "num_sms": 96,
}


def write(path, **changes):
    data = {key: value for key, value in {**FIELDS, **changes}.items() if value != "absent"}
    path.write_text(json.dumps(data))
    return str(path)


def test_every_gpu_has_16_bit_arithmetic_and_a_source():
    for name in set(gpu_names()) - {"cpu"}:
        device = gpu(name)
        assert device.peak_flops_per_s("bf16") == device.peak_flops_per_s("fp16") > 1e13
        assert "datasheet" in device.source or "whitepaper" in device.source


def test_devices_of_an_engine_are_those_of_its_stages_not_of_the_engines_beside_it():
    where = Deployment(
        model("llama-3-8b"), gpu("a100-80gb"), tensor_parallel_size=2, pipeline_parallel_size=4,
        data_parallel_size=3,
    )  # fmt: skip
    assert where.num_devices == 8


def test_peaks_are_dense_not_sparse():
    # H100 SXM: the datasheet prints 1,979 TFLOP/s bf16 and 3,958 fp8, both with sparsity.
    assert gpu("h100").peak_flops_per_s("bf16") == pytest.approx(1979e12 / 2, rel=1e-3)
    assert gpu("h100").peak_flops_per_s("fp8") == pytest.approx(3958e12 / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("alias", "name"),
    [("A100", "a100-80gb"), ("NVIDIA H200", "h200"), ("rtx4090", "rtx-4090"),
     ("h100_80gb", "h100-80gb")],
)  # fmt: skip
def test_gpu_by_alias_is_the_table_entry(alias, name):
    assert gpu(alias) is gpu(name)


# As drivers tell them: a calibration knows the device by nothing else.
PRODUCTS = {
    "NVIDIA A100-PCIE-40GB": "a100-40gb-pcie", "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100 80GB PCIe": "a100-80gb-pcie", "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA H100 PCIe": "h100-80gb-pcie", "NVIDIA H100 80GB HBM3": "h100-80gb",
    "NVIDIA H200": "h200", "NVIDIA B200": "b200", "NVIDIA L4": "l4", "NVIDIA L40S": "l40s",
    "NVIDIA A10": "a10", "NVIDIA RTX A6000": "rtx-a6000", "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx-pro-6000-workstation",
}  # fmt: skip


@pytest.mark.parametrize("product", PRODUCTS)
def test_gpu_by_the_name_that_its_driver_tells_is_the_table_entry(product):
    assert gpu(product).name == PRODUCTS[product]


def test_every_gpu_of_the_table_is_known_by_a_drivers_name():
    assert {*PRODUCTS.values()} == {*gpu_names()} - {"cpu"}


def test_gpu_with_unknown_name_names_the_nearest():
    with pytest.raises(SpecError, match=r"'h10' is unknown; did you mean h100\?"):
        gpu("h10")


def test_gpu_without_a_format_names_those_it_has():
    with pytest.raises(
        SpecError, match="a100-80gb does not compute in fp8; it has bf16, fp16, int8"
    ):
        gpu("a100").peak_flops_per_s("fp8")


def test_gpu_survives_pickling():
    assert pickle.loads(pickle.dumps(gpu("h200"))) == gpu("h200")
    assert hash(gpu("h200")) == hash(pickle.loads(pickle.dumps(gpu("h200"))))


def test_gpu_from_json_takes_its_name_from_the_file(tmp_path):
    device = gpu(write(tmp_path / "mine.json"))
    assert (device.name, device.memory_bytes_per_s) == ("mine", 1.5e12)
    assert device.architecture == "unknown"


def test_gpu_from_yaml_reads_exponents_without_sign(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nmemory_bytes: 96e9\nmemory_bytes_per_s: 1.5e12\nflops_per_s: {bf16: 400e12}\n"
        "interconnect_bytes_per_s: 64.0e+9\npcie_bytes_per_s: 64.0e+9\nnum_sms: 96\n"
    )
    device = gpu(str(path))
    assert device.peak_flops_per_s("bf16") == 400e12
    assert device.memory_bytes == 96 * 10**9
    assert isinstance(device.memory_bytes, int)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bytes": "absent"}, "key 'memory_bytes' is missing"),
        ({"memory_bytes": -1}, "memory_bytes must be positive"),
        ({"memory_bytes_per_s": "fast"}, "memory_bytes_per_s must be a number"),
        ({"num_sms": "absent"}, "key 'num_sms' is missing"),
        ({"memry_bytes": 1}, r"unknown key 'memry_bytes'; did you mean memory_bytes\?"),
        ({"num_sms": 2.5}, "num_sms must be a whole number, got 2.5"),
        ({"name": None}, "name must be a text, got None"),
        ({"architecture": 9}, "architecture must be a text, got 9"),
        ({"flops_per_s": 1e12}, "flops_per_s maps"),
        ({"flops_per_s": {}}, "flops_per_s maps number formats"),
        ({"flops_per_s": []}, "flops_per_s maps number formats"),
        ({"flops_per_s": {"bf17": 1e12}}, "dtype 'bf17' is unknown"),
        ({"pcie_bytes_per_s": float("inf")}, "pcie_bytes_per_s must be positive and finite"),
    ],
)
def test_gpu_file_with_a_fault_names_file_and_key(tmp_path, changes, message):
    with pytest.raises(SpecError, match=rf"mine.json: .*{message}"):
        gpu(write(tmp_path / "mine.json", **changes))


def test_gpu_file_that_is_missing_or_broken_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"no\.yaml: no such file"):
        gpu(str(tmp_path / "no.yaml"))
    (tmp_path / "bad.yaml").write_text("a: [\n")
    with pytest.raises(SpecError, match=r"bad\.yaml:2: not valid YAML"):
        gpu(str(tmp_path / "bad.yaml"))


def test_device_that_costs_nothing_is_refused_and_one_without_a_price_is_not():
    with pytest.raises(SpecError, match="usd_per_hour"):
        replace(gpu("h100-80gb"), usd_per_hour=0.0)
    assert replace(gpu("h100-80gb"), usd_per_hour=None).usd_per_hour is None


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "9"])
@pytest.mark.parametrize(
    "key",
    ["memory_bytes", "memory_bytes_per_s", "interconnect_bytes_per_s", "pcie_bytes_per_s",
     "num_sms", "usd_per_hour", "flops_per_s.bf16", "flops_per_s.fp8"],
)  # fmt: skip
def test_gpu_with_one_number_that_cannot_be_is_refused_by_its_name(key, value):
    whole, _, dtype = key.partition(".")
    wrong = {**gpu("h100-80gb").flops_per_s, dtype: value} if dtype else value
    with pytest.raises(SpecError, match=rf"hardware h100-80gb: {re.escape(key)} must be "):
        replace(gpu("h100-80gb"), **{whole: wrong})


def test_formats_left_to_a_deployment_are_those_of_its_arithmetic():
    # The weights' format is not the cache's: that keeps 16 bits at least, unless it is named.
    for dtype, stored, cached, expected in (
        ("bf16", "auto", "auto", ("bf16", "bf16")),
        ("fp16", "auto", "auto", ("fp16", "fp16")),
        ("fp32", "auto", "auto", ("fp32", "fp32")),
        ("fp8", "auto", "auto", ("fp8", "bf16")),
        ("fp32", "fp16", "auto", ("fp16", "fp32")),
        ("fp32", "int8", "auto", ("int8", "fp32")),
        ("fp16", "int4", "auto", ("int4", "fp16")),
        ("fp16", "int4", "fp8", ("int4", "fp8")),
    ):
        where = Deployment(
            model("llama-3-8b"), gpu("h100"), dtype=dtype, weight_dtype=stored,
            kv_cache_dtype=cached,
        )  # fmt: skip
        assert (where.stored_dtype, where.kv_dtype) == expected, (dtype, stored, cached)
