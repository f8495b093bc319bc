"""A checkpoint of some of another one's layers."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file

from tests.support.tiny import write_json

if TYPE_CHECKING:
    from pathlib import Path


def every_fifth_layer(source: Path, folder: Path) -> Path:
    """Write every fifth layer of a model and all else that it has; return the folder.

    Where each number is compared, the other layers would tell no more.

    Args:
        source: A Hugging Face folder with one file of weights, and with layers that 5 divides.
        folder: Must not be there.
    """
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((source / "config.json").read_text())
    layers, rest = divmod(config["num_hidden_layers"], 5)
    assert rest == 0
    write_json(folder / "config.json", config | {"num_hidden_layers": layers})
    tensors = {}
    for name, value in load_file(source / "model.safetensors").items():
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if found is None:
            tensors[name] = value
        elif int(found[1]) % 5 == 0:
            tensors[f"model.layers.{int(found[1]) // 5}.{found[2]}"] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
