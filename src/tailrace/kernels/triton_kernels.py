"""Every operation by Triton, the linear layers by cuBLAS: the GPU behind the `Kernels` protocol.

Activations are bfloat16 or float16; the residual, norms' weights and rotary tables are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar
from weakref import ref

import torch
import triton

from tailrace.errors import ConfigError, EngineError
from tailrace.kernels.attention_shapes import (
    BOUNDS,
    FLOAT8_CAPABILITY,
    INTERPRETER,
    Capability,
    decode_candidates,
    decode_shape,
    prefill_shape,
)
from tailrace.kernels.kv_scales import UNSCALED, KVScales
from tailrace.kernels.linear.cublas import CublasLinear
from tailrace.kernels.linear.device_linear import RoundsRows
from tailrace.kernels.linear.float8 import FLOAT8, Float8Weight
from tailrace.kernels.linear.float8_linear import Float8Linear, takes
from tailrace.kernels.linear.int4 import GroupInt4
from tailrace.kernels.linear.int4_linear import Int4Linear, has_hopper_kernel
from tailrace.kernels.linear.int8_linear import Int8Linear
from tailrace.kernels.linear.packed_int4 import LEAST_GROUP
from tailrace.kernels.linear.phased_linear import PhasedLinear
from tailrace.kernels.linear.triton_skinny import SkinnyLinear, SkinnyScratch
from tailrace.kernels.linear.weight import plain
from tailrace.kernels.linear.workspace import Workspace
from tailrace.kernels.paged_attention import decode_kernels
from tailrace.kernels.paged_attention.decode_kernels import TIMED_GROUP, decode
from tailrace.kernels.paged_attention.device_batch import DeviceBatch, plan
from tailrace.kernels.paged_attention.prefill_kernels import (
    FASTER_HEAD_DIMS,
    hopper_shapes,
    is_hopper,
    prefill,
    why_not_hopper,
)
from tailrace.kernels.paged_attention.triton_decode import DecodeScratch
from tailrace.kernels.paged_attention.triton_widened_kv import (
    UNIT_TOKENS,
    WidenedKv,
    scratch_units,
    units_of,
)
from tailrace.kernels.rms_norm.triton import add_rms_norm
from tailrace.kernels.rope_cache.triton import rope_and_cache
from tailrace.kernels.silu_mul.triton import silu_mul

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from tailrace.kernels.attention_batch import AttentionBatch
    from tailrace.kernels.kernels import Linear, WeightDtype
    from tailrace.kernels.linear.device_linear import DeviceLinear
    from tailrace.kernels.linear.prefill_format import PrefillFormat
    from tailrace.kernels.linear.ways import PlannedLinear, Ways
    from tailrace.kernels.linear.weight import Weight
    from tailrace.kernels.paged_attention.decode_kernels import AnyDecodeShape
    from tailrace.kernels.paged_attention.prefill_kernels import PrefillShape
    from tailrace.kernels.rotary import Rotary

    L = TypeVar("L", bound=PlannedLinear)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def capability_of(device: torch.device) -> Capability:
    """Return the compute capability that shapes are chosen for."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    return INTERPRETER


