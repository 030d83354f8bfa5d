"""With the compiled core a wheel is for one platform; all else is in pyproject.toml."""

from pathlib import Path

from setuptools import Distribution, setup


class _Distribution(Distribution):
    def has_ext_modules(self) -> bool:
        """Whether `python -m schedlab.build_core` has run."""
        return Path(__file__).with_name("schedlab").joinpath("compiled").exists()


setup(distclass=_Distribution)
