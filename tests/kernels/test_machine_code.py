"""Products in flight in machine code: whoever touches their registers too early is found."""

from __future__ import annotations

import pytest

from tests.kernels import machine_code

LOOP = """
        /*0010*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 ;
        /*0020*/                   CS2R R24, SRZ ;
.L_x_1:
        /*0030*/                   WARPGROUP.ARRIVE ;
        /*0040*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0050*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0060*/                   HGMMA.64x16x16.F32.BF16 R88, R40, gdesc[UR4].tnspB, R88, gsb0 ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0080*/                   FADD R200, R24, R31 ;
        /*0090*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00a0*/                   MOV R40, R88 ;
        /*00b0*/               @P0 BRA `(.L_x_1) ;
        /*00c0*/                   STG.E.128 desc[UR4][R2.64+0x10], R24 ;
        /*00d0*/                   EXIT ;
"""


def test_a_right_loop_has_no_fault():
    assert machine_code.faults(LOOP, 168) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("gsb0, 0x1 ;", "gsb0, 0x2 ;"), "FADD R200, R24, R31: a register of a product in flight"),
        (("FADD R200, R24, R31", "FADD R200, R1, R95"), "FADD R200, R1, R95: a register of a p"),
        (("FADD R200, R24, R31", "IMAD.WIDE R38, R1, R4, R6"), None),
        (("FADD R200, R24, R31", "IMAD.WIDE R39, R1, R4, R6"), "IMAD.WIDE R39, R1, R4, R6: a re"),
        (("FADD R200, R24, R31", "STS.64 [R41+0x8], R2"), "STS.64 [R41+0x8], R2: a register of"),
        (("FADD R200, R24, R31", "LDS.128 R37, [R2]"), "LDS.128 R37, [R2]: a register of a pro"),
        (("gsb0, 0x0 ;", "gsb0, 0x1 ;"), "MOV R40, R88: a register of a product in flight"),
        (("R88, R40, gdesc", "R88, R28, gdesc"), "R88, gsb0: the left side is a sum in flight"),
        (("0xf0", "0xc8"), "FADD R200, R24, R31: a register beyond the 200 of its warp"),
        (("@P0 BRA", "BRA"), None),
    ],
    ids=str,
)
def test_each_fault_is_found_on_the_path_that_has_it(change, words):
    assert change[0] in LOOP
    found = machine_code.faults(LOOP.replace(*change), 168)
    assert found == [] if words is None else any(words in line for line in found), found


def test_products_that_nobody_waits_for_are_found():
    code = LOOP.replace("WARPGROUP.DEPBAR.LE gsb0, 0x1", "NOP")
    code = code.replace("WARPGROUP.DEPBAR.LE gsb0, 0x0", "NOP").replace(
        "FADD R200, R24, R31", "NOP"
    )
    code = code.replace("MOV R40, R88", "NOP")
    assert any("products that nobody waits for" in line for line in machine_code.faults(code, 168))
