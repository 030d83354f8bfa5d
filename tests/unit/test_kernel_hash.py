import json
from pathlib import Path

import pytest

from schedlab.gpu_backend import kernel_hash as module
from schedlab.gpu_backend.kernel_hash import kernel_hash

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '"""Kernels."""\n\nimport math\n\n\ndef twice(x):\n    """Double."""\n    return 2 * x\n'


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A folder of kernels of its own; returns what writes one of them and hashes all."""
    (tmp_path / "model.py").write_text("")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "kernel_hash.py"))

    def hash_of(source):
        (tmp_path / "cpu_ops.py").write_text(source)
        return kernel_hash("cpu")

    return hash_of


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Kernels."""', '"""Kernels of a\nCPU."""'),
        ("    return", "    # as ever\n\n    return"),
        ("import math", "from math import (\n    pi,\n)"),
        ('    """Double."""\n', ""),
    ],
)
def test_kernel_hash_of_other_words_about_the_same_code_stays(kernels, old, new):
    assert kernels(SOURCE.replace(old, new)) == kernels(SOURCE)


def test_kernel_hash_of_other_code_changes(kernels):
    assert kernels(SOURCE.replace("2 * x", "3 * x")) != kernels(SOURCE)


def test_kernel_hash_of_a_gpu_is_of_every_kernel_its_launchers_and_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "__file__", str(tmp_path / "kernel_hash.py"))
    (tmp_path / "kernels").mkdir()
    names = ("kernels/decode.py", "kernels/norm.py", "triton_ops.py", "model.py", "cpu_ops.py")
    for name in names:
        (tmp_path / name).write_text(SOURCE)
    of_gpu, of_cpu = kernel_hash("cuda:0"), kernel_hash("cpu")
    changed = {}
    for name in names:
        (tmp_path / name).write_text(SOURCE.replace("2 * x", "3 * x"))
        changed[name] = (kernel_hash("cuda:0") != of_gpu, kernel_hash("cpu") != of_cpu)
        (tmp_path / name).write_text(SOURCE)
    assert changed == {
        **dict.fromkeys(names[:3], (True, False)), "model.py": (True, True),
        "cpu_ops.py": (False, True),
    }  # fmt: skip


def test_kernel_hash_of_committed_profile_is_of_the_present_kernels():
    # If this fails, the kernels have changed: measure the profile anew (docs/real-backend.md).
    meta = json.loads((ROOT / "profiles/cpu/schedlab-small/fp32-tp1/meta.json").read_text())
    assert meta["kernels"] == kernel_hash("cpu")