class TritonKernels:
    """The Triton operations behind the `Kernels` protocol, whose docstrings apply.

    Args:
        device: A CUDA device, or the CPU under Triton's interpreter.
        dtype: Of activations: bfloat16, float16 (or float32, for tests).
        rounds_all: Whether layers over FP8 weights round few rows to FP8 as well.
        hopper_decodes: Whether decodes' attention, and few rows in half precision, may go by the
            kernels of Hopper's own.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: WeightDtype,
        *,
        rounds_all: bool = False,
        hopper_decodes: bool = False,
    ) -> None:
        self.device = device
        self.capability = capability_of(device)
        self.dtype = DTYPES[dtype]
        self.name = f"triton ({dtype})"
        self._rounds_all = rounds_all
        self._hopper_decodes = hopper_decodes
        self._scratch: DecodeScratch | None = None
        is_gpu = device.type == "cuda"
        self._workspace = Workspace(device, self.dtype)
        self._copies_workspace = Workspace(device, self.dtype)
        """Of prompts' copies, which may be multiplied beside the weights (engine/phase_overlap)."""
        self._skinny = SkinnyScratch.allocate(device) if is_gpu else None
        has_kernel = is_gpu and has_hopper_kernel(self.capability, triton.__version__)
        self._skinny_workspace = self._workspace if has_kernel and hopper_decodes else None
        self._planned_layers: list[ref[PlannedLinear]] = []
        self._phased: list[ref[PhasedLinear]] = []
        self.decode_row: AnyDecodeShape | None = None
        """A plan's shape of decodes' attention."""
        self._usual_decode: AnyDecodeShape | None = None
        self.prefill_rows: tuple[tuple[int, PrefillShape], ...] = ()
        """A plan's shapes of prompts' attention: (below so many keys, shape), ascending."""
        self._prefill_asked = "auto"
        self._has_hopper_prefill = False
        self._kv_is_float8 = False
        self._wide: WidenedKv | None = None
        # Prompts' attention runs there beside the decodes'; the higher priority gives it its share
        # of each multiprocessor: docs/performance.md, "Attention on two streams".
        self._beside = torch.cuda.Stream(device, priority=-1) if is_gpu else None  # type: ignore[no-untyped-call]

    def serve_prompts_by(
        self, asked: str, *, head_dim: int, kv_dtype: torch.dtype, unit: int
    ) -> None:
        """Let a kernel compute prompts' attention; before a plan is asked about, or a step made.

        What computes decodes' follows from the cache.

        Args:
            asked: auto (a plan's choice of all that serve here; without one, Hopper's where it was
                measured to be faster), triton, or hopper.
            head_dim: Of the model.
            kv_dtype: Of the cache.
            unit: Tokens of one of its units.

        Raises:
            ConfigError: Hopper's is asked for and cannot serve the model here.
        """
        reason = self.why_not_hopper(head_dim, kv_dtype, unit)
        if asked == "hopper" and reason is not None:
            raise ConfigError(f"--prefill-attention hopper: {reason}; use auto or triton")
        self._prefill_asked = asked
        self._has_hopper_prefill = reason is None
        self._kv_is_float8 = kv_dtype == FLOAT8
        self._usual_decode = self.decode_shapes(head_dim, kv_dtype, unit)[0]

    def why_not_hopper(self, head_dim: int, kv_dtype: torch.dtype, unit: int) -> str | None:
        """Say why Hopper's kernel cannot serve prompts of a model here, or None where it can."""
        return why_not_hopper(
            device=self.device,
            capability=self.capability,
            dtype=self.dtype,
            kv_dtype=kv_dtype,
            head_dim=head_dim,
            unit=unit,
        )

    def may_serve_prompts(self, shape: PrefillShape) -> bool:
        """Tell whether prompts' attention may be by the kernel of a shape, as it was asked for."""
        return self._prefill_asked == "auto" or (
            is_hopper(shape) == (self._prefill_asked == "hopper")
        )

    def prefill_shape(
        self, head_dim: int, max_kv_len: int, *, has_room: bool = True
    ) -> PrefillShape:
        """Return the shape of prompts' attention: the plan's, or the usual one.

        Args:
            head_dim: Of the model.
            max_kv_len: Keys of the step's longest sequence.
            has_room: Whether the keys of the step's prompts could be widened (`has_room`): without,
                the table's shape takes the place of one of Hopper's kernel.

        Raises:
            ConfigError: No kernel serves the head dimension or the GPU.
        """
        planned = (shape for bound, shape in self.prefill_rows if max_kv_len < bound)
        shape = next(planned, None) or self.usual_prefill_shape(head_dim, max_kv_len)
        if is_hopper(shape) and not has_room:
            return prefill_shape(head_dim, max_kv_len, self.capability)
        return shape

    def usual_prefill_shape(self, head_dim: int, max_kv_len: int) -> PrefillShape:
        """Return the shape without a plan: the table's, or the usual one of Hopper's kernel.

        Raises:
            ConfigError: No kernel serves the head dimension or the GPU.
        """
        is_faster = head_dim in FASTER_HEAD_DIMS
        by_default = self._prefill_asked == "auto" and self._has_hopper_prefill and is_faster
        if self._prefill_asked == "hopper" or by_default:
            return hopper_shapes(head_dim)[0]
        return prefill_shape(head_dim, max_kv_len, self.capability)

    def wide_units(self, head_dim: int, *, sequences: int, longest: int) -> int:
        """Return the units that the keys of prompts are to be widened to; 0: nothing is widened.

        Args:
            head_dim: Of the model.
            sequences: Of a step, at most.
            longest: Tokens of one, at most.
        """
        lasts = {min(bound - 1, longest) for bound in BOUNDS}
        by_hopper = any(is_hopper(self.prefill_shape(head_dim, last)) for last in lasts)
        return scratch_units(sequences, longest) if self._kv_is_float8 and by_hopper else 0

    @property
    def wide_tokens(self) -> int:
        """Tokens of prompts that there is room to widen, once reserved; 0: nothing is widened."""
        return 0 if self._wide is None else self._wide.units * UNIT_TOKENS

    def has_room(self, prompt_kv_lens: np.ndarray) -> bool:
        """Tell whether prompts with so many keys can go by Hopper's kernel, if it serves."""
        return self._wide is None or units_of(prompt_kv_lens) <= self._wide.units

    def decode_shapes(
        self, head_dim: int, kv_dtype: torch.dtype, unit: int
    ) -> tuple[AnyDecodeShape, ...]:
        """Return every shape that can serve decodes here, the usual one first.

        Args:
            head_dim: Of the model.
            kv_dtype: Of the cache.
            unit: Tokens of one of its units.

        Raises:
            ConfigError: No kernel serves the head dimension or the GPU.
        """
        tables = decode_candidates(head_dim, self.capability, is_float8=kv_dtype == FLOAT8)
        if self.why_no_hopper_decodes(head_dim, kv_dtype, unit):
            return tables
        return *decode_kernels.hopper_shapes(is_float8=kv_dtype == FLOAT8), *tables

    def why_no_hopper_decodes(
        self, head_dim: int, kv_dtype: torch.dtype, unit: int, group: int = 1
    ) -> str | None:
        """Say why Hopper's kernel does not serve decodes here, or None where it does.

        Args:
            head_dim: Of the model.
            kv_dtype: Of the cache.
            unit: Tokens of one of its units.
            group: Query heads of a KV head.
        """
        if not self._hopper_decodes:
            return "Hopper's kernels for decodes are left out"
        if group > TIMED_GROUP:
            return (
                f"{group} query heads share one of KV, and the kernel was timed up to {TIMED_GROUP}"
            )
        return decode_kernels.why_not_hopper(
            device=self.device,
            capability=self.capability,
            dtype=self.dtype,
            kv_dtype=kv_dtype,
            head_dim=head_dim,
            unit=unit,
        )

    def decode_shape(self, head_dim: int, group: int = 1) -> AnyDecodeShape:
        """Return the shape of decodes' attention: the plan's, or the usual one.

        Args:
            head_dim: Of the model.
            group: Query heads of a KV head: of more than Hopper's kernel takes, the table's shape.

        Raises:
            ConfigError: No kernel serves the head dimension or the GPU.
        """
        shape = self.decode_row or self._usual_decode
        if shape is None or (decode_kernels.is_hopper(shape) and group > TIMED_GROUP):
            return decode_shape(head_dim, self.capability, is_float8=self._kv_is_float8)
        return shape

    def reserve(
        self,
        *,
        rows: int,
        sequences: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_kv_len: int,
    ) -> None:
        """Make attention's scratch, once, for the largest step there will be.

        Args:
            rows: Decodes, at most.
            sequences: Decodes and prompts, at most, padding included.
            num_heads: Of queries.
            num_kv_heads: Of keys and values.
            head_dim: Of the model.
            max_kv_len: Keys of a sequence, at most.
        """
        split = self.decode_shape(head_dim).split
        self._scratch = DecodeScratch.allocate(
            rows, num_heads, head_dim, max_kv_len, split, str(self.device)
        )
        units = self.wide_units(head_dim, sequences=sequences, longest=max_kv_len)
        self._wide = None
        if units:
            self._wide = WidenedKv.allocate(
                units, num_kv_heads, head_dim, self.dtype, self.device, sequences=sequences
            )

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`; x is float32, the result in the activations' dtype."""
        return add_rms_norm(None, x_TD, weight_D, eps, out_dtype=self.dtype)

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> Tensor:
        """See `Kernels.add_rms_norm`; the residual is float32."""
        return add_rms_norm(x_TD, residual_TD, weight_D, eps, out_dtype=self.dtype)

    def rope_and_cache(
        self,
        qkv_TE: Tensor,
        rotary: Rotary,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        norm_eps: float = 1e-6,
        kv_scales: KVScales = UNSCALED,
    ) -> Tensor:
        """See `Kernels.rope_and_cache`; a negative slot writes nothing."""
        return rope_and_cache(
            qkv_TE,
            rotary,
            batch.positions,
            batch.slots,
            k_cache,
            v_cache,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=norm_eps,
            kv_scales=kv_scales,
        )

    def paged_attention(
        self,
        q_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        *,
        kv_scales: KVScales = UNSCALED,
    ) -> Tensor:
        """See `Kernels.paged_attention`."""
        planned = self._planned(batch, q_THD.shape[2])
        out_THD = torch.empty_like(q_THD)
        caches = (k_cache, v_cache)
        if not planned.num_decodes:
            self._prefill(q_THD, caches, planned, scale, out_THD, kv_scales=kv_scales)
        elif not len(planned.tiles):
            self._decode(q_THD, caches, planned, scale, out_THD, kv_scales=kv_scales)
        elif self._beside is None:
            self._decode(q_THD, caches, planned, scale, out_THD, kv_scales=kv_scales)
            self._prefill(q_THD, caches, planned, scale, out_THD, kv_scales=kv_scales)
        else:
            stream = torch.cuda.current_stream(self.device)
            self._beside.wait_stream(stream)
            try:
                with torch.cuda.stream(self._beside):
                    self._prefill(q_THD, caches, planned, scale, out_THD, kv_scales=kv_scales)
                self._decode(q_THD, caches, planned, scale, out_THD, kv_scales=kv_scales)
            finally:  # the next step overwrites what its kernels read
                stream.wait_stream(self._beside)
        return out_THD.flatten(1)

    def _planned(self, batch: AttentionBatch, head_dim: int) -> DeviceBatch:
        """Return a batch whose shape is chosen already, or choose and cut it (see `plan`)."""
        if isinstance(batch, DeviceBatch):
            return batch
        has_room = self._wide is None or self.has_room(batch.kv_lens.cpu().numpy())
        return plan(batch, self.prefill_shape(head_dim, batch.max_kv_len, has_room=has_room))

    def _decode(
        self,
        q_THD: Tensor,
        caches: tuple[Tensor, Tensor],
        batch: DeviceBatch,
        scale: float,
        out_THD: Tensor,
        *,
        kv_scales: KVScales,
    ) -> None:
        _, num_heads, head_dim = q_THD.shape
        decodes = batch.num_decodes
        decode(
            q_THD[:decodes],
            *caches,
            out_THD[:decodes],
            kv_lens=batch.kv_lens,
            block_tables=batch.block_tables,
            scale=scale,
            kv_scales=kv_scales,
            shape=self.decode_shape(head_dim, num_heads // caches[1].shape[1]),
            scratch=self._scratch_for(decodes, num_heads, head_dim, batch.max_kv_len),
        )

    def _prefill(
        self,
        q_THD: Tensor,
        caches: tuple[Tensor, Tensor],
        batch: DeviceBatch,
        scale: float,
        out_THD: Tensor,
        *,
        kv_scales: KVScales,
    ) -> None:
        prefill(
            q_THD,
            *caches,
            out_THD,
            tiles=batch.tiles,
            query_starts=batch.query_starts,
            kv_lens=batch.kv_lens,
            block_tables=batch.block_tables,
            scale=scale,
            kv_scales=kv_scales,
            shape=batch.shape,
            wide=self._wide_for(batch, caches[1]),
            first_prompt=batch.num_decodes,
        )

    def silu_mul(self, gate_up_T2F: Tensor) -> Tensor:
        """See `Kernels.silu_mul`."""
        return silu_mul(gate_up_T2F)

    def multiply(self, linear: Linear, x_TI: Tensor, *, decodes: int = 0) -> Tensor:
        """See `Kernels.multiply`."""
        return linear(x_TI, decodes) if isinstance(linear, PhasedLinear) else linear(x_TI)

    def norm_into(
        self,
        linear: Linear,
        x_TD: Tensor | None,
        residual_TD: Tensor,
        weight_D: Tensor,
        eps: float,
        *,
        decodes: int = 0,
    ) -> Tensor:
        """See `Kernels.norm_into`; a layer that rounds its rows has it done in the norm."""

        def write(layer: DeviceLinear, rows: slice, out_TO: Tensor) -> None:
            x_RD, residual_RD = None if x_TD is None else x_TD[rows], residual_TD[rows]
            if isinstance(layer, RoundsRows) and layer.rounds(len(out_TO)):
                layer.write_normed(x_RD, residual_RD, weight_D, eps, out_TO)
            else:
                normed_RD = add_rms_norm(x_RD, residual_RD, weight_D, eps, out_dtype=self.dtype)
                layer.write(normed_RD, out_TO)

        rows = residual_TD.shape[0]
        if isinstance(linear, PhasedLinear):
            return linear.write_by_phase(rows, decodes, write)
        if isinstance(linear, RoundsRows) and linear.rounds(rows):
            out_TO = self._empty(rows, linear.sizes[0])
            linear.write_normed(x_TD, residual_TD, weight_D, eps, out_TO)
            return out_TO
        return linear(add_rms_norm(x_TD, residual_TD, weight_D, eps, out_dtype=self.dtype))

    def silu_mul_into(self, linear: Linear, gate_up_T2F: Tensor, *, decodes: int = 0) -> Tensor:
        """See `Kernels.silu_mul_into`; rows that a layer rounds are rounded in the product."""

        def write(layer: DeviceLinear, rows: slice, out_TO: Tensor) -> None:
            if isinstance(layer, RoundsRows) and layer.rounds(len(out_TO)):
                layer.write_silu_mul(gate_up_T2F[rows], out_TO)
            else:
                layer.write(silu_mul(gate_up_T2F[rows]), out_TO)

        rows = gate_up_T2F.shape[0]
        if isinstance(linear, PhasedLinear):
            return linear.write_by_phase(rows, decodes, write)
        if isinstance(linear, RoundsRows) and linear.rounds(rows):
            out_TO = self._empty(rows, linear.sizes[0])
            linear.write_silu_mul(gate_up_T2F, out_TO)
            return out_TO
        return linear(silu_mul(gate_up_T2F))

    def _empty(self, rows: int, outputs: int) -> Tensor:
        return torch.empty(rows, outputs, dtype=self.dtype, device=self.device)

    def pack_linear(self, weight: Weight, bias_O: Tensor | None, dtype: WeightDtype) -> Linear:
        """See `Kernels.pack_linear`; what no kernel here takes is unpacked."""
        if DTYPES[dtype] != self.dtype:
            raise ConfigError(f"weights in {dtype} do not go with activations in {self.dtype}")
        if isinstance(weight, GroupInt4) and weight.group % LEAST_GROUP == 0:
            return self.let_plan(Int4Linear(weight, bias_O, self._workspace))
        if isinstance(weight, Float8Weight) and self._multiplies_float8 and takes(weight):
            return self.let_plan(
                Float8Linear(weight, bias_O, self._workspace, rounds_all=self._rounds_all)
            )
        linear = CublasLinear(plain(weight), bias_O, self.dtype, self.device)
        # The interpreter takes a minute for what cuBLAS does at once.
        if self._skinny is None:
            return linear
        return self.let_plan(SkinnyLinear(linear, self._skinny, self._skinny_workspace))

    @property
    def planned_layers(self) -> list[PlannedLinear]:
        """Every linear layer in use that a plan may choose ways for, those inside others included.

        They are not kept alive by this: a copy that finds no room is to be freed.
        """
        return [layer for known in self._planned_layers if (layer := known()) is not None]

    def let_plan(self, layer: L) -> L:
        """Let plans choose the ways of a layer, and return it."""
        self._planned_layers.append(ref(layer))
        return layer

    def with_copy(self, linear: Linear, form: PrefillFormat) -> PhasedLinear:
        """Return a layer of this one for decodes, and a copy of its weight for prompts.

        Args:
            linear: Packed here: in 4 bits, or plain.
            form: Of the copy.

        Raises:
            EngineError: No copy can be made of such a layer.
            RuntimeError: The device has no memory for it.
        """
        if not isinstance(linear, Int4Linear | SkinnyLinear | CublasLinear):
            raise EngineError(f"a layer by {linear.name} has no copy")
        source = linear.plain if isinstance(linear, SkinnyLinear) else linear
        many = form.make(source, self._copies_workspace)
        if isinstance(many, Float8Linear | Int8Linear):
            self.let_plan(many)
        phased = PhasedLinear(linear, many, self.dtype, self.device)
        self._phased.append(ref(phased))
        return phased

    def ways_in_use(self, layer: PlannedLinear) -> tuple[Ways[object], ...]:
        """Return those of a planned layer's ways that can come to serve.

        In 4 bits beside a copy, a layer serves decodes alone and never writes its weight out: to
        ask how would take the memory of a written weight for good.
        """
        if not isinstance(layer, Int4Linear):
            return layer.planned
        phased = (known() for known in self._phased)
        is_few = any(one is not None and one.few is layer for one in phased)
        return (layer.by_codes,) if is_few else layer.planned

    def mend(self) -> bool:
        """See `Question.mend`: of what quantised layers share."""
        found = [workspace.mend() for workspace in (self._workspace, self._copies_workspace)]
        return any(found)

    @property
    def name_of_dtype(self) -> str:
        """Of activations, such as "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def _multiplies_float8(self) -> bool:
        return self.capability >= FLOAT8_CAPABILITY

    def head_dtype(self, dtype: WeightDtype) -> WeightDtype:
        """See `Kernels.head_dtype`."""
        return dtype

    def _wide_for(self, batch: DeviceBatch, v_cache: Tensor) -> WidenedKv | None:
        """Return where the cache of prompts is widened to; None where it is read as it is."""
        if v_cache.dtype != FLOAT8 or not is_hopper(batch.shape):
            return None
        if self._wide is not None:
            return self._wide
        # As in tests and small jobs, whose lengths are read back for tiles as well.
        units = units_of(batch.kv_lens[batch.num_decodes :].cpu().numpy())
        _, num_kv_heads, _, head_dim = v_cache.shape
        return WidenedKv.allocate(units, num_kv_heads, head_dim, self.dtype, self.device)

    def _scratch_for(
        self, rows: int, num_heads: int, head_dim: int, max_kv_len: int
    ) -> DecodeScratch:
        scratch = self._scratch
        split = self.decode_shape(head_dim).split
        if scratch is not None:
            fits = scratch.lses.shape[0] >= rows and scratch.max_splits * split >= max_kv_len
            if fits:
                return scratch
            raise EngineError(f"{rows} rows of {max_kv_len} tokens exceed what was reserved")
        return DecodeScratch.allocate(
            rows, num_heads, head_dim, max_kv_len, split, str(self.device)
        )


class UnpackedTritonKernels(TritonKernels):
    """The same with every quantised weight as its plain values: what accuracy is measured against.

    Args:
        device: As above.
        dtype: As above.
    """

    def pack_linear(self, weight: Weight, bias_O: Tensor | None, dtype: WeightDtype) -> Linear:
        """See `Kernels.pack_linear`."""
        return super().pack_linear(plain(weight), bias_O, dtype)
