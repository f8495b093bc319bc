import numpy as np
import pytest
from safetensors.numpy import load_file

from tailrace.errors import ModelError
from tailrace.models.safetensors_writer import write_safetensors


def test_the_library_reads_what_was_written(tmp_path):
    rng = np.random.default_rng(0)
    shapes = {"a": (3, 5), "b.weight": (7,), "c": (2, 1, 4)}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    tensors["a"] = np.asfortranarray(tensors["a"])
    write_safetensors(tmp_path / "x.safetensors", shapes, tensors.items())
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(loaded[name], values)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("other", np.zeros((2, 2), np.float32)),
        ("a", np.zeros((4, 1), np.float32)),
        ("a", np.zeros((2, 2), np.float64)),
    ],
)
def test_a_tensor_that_was_not_announced_so_is_refused(tmp_path, name, values):
    with pytest.raises(ModelError, match=r"announced was a \[2, 2\] float32"):
        write_safetensors(tmp_path / "x", {"a": (2, 2)}, [(name, values)])
