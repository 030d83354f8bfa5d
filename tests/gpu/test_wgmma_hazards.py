"""The register checker on machine code small enough to read."""

import pytest

from schedlab.gpu_backend.wgmma_hazards import hazards, parse, plant

LOOP = """
        /*0100*/                   WARPGROUP.ARRIVE ;                                /* 0x0 */
        /*0110*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT, gsb0 ; /* */
        /*0120*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;                   /* 0x0 */
        /*0130*/                   FMUL R152, R24, UR4 ;                             /* 0x0 */
        /*0140*/                   HGMMA.64x128x16.F32.BF16 R88, R152, gdesc[UR4].tnspB, R88 ; /* */
        /*0150*/                   HGMMA.64x128x16.F32.BF16 R88, R156, gdesc[UR4], R88, gsb0 ; /* */
        /*0160*/                   IADD3 R5, R5, 0x1, RZ ;                           /* 0x0 */
        /*0170*/              @!P0 BRA 0x100 ;                                       /* 0x0 */
        /*0180*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;                   /* 0x0 */
        /*0190*/                   STG.E.128 desc[UR4][R2.64], R88 ;                 /* 0x0 */
        /*01a0*/                   EXIT ;                                            /* 0x0 */
"""


def changed(old, new):
    assert LOOP.count(old) == 1
    return hazards(parse(LOOP.replace(old, new)))


def test_code_that_waits_before_it_touches_has_no_hazards():
    assert len(parse(LOOP)) == 11
    assert hazards(parse(LOOP)) == []


def test_planted_hazard_is_found():
    (found,) = hazards(plant(parse(LOOP)))
    assert found == "0x160 MOV R156, RZ: overwrites the operand of 0x150"


@pytest.mark.parametrize(
    ("instruction", "said"),
    [
        ("MOV R155, RZ", "overwrites the operand of 0x140"),
        ("LDS.128 R153, [R5]", "overwrites the operand of 0x140"),
        ("IMAD.WIDE R158, R5, R6, R8", "overwrites the operand of 0x150"),
        ("CS2R R86, SRZ", None),
        ("CS2R R87, SRZ", "overwrites the accumulators of 0x140"),
        ("FADD R5, R151, RZ", "reads the accumulators of 0x140"),
        ("@P1 MOV R154, RZ", "overwrites the operand of 0x140"),
        ("ISETP.GE.AND P0, PT, R5, R6, PT", None),
        ("STS [R5], R152", None),  # reading the operand is allowed
    ],
)
def test_instruction_behind_the_products_is_judged_by_what_it_touches(instruction, said):
    found = changed("IADD3 R5, R5, 0x1, RZ", instruction)
    if said is None:
        assert found == []
    else:
        assert any(said in line for line in found)


@pytest.mark.parametrize(
    ("instruction", "width"),
    [
        ("MOV {}, RZ", 1), ("LDS {}, [R5]", 1), ("FADD {}, R5, RZ", 1),
        ("LDS.64 {}, [R5]", 2), ("LDG.E.64 {}, [R2.64]", 2), ("IMAD.WIDE {}, R5, R6, R8", 2),
        ("CS2R {}, SRZ", 2), ("LDSM.16.M88.2 {}, [R5]", 2), ("MOV {}.64, R2", 2),
        ("LDS.128 {}, [R5]", 4), ("LDG.E.128 {}, [R2.64]", 4), ("LDSM.16.M88.4 {}, [R5]", 4),
        ("HMMA.16816.F32 {}, R4, R6, R8", 4),
    ],
)  # fmt: skip
def test_instruction_writes_as_many_registers_as_it_is_wide(instruction, width):
    # The accumulators begin at R88: what ends just below touches nothing.
    for first, told in ((88 - width, False), (89 - width, True)):
        found = changed("IADD3 R5, R5, 0x1, RZ", instruction.format(f"R{first}"))
        assert any("overwrites the accumulators" in line for line in found) is told


@pytest.mark.parametrize("columns", [8, 64, 128])
def test_product_may_write_to_no_register_of_an_operand_under_way_with_any_of_its_own(columns):
    # Operands under way are R152 to R155 of 0x140, and R156 to R159 of 0x150.
    width = columns // 2
    product = "HGMMA.64x{}x16.F32.BF16 R{}, gdesc[UR8], RZ, !UPT, gsb0"
    for first in (152 - width, 153 - width, 152, 155, 156, 157 - width, 159, 160):
        found = changed("IADD3 R5, R5, 0x1, RZ", product.format(columns, first))
        written = range(first, first + width)
        spoiled = [
            at for at, operand in (("0x140", 152), ("0x150", 156))
            if any(register in written for register in range(operand, operand + 4))
        ]  # fmt: skip
        said = [line for line in found if line.startswith("0x160")]
        assert [line.rpartition(" ")[2] for line in said] == spoiled, first
        assert all("overwrites the operand" in line for line in said)


def test_hazard_in_the_next_iteration_is_followed_through_the_branch():
    found = changed("WARPGROUP.ARRIVE", "MOV R157, RZ")
    assert found == ["0x100 MOV R157, RZ: overwrites the operand of 0x150"]


def waiting_for_fewer_at(address):
    """Let the wait at an address leave one group of products open."""
    lines = LOOP.splitlines()
    (i,) = (i for i, line in enumerate(lines) if f"/*{address}*/" in line)
    assert "gsb0, 0x0" in lines[i]
    lines[i] = lines[i].replace("gsb0, 0x0", "gsb0, 0x1")
    return hazards(parse("\n".join(lines)))


def test_wait_that_leaves_the_group_open_is_no_wait():
    # One group may stay open: it is the product's own, behind the loop.
    found = waiting_for_fewer_at("0180")
    assert any("0x190" in line and "reads the accumulators" in line for line in found)


def test_wait_that_leaves_only_a_newer_group_open_is_enough():
    # Within the loop the products of R24 are the newer group.
    (found,) = waiting_for_fewer_at("0120")
    assert found == "0x130 FMUL R152, R24, UR4: reads the accumulators of 0x110"


def test_code_without_products_cannot_be_planted_in():
    with pytest.raises(ValueError, match="no product takes an operand from registers"):
        plant(parse(LOOP[: LOOP.index("/*0140*/")]))
