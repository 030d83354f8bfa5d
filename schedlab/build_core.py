"""Compile the core with mypyc: ``python -m schedlab.build_core``, or ``make core``.

It needs a C compiler, and ``mypy[mypyc]``. What it makes lies in `schedlab/compiled`, for the
Python that ran it, and replaces what was there. See `schedlab.core` for who uses it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from schedlab import core


def build() -> Path:
    """Compile all modules of the core; return the folder that holds them.

    Raises
    ------
    SystemExit
        If mypyc is missing, or it or the C compiler fails; what they say is printed.
    """
    try:
        from mypyc.build import mypycify
        from setuptools import Distribution
    except ImportError as error:
        sys.exit(f"the core cannot be compiled without {error.name}: pip install 'mypy[mypyc]'")
    root = Path(core.__file__).parents[1]
    before = Path.cwd()
    # Not below the folder it becomes: an interrupted build leaves the old one as it was.
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(root)  # mypyc names modules by their paths from here
        try:
            paths = [
                str(Path("schedlab", *name.split(".")).with_suffix(".py")) for name in core.MODULES
            ]
            options: dict[str, Any] = {"group_name": core.GROUP.removesuffix("__mypyc")}
            extensions = mypycify(
                paths, target_dir=f"{scratch}/c", opt_level="2", multi_file=True, **options
            )
            for extension in extensions:
                # A product and a sum fused in one instruction are rounded once, Python's twice.
                extension.extra_compile_args += ["-ffp-contract=off"]
                if sys.platform == "linux":  # else each call goes by a table, for who replaces it
                    extension.extra_compile_args += ["-fno-semantic-interposition"]
                    extension.extra_link_args += ["-Wl,-Bsymbolic-functions"]
            distribution = Distribution({"name": "schedlab", "ext_modules": extensions})
            command = distribution.get_command_obj("build_ext")
            command.build_lib, command.build_temp = f"{scratch}/lib", f"{scratch}/objects"
            command.parallel = os.cpu_count()
            command.ensure_finalized()
            command.run()
        finally:
            os.chdir(before)
        _install(Path(scratch, "lib"), Path(scratch, "compiled"))
    return core.FOLDER


def _install(built: Path, folder: Path) -> None:
    folder.mkdir()
    for name in (core.GROUP, *(f"schedlab.{module}" for module in core.MODULES)):
        target = core.library(name).name
        suffix = target.removeprefix(name)
        (path,) = built.glob(name.replace(".", "/") + suffix)
        shutil.copy(path, folder / target)
    lines = [f"mypyc {metadata.version('mypy')}"]
    lines += [f"{core.checksum(module)} {module}" for module in core.MODULES]
    (folder / core.MANIFEST).write_text("\n".join(lines) + "\n", encoding="utf-8")
    new = core.FOLDER.with_name(f"{core.FOLDER.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(folder, new)
    shutil.rmtree(core.FOLDER, ignore_errors=True)
    new.rename(core.FOLDER)


if __name__ == "__main__":
    # The modules that are compiled must not be loaded from where they will be written.
    print(f"compiled core: {build()}")
