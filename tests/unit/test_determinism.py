"""The same experiment elsewhere: other hash seed, time zone, locale, cores, threads and folder."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests import determinism

SPEC = """\
name: elsewhere
seed: 3
model: llama-3-8b
hardware: a100-80gb
cost_model: roofline
engine: {max_num_seqs: 8, max_model_len: 2048, enable_prefix_caching: true}
workload: {num_requests: 80, request_rate: 4, prompt_tokens: 64, output_tokens: 40}
policy: {name: srtf, predictor: {name: noisy, sigma: 0.4}}
"""
HERE = {"PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C", "OMP_NUM_THREADS": "1"}
ELSEWHERE = {
    "PYTHONHASHSEED": "4711", "TZ": "Asia/Kathmandu", "LC_ALL": "tr_TR.UTF-8", "COLUMNS": "31",
    "OMP_NUM_THREADS": "4",
}  # fmt: skip
_RUN = """\
import os, sys
if {alone} and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
sys.argv = ["schedlab", "run", "s.yaml", "-q", "-o", "out"]
from schedlab.experiments.commands.cli import main
main()
"""


def results(folder, environment, alone):
    folder.mkdir(parents=True)
    (folder / "s.yaml").write_text(SPEC)
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "PYTHONPATH", "SCHEDLAB_CORE")}
    kept["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    subprocess.run(
        [sys.executable, "-c", _RUN.format(alone=alone)],
        cwd=folder,
        env={**kept, **environment, "SOURCE_DATE_EPOCH": "0", "HOME": str(folder)},
        check=True,
    )
    paths = sorted(path for path in (folder / "out").rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): timeless(path) for path in paths}


def timeless(path):
    if path.name != "point.json":
        return path.read_bytes()
    return json.dumps(json.loads(path.read_text()) | {"seconds": 0}).encode()


@pytest.mark.slow
def test_results_are_the_same_bytes_elsewhere_and_name_no_folder_of_the_user(tmp_path):
    here = results(tmp_path / "here", HERE, alone=False)
    elsewhere = results(tmp_path / "under" / "way", ELSEWHERE, alone=True)
    assert here.keys() == elsewhere.keys()
    assert [name for name in here if here[name] != elsewhere[name]] == []
    named = [n for n, content in here.items() if str(tmp_path).encode() in content]
    assert named == []
    home = str(Path.home()).encode()
    assert len(home) < 4 or [n for n, content in here.items() if home + b"/" in content] == []


@pytest.mark.slow
def test_kept_digests_are_those_of_this_source():
    known = set() if platform.machine() in ("x86_64", "AMD64") else {"predicted: decided"}
    assert set(determinism.differences(dict(determinism.digests()), determinism.KEPT)) <= known
