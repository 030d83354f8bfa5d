"""LLMServingSim's list of layers: which kernels a step calls, and how often."""

from __future__ import annotations

from pathlib import Path

from schedlab.sim.cost.importers.yaml_section import YamlSection, read_section
from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.hardware.model_shape import ModelShape

_PARTS = ("prologue", "pre_attn", "post_attn", "mlp_dense", "mlp_moe", "head")


def layer_calls(path: Path, shape: ModelShape) -> dict[str, float]:
    """Return how often each layer of a list runs in a step.

    Parameters
    ----------
    path : Path
        The architecture file. Its older form has all parts under ``sequence``, its newer one
        under ``blocks`` and ``shared``.
    shape : ModelShape
        How many layers of which kind the model has.

    Raises
    ------
    SpecError
        If the file is malformed, or a part of the model is missing.
    """
    sequence = _sequence(read_section(path))
    calls: dict[str, float] = {}
    for part, times in (
        ("prologue", 1), ("pre_attn", shape.num_layers), ("post_attn", shape.num_layers),
        ("mlp_moe", shape.num_moe_layers),
        ("mlp_dense", shape.num_layers - shape.num_moe_layers), ("head", 1),
    ):  # fmt: skip
        if times and not sequence.get(part):
            raise SpecError(f"{path}: the layer list has no {part}, which {shape.name} needs")
        for name in sequence[part] if times else ():
            calls[name] = calls.get(name, 0) + times
    if "attention" not in calls:
        raise SpecError(f"{path}: the layer list has no attention")
    return calls


def _sequence(data: YamlSection) -> dict[str, list[str]]:
    """Return the layers of one step, by part."""
    if "sequence" in data.data:
        return _parts(data.section("sequence"))
    if "blocks" not in data.data:
        raise SpecError(f"{data.file}: key 'sequence' is missing")
    # The newer form: several kinds of attention blocks are possible, one is supported.
    blocks = data.section("blocks")
    attention, mlp = blocks.section("attn"), blocks.section("mlp")
    kinds = list(attention.data)
    if len(kinds) != 1:
        raise SpecError(
            f"{data.file}: {len(kinds)} kinds of attention ({', '.join(kinds)}); one is supported"
        )
    return {
        **_parts(attention.section(kinds[0])), **_parts(data.section("shared")),
        "mlp_dense": mlp.names("dense"), "mlp_moe": mlp.names("moe"),
    }  # fmt: skip


def _parts(section: YamlSection) -> dict[str, list[str]]:
    for part in section.data:
        if part not in _PARTS:
            raise SpecError(f"{section.file}: unknown part {part!r}; {nearest(part, _PARTS)}")
    return {part: section.names(part) for part in section.data}
