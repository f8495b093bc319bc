"""Tensors of a Hugging Face folder: safetensors, in one file or in shards.

Files are mapped into memory, so a tensor costs nothing until it is read. Every problem is a
`ModelError` that names the tensor. Pickled checkpoints (.bin, .pt) are never opened: reading one
runs code out of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from tailrace.errors import ModelError, nearest
from tailrace.models.weight_reader import FLOATS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "I64": torch.int64,
}
_SHOWN = 5
"""Tensor names that one error message lists."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class Checkpoint:
    """The tensors of one folder, by name; `take` each once, then `finish`.

    Args:
        folder: Holds model.safetensors, or model.safetensors.index.json and its shards.

    Raises:
        ModelError: There are no safetensors, or a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = {name: _open(folder / name) for name in _shards(folder)}
        self._homes = {key: name for name, file in self._files.items() for key in file.keys()}  # noqa: SIM118 - it is no mapping
        self._left = set(self._homes)

    def take(
        self, name: str, *shapes: tuple[int, ...], types: Sequence[torch.dtype] = FLOATS
    ) -> Tensor:
        """Return the tensor `name` as stored, mapped from the file.

        Args:
            name: As in the file.
            shapes: Any of these will do.
            types: Any of these will do.

        Raises:
            ModelError: It is missing, or its shape or type is not the expected one.
        """
        if name not in self._homes:
            hint = nearest(name, self._homes)
            raise ModelError(f"{self.folder}: tensor {name} {list(shapes[0])} is missing{hint}")
        view = self._files[self._homes[name]].get_slice(name)
        found = tuple(view.get_shape())
        if found not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise ModelError(f"{self.place(name)} has shape {list(found)}, expected {expected}")
        if _DTYPES.get(view.get_dtype()) not in types:
            names = [name for name, dtype in _DTYPES.items() if dtype in types]
            raise ModelError(
                f"{self.place(name)} has type {view.get_dtype()}; supported are {', '.join(names)}"
            )
        self._left.discard(name)
        tensor: Tensor = self._files[self._homes[name]].get_tensor(name)
        return tensor

    def has(self, name: str) -> bool:
        """Tell whether there is such a tensor."""
        return name in self._homes

    def place(self, name: str) -> str:
        """Say in which file a tensor is, or should be."""
        return f"{self.folder / self._homes.get(name, '')}: tensor {name}"

    @property
    def names(self) -> list[str]:
        """The tensors that the folder holds."""
        return list(self._homes)

    @property
    def shards(self) -> dict[str, list[str]]:
        """The folder's files, and the tensors that each holds."""
        return {file: list(self._files[file].keys()) for file in self._files}

    def as_stored(self, name: str) -> Tensor:
        """Return one of `names` in whatever shape and type it has."""
        tensor: Tensor = self._files[self._homes[name]].get_tensor(name)
        return tensor

    def take_number(self, name: str) -> float:
        """Return a tensor of one element, of whatever float type and rank.

        Raises:
            ModelError: It is missing, or holds another number of elements.
        """
        if name not in self._homes:
            raise ModelError(f"{self.folder}: tensor {name} is missing")
        tensor: Tensor = self._files[self._homes[name]].get_tensor(name)
        if tensor.numel() != 1:
            raise ModelError(
                f"{self.folder}: tensor {name} has shape {list(tensor.shape)}, expected one element"
            )
        self._left.discard(name)
        return float(tensor.float().item())

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Check that nothing is left over: a tensor without a place means another architecture.

        Args:
            ignored: Regular expressions of names that may be left.

        Raises:
            ModelError: Names the tensors that were never taken.
        """
        patterns = [re.compile(pattern) for pattern in ignored]
        left = sorted(n for n in self._left if not any(p.fullmatch(n) for p in patterns))
        if left:
            shown = ", ".join(left[:_SHOWN]) + (", ..." if len(left) > _SHOWN else "")
            raise ModelError(
                f"{self.folder}: {len(left)} tensors have no place in this architecture: {shown}"
            )


class RandomTensors:
    """Seeded random weights in place of a checkpoint's: for speed tests without a download.

    A tensor depends on the seed, its name and the kind of device only. Matrices get a standard
    deviation of 1/sqrt(inputs), which keeps activations near one through any depth; vectors are
    norms' ones or biases' zeros.
    """

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        self.seed = seed
        self.device = device or torch.device("cpu")

    def take(
        self,
        name: str,
        *shapes: tuple[int, ...],
        types: Sequence[torch.dtype] = FLOATS,  # noqa: ARG002 - there are no others
    ) -> Tensor:
        """Return float32 of the first of `shapes`."""
        shape = shapes[0]
        if len(shape) == 1:
            fill = torch.zeros if name.endswith(".bias") else torch.ones
            return fill(shape, device=self.device)
        name_number = int.from_bytes(name.encode(), "big") % (2**61 - 1)  # stable, unlike hash()
        generator = torch.Generator(self.device).manual_seed(self.seed ^ name_number)
        weights: Tensor = torch.randn(shape, generator=generator, device=self.device)
        return weights.mul_(shape[-1] ** -0.5)

    def has(self, name: str) -> bool:  # noqa: ARG002 - as below
        """Nothing that is optional is there."""
        return False

    def place(self, name: str) -> str:
        """Say that there is no file."""
        return f"dummy weights: tensor {name}"

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Nothing can be left over."""


def _shards(folder: Path) -> list[str]:
    """Return the names of the safetensors files, checked to lie in the folder itself."""
    index = folder / _INDEX
    if index.exists():
        try:
            names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
        except msgspec.DecodeError as error:
            raise ModelError(f"{index}: {error}") from error
        for name in names:
            if Path(name).name != name or name == "..":
                raise ModelError(f"{index}: shard {name!r} must be a plain file name")
        return sorted(names)
    if (folder / _FILE).exists():
        return [_FILE]
    pickled = sorted(p.name for p in folder.glob("*.bin")) + sorted(
        p.name for p in folder.glob("*.pt*")
    )
    found = f"; {pickled[0]} is a pickle, which is never loaded: convert it" if pickled else ""
    raise ModelError(f"{folder}: neither {_FILE} nor {_INDEX} is here{found}")


def _open(file: Path) -> Any:
    # Any: the library's methods carry no types.
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as error:
        raise ModelError(f"{file}: this shard is named by {_INDEX} and is missing") from error
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: damaged or incomplete: {error}") from error
