"""Kernels that are compiled are called without the JIT, which the process of these tests lacks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
# Imported before conftest.py would have it interpret.
CHILD = "import sys, triton, pytest; sys.exit(pytest.main(sys.argv[1:]))"


@pytest.mark.slow
def test_compiled_kernels_are_called_as_the_jit_calls_them():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, "tests/gpu/jit_cases.py", "-p", "no:cacheprovider"],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
