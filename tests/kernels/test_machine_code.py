"""Products in flight in machine code: whoever touches their registers too early is found."""

from __future__ import annotations

import pytest

from tests.kernels import machine_code
from tests.kernels.compile_ahead import loose_barriers

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


RING = """
        /*0010*/                   LDS.64 R4, [R81+0x12800] ;
.L_x_1:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P4, [UR41+0x12890], R16 ;
        /*0030*/               @P4 BRA `(.L_x_1) ;
        /*0040*/                   LDS.128 R60, [R85+UR33] ;
        /*0050*/                   LDS R20, [R85+UR33+0x400] ;
        /*0060*/                   FADD R21, R20, R20 ;
        /*0070*/                   HGMMA.64x8x16.F32 R24, R60, gdesc[UR28], R24, gsb0 ;
        /*0080*/                   BAR.SYNC.DEFER_BLOCKING 0x0, 0x80 ;
        /*0090*/              @!P3 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR41+0x128d0], RZ ;
        /*00a0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00b0*/               @P0 BRA `(.L_x_1) ;
        /*00c0*/                   EXIT ;
"""
EARLY = "memory is handed back from which a load is on its way"


def test_memory_is_handed_back_when_what_is_fetched_from_it_is_there():
    """What was asked for before the wait, the scratch's, does not count."""
    assert machine_code.faults(RING, 168) == []


def test_instructions_that_hand_memory_back_are_known():
    assert machine_code.hand_backs(RING) == 1
    assert machine_code.hand_backs(RING.replace("SYNCS.ARRIVE.TRANS64.A1T0", "SYNCS.A1T0")) == 0


@pytest.mark.parametrize(
    ("change", "is_early"),
    [
        (("FADD R21, R20, R20", "FADD R21, R22, R22"), True),
        (("R24, R60, gdesc", "R24, R64, gdesc"), True),
        (("FADD R21, R20, R20", "MEMBAR.ALL.CTA"), False),
        (("BAR.SYNC.DEFER_BLOCKING 0x0, 0x80", "NOP"), False),
        (("0x80 ;", "0x80 ;\n        /*0088*/  LDS R30, [R85] ;"), True),
        (("SYNCS.ARRIVE.TRANS64.A1T0 RZ", "SYNCS.ARRIVE.TRANS64 RZ"), False),
    ],
    ids=["nobody waits", "no product waits", "fence", "one warp", "after the meeting", "expects"],
)
def test_loads_that_a_copy_may_overtake_are_found(change, is_early):
    assert change[0] in RING
    found = machine_code.faults(RING.replace(*change), 168)
    assert [line.split(": ")[1] for line in found] == [EARLY] * is_early


def test_a_load_that_is_waited_for_after_the_warps_have_met_is_found():
    line = "        /*0060*/                   FADD R21, R20, R20 ;\n"
    met = "BAR.SYNC.DEFER_BLOCKING 0x0, 0x80 ;\n"
    found = machine_code.faults(RING.replace(line, "").replace(met, met + line), 168)
    assert [fault.split(": ")[1] for fault in found] == [EARLY]


ALLOCATED = """
    %q_smem = ttg.local_alloc : () -> !ttg.memdesc<2x64x128xbf16, #shared, #smem, mutable>
    %full = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared2, #smem, mutable>
    %turns = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared2, #smem, mutable>
    ttg.warp_specialize(%q_smem, %full, %turns) attributes {requestedRegisters = array<i32: 24>}
"""


def test_barriers_that_no_partition_has_are_found():
    assert loose_barriers(ALLOCATED) == []
    assert loose_barriers(ALLOCATED.replace(", %turns)", ")")) == ["%turns"]


def test_code_in_which_barriers_are_written_otherwise_is_not_taken_for_sound():
    with pytest.raises(ValueError, match="no barrier is found"):
        loose_barriers(ALLOCATED.replace("xi64", "xi64b"))


def test_products_that_nobody_waits_for_are_found():
    code = LOOP.replace("WARPGROUP.DEPBAR.LE gsb0, 0x1", "NOP")
    code = code.replace("WARPGROUP.DEPBAR.LE gsb0, 0x0", "NOP").replace(
        "FADD R200, R24, R31", "NOP"
    )
    code = code.replace("MOV R40, R88", "NOP")
    assert any("products that nobody waits for" in line for line in machine_code.faults(code, 168))
