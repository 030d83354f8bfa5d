"""Registers that an asynchronous matrix instruction still uses, and that something else touches.

On Hopper a warp group's products (HGMMA) run behind the instructions that follow, until a wait.
Meanwhile their accumulators must be left alone, and so must the registers that hold their first
operand, where it does not come from shared memory. The assembler has got this wrong before, and
nothing but a wrong number now and then would tell; so the machine code is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_HGMMA = re.compile(r"HGMMA\.64x(\d+)x16\.F32\S* R(\d+), (?:R(\d+)|gdesc)")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
_REGISTER = re.compile(r"\bR(\d+)\b")
_ONLY_PREDICATES = ("ISETP", "FSETP", "HSETP2", "DSETP", "PSETP", "PLOP3")
_A_REGISTERS = 4
"""Of a thread: 64 x 16 numbers of 16 bits over 128 threads."""


class Instruction(NamedTuple):
    """A line of machine code."""

    address: int
    condition: str
    """Predicate, e.g. ``@!P0``; empty if it always runs."""
    text: str
    """Without the predicate."""

    @property
    def name(self) -> str:
        """Operation and modifiers."""
        return self.text.split(" ", 1)[0]

    @property
    def operands(self) -> list[str]:
        """Operands as written."""
        _, _, rest = self.text.partition(" ")
        return rest.split(", ")

    @property
    def commits(self) -> bool:
        """Whether it ends a group of products that can be waited for."""
        return self.name.startswith("HGMMA") and self.operands[-1] == "gsb0"


def parse(sass: str) -> list[Instruction]:
    """Return the instructions of one kernel, as ``cuobjdump --dump-sass`` lists them."""
    found = []
    for line in sass.splitlines():
        if match := _LINE.match(line):
            first, _, rest = match[2].partition(" ")
            condition, text = (first, rest.strip()) if first.startswith("@") else ("", match[2])
            found.append(Instruction(int(match[1], 16), condition, text))
    return found


def hazards(code: list[Instruction]) -> list[str]:
    """Return what touches registers of a product under way; empty if nothing does.

    Every path from every HGMMA is followed, branches both ways, to the wait that it must have
    finished at: the wait that leaves at most as many groups open as were committed after its own.
    """
    index = {instruction.address: i for i, instruction in enumerate(code)}
    found: dict[str, None] = {}
    for start, product in enumerate(code):
        if match := _HGMMA.match(product.text):
            width, first = int(match[1]) // 2, int(match[2])
            accumulators = set(range(first, first + width))
            operand = set()
            if match[3] is not None:
                operand = set(range(int(match[3]), int(match[3]) + _A_REGISTERS))
            for other in _before_wait(code, index, start):
                what = _conflict(other, accumulators, operand)
                if what:
                    found[f"{other.address:#x} {other.text}: {what} of {product.address:#x}"] = None
    return list(found)


def plant(code: list[Instruction]) -> list[Instruction]:
    """Return the code with a hazard in it, to see whether `hazards` finds one.

    The instruction behind the last product that takes an operand from registers becomes one that
    overwrites it.

    Raises
    ------
    ValueError
        If there is no such product.
    """
    for i in range(len(code) - 1, -1, -1):
        match = _HGMMA.match(code[i].text)
        if match and match[3] is not None and i + 1 < len(code):
            spoiled = code[i + 1]._replace(condition="", text=f"MOV R{match[3]}, RZ")
            return [*code[: i + 1], spoiled, *code[i + 2 :]]
    raise ValueError("no product takes an operand from registers")


def _before_wait(
    code: list[Instruction], index: dict[int, int], start: int
) -> Iterator[Instruction]:
    """Yield what may run after a product and before it is known to be done."""
    # Groups committed since the product's own; -1 while its own is open.
    todo = [(i, 0 if code[start].commits else -1) for i in _next(code, index, start)]
    seen = set(todo)
    while todo:
        i, newer = todo.pop()
        wait = _WAIT.match(code[i].text)
        if wait and newer >= int(wait[1], 16):
            continue
        yield code[i]
        # More than one newer group makes no difference: waits leave none or one open.
        newer = min(newer + code[i].commits, 1)
        for then in _next(code, index, i):
            if (then, newer) not in seen:
                seen.add((then, newer))
                todo.append((then, newer))


def _next(code: list[Instruction], index: dict[int, int], i: int) -> list[int]:
    """Return the instructions that may follow instruction i."""
    name = code[i].name.partition(".")[0]
    following = [i + 1] if i + 1 < len(code) else []
    if name not in ("BRA", "EXIT"):
        return following
    found = following if code[i].condition else []
    targets = re.findall(r"0x[0-9a-f]+", code[i].text) if name == "BRA" else []
    return found + [index[int(t, 16)] for t in targets[-1:] if int(t, 16) in index]


def _conflict(other: Instruction, accumulators: set[int], operand: set[int]) -> str | None:
    if other.name.startswith("HGMMA"):
        # Products run in order; one may add to what the one before it adds to.
        match = _HGMMA.match(other.text)
        written = set() if match is None else _range(int(match[2]), int(match[1]) // 2)
        return "overwrites the operand" if written & operand else None
    written = _written(other)
    if written & operand:
        return "overwrites the operand"
    if written & accumulators:
        return "overwrites the accumulators"
    read = {int(n) for text in other.operands for n in _REGISTER.findall(text)}
    return "reads the accumulators" if read & accumulators else None


def _written(instruction: Instruction) -> set[int]:
    """Return the registers that an instruction writes."""
    name = instruction.name
    if name.startswith(_ONLY_PREDICATES):
        return set()
    operands = [o for o in instruction.operands if not re.fullmatch(r"!?U?P(\d|T)", o)]
    match = re.fullmatch(r"R(\d+)(\.64)?", operands[0]) if operands else None
    if match is None:  # a store, a branch, a uniform register
        return set()
    width = 1
    if ".128" in name or (name.startswith("LDSM") and name.endswith(".4")):
        width = 4
    elif ".64" in name or ".WIDE" in name or match[2] or name in ("CS2R", "LDSM.16.M88.2"):
        width = 2
    elif name.startswith("HMMA"):
        width = 4
    return _range(int(match[1]), width)


def _range(first: int, count: int) -> set[int]:
    return set(range(first, first + count))
