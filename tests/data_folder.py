"""Where the tests find real traces and measurements, or a reason to skip."""

import os
from pathlib import Path

import pytest


def data_folder() -> Path:
    """Return the folder of real traces, or skip the test if there is none."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("SCHEDLAB_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder} (set SCHEDLAB_DATA)")
    return folder
