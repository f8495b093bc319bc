"""Gluon's kernels for Hopper on the CPU: the kernels' own source, run against a strict machine.

Triton's interpreter does not know Gluon, and what goes wrong in such a kernel is seldom arithmetic:
a wait too few, a slot handed back too early. So the machine here keeps the account of who may touch
which bytes of shared memory when, and lets the kernel's warps run in an order drawn from a seed.

    values          arrays and pointers in registers; registers: what is computed of them
    shared_memory   where an element lies (layouts, swizzles); who wrote and read it, and who knows
    global_memory   the same for tensors, over all programs of a launch
    machine         partitions and their turns, barriers, copies and products in flight
    copies, products, assembly      tma, warpgroup_mma, and what pieces of assembler mean
    language        gl, mbarrier ... as kernels call them
    launcher        a kernel's functions with their globals replaced; its grid

What is *not* modelled: time, registers, how layouts spread a tensor over threads (compiled ahead,
see tests/kernels/compile_ahead.py), clusters.
"""

from tests.kernels.gluon_interpreter.launcher import Interpreter
from tests.kernels.gluon_interpreter.values import GluonFaultError

__all__ = ["GluonFaultError", "Interpreter"]
