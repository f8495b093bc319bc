import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tailrace.errors import ModelError
from tailrace.models.checkpoint import Checkpoint, RandomTensors
from tests.support.tiny import make_tiny_checkpoint

FINAL_NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path):
    return make_tiny_checkpoint(tmp_path)


def shard(folder, parts=3):
    """Split the one file into shards with an index, as large checkpoints are stored."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for part in range(parts):
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        mine = dict(list(tensors.items())[part::parts])
        save_file(mine, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weight_map


def test_tensors_are_taken_by_name(folder):
    expected = load_file(folder / "model.safetensors")
    checkpoint = Checkpoint(folder)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.take(name, tuple(tensor.shape)), tensor)
    checkpoint.finish()


def test_shards_are_one_checkpoint(folder):
    expected = load_file(folder / "model.safetensors")
    shard(folder)
    checkpoint = Checkpoint(folder)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.take(name, tuple(tensor.shape)), tensor)
    checkpoint.finish()


def test_a_missing_tensor_is_named_with_its_shape_and_a_neighbour(folder):
    with pytest.raises(
        ModelError, match=r"tensor model\.norms\.weight \[64\] is missing.*model\.norm"
    ):
        Checkpoint(folder).take("model.norms.weight", (64,))


def test_a_misshapen_tensor_is_named_with_both_shapes(folder):
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[64\], expected \[65\]"):
        Checkpoint(folder).take(FINAL_NORM, (65,))


def test_an_unsupported_type_is_named(folder):
    save_file({"w": torch.zeros(2, dtype=torch.int64)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="tensor w has type I64; supported are F32, F16, BF16"):
        Checkpoint(folder).take("w", (2,))


def test_left_over_tensors_are_named_unless_ignored(folder):
    save_file({"odd.a": torch.zeros(1), "odd.b": torch.zeros(1)}, folder / "model.safetensors")
    checkpoint = Checkpoint(folder)
    checkpoint.take("odd.a", (1,))
    with pytest.raises(ModelError, match=r"1 tensors have no place in this architecture: odd\.b"):
        checkpoint.finish()
    checkpoint.finish([r"odd\..*"])


def test_a_missing_shard_is_named(folder):
    file = shard(folder)[FINAL_NORM]
    (folder / file).unlink()
    with pytest.raises(ModelError, match=f"{file}: this shard is named by"):
        Checkpoint(folder)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", ".."])
def test_an_index_cannot_point_elsewhere(folder, name):
    index = {"weight_map": {"w": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="must be a plain file name"):
        Checkpoint(folder)


def test_a_malformed_index_is_named(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(ModelError, match=r"index\.json: Expected `object`"):
        Checkpoint(folder)


@pytest.mark.parametrize("kept_bytes", [0, 4, 100, 10_000])
def test_a_truncated_file_is_refused(folder, kept_bytes):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    with pytest.raises(ModelError, match=r"model\.safetensors: damaged or incomplete"):
        Checkpoint(folder)


def test_offsets_that_lie_are_refused(folder):
    """A header that places a tensor beyond the end of the file."""
    header = {"w": {"dtype": "F32", "shape": [64], "data_offsets": [2**40, 2**40 + 256]}}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(256))
    with pytest.raises(ModelError, match="damaged or incomplete"):
        Checkpoint(folder)


def test_pickles_are_never_opened(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle, which is never loaded"):
        Checkpoint(folder)


def test_random_tensors_depend_on_seed_and_name_alone():
    first = RandomTensors(1)
    first.take("other", (3, 4))
    weights = first.take("w", (300, 400))
    assert torch.equal(weights, RandomTensors(1).take("w", (300, 400)))
    assert not torch.equal(weights, RandomTensors(2).take("w", (300, 400)))
    assert not torch.equal(weights, RandomTensors(1).take("v", (300, 400)))
    assert abs(weights.std().item() * 400**0.5 - 1) < 0.02


def test_random_norms_are_ones_and_biases_zeros():
    assert RandomTensors(0).take("a.norm.weight", (3,)).tolist() == [1, 1, 1]
    assert RandomTensors(0).take("q_proj.bias", (3,)).tolist() == [0, 0, 0]
