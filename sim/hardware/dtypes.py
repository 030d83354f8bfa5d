"""Number formats: their names, and how many bytes an element takes."""

from schedlab.sim.errors import SpecError, nearest

_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5, "int4": 0.5}
_SCALE_BYTES = {"int4": 2 / 128, "fp4": 1 / 16}
_ALIASES = {
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "auto": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "nvfp4": "fp4",
}


def dtype_name(name: str) -> str:
    """Return the short name of a number format, e.g. ``"bf16"`` for ``"bfloat16"``.

    Raises
    ------
    SpecError
        If the name is unknown.

    Examples
    --------
    >>> dtype_name("bfloat16")
    'bf16'
    """
    key = _ALIASES.get(name.lower(), name.lower())
    if key not in _BYTES:
        raise SpecError(f"dtype {name!r} is unknown; {nearest(key, [*_BYTES, *_ALIASES])}")
    return key


def dtype_bytes(name: str) -> float:
    """Return the bytes of one element (half a byte for the 4-bit formats).

    Examples
    --------
    >>> dtype_bytes("bf16"), dtype_bytes("fp4")
    (2.0, 0.5)
    """
    return _BYTES[dtype_name(name)]


def stored_bytes(name: str) -> float:
    """Return the bytes of one weight with its share of a scale.

    Notes
    -----
    Formats of 4 bits have a scale: int4 one of 16 bits for every 128 weights, fp4 one of 8 for
    every 16; those of 8 bits have one for a whole row, which is left out.

    Examples
    --------
    >>> stored_bytes("int4"), stored_bytes("fp8")
    (0.515625, 1.0)
    """
    key = dtype_name(name)
    return _BYTES[key] + _SCALE_BYTES.get(key, 0.0)
