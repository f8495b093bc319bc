import json
import threading
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tailrace.errors import ModelError
from tailrace.kernels.select import select
from tailrace.models.builder import Builder
from tailrace.models.loader import load_model
from tests.models.paged import PagedRun
from tests.support.tiny import make_tiny_checkpoint, write_json


@pytest.fixture
def folder(tmp_path):
    return make_tiny_checkpoint(tmp_path, tie_word_embeddings=False)


def load(folder, dtype="float32", **options):
    return load_model(folder, dtype=dtype, kernels=select("torch", 1), **options)


def edit(folder, change):
    """Rewrite the weights after `change` edited the mapping of tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def logits(model):
    return PagedRun(model).step({0: list(b"some text")})


def test_a_missing_tensor_is_named(folder):
    edit(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    message = r"tensor model\.layers\.1\.self_attn\.k_proj\.weight \[32, 64\] is missing"
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_a_misshapen_tensor_is_named(folder):
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(7, 64)}))
    with pytest.raises(
        ModelError, match=r"lm_head\.weight has shape \[7, 64\], expected \[259, 64\]"
    ):
        load(folder)


def test_a_tensor_without_a_place_is_named(folder):
    name = "model.layers.0.self_attn.q_proj.bias"
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(64)}))
    with pytest.raises(ModelError, match=rf"no place in this architecture: {name}"):
        load(folder)


def test_what_old_and_tied_checkpoints_carry_besides_is_ignored(tmp_path):
    folder = make_tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    expected = logits(load(folder))
    besides = {
        "lm_head.weight": torch.zeros(3),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
    }
    edit(folder, lambda tensors: tensors.update(besides))
    assert torch.equal(logits(load(folder)), expected)


def test_a_config_that_claims_the_sky_asks_for_no_memory(folder):
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"intermediate_size": 2**50})
    with pytest.raises(ModelError, match=r"gate_proj\.weight has shape \[96, 64\], expected"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_checkpoints_compute_as_their_float32_values(folder, dtype):
    edit(folder, lambda t: t.update({name: value.to(dtype) for name, value in t.items()}))
    half = logits(load(folder))
    edit(folder, lambda t: t.update({name: value.float() for name, value in t.items()}))
    assert torch.equal(half, logits(load(folder)))


def test_auto_means_float16_weights(folder):
    """Two bytes a parameter of the matrices; norms stay float32."""
    full, half, auto = load(folder), load(folder, "float16"), load(folder, "auto")
    tensors = load_file(folder / "model.safetensors").values()
    assert full.weight_bytes == 4 * sum(t.numel() for t in tensors)
    matrices = sum(t.numel() for t in tensors if t.dim() == 2)
    assert half.weight_bytes == full.weight_bytes - 2 * matrices
    assert auto.weight_bytes == half.weight_bytes
    assert torch.equal(logits(auto), logits(half))


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight", "lm_head.weight"],
)
def test_a_weight_beyond_float16_is_named_with_the_remedy(folder, name):
    edit(folder, lambda tensors: tensors[name].view(-1)[5].fill_(-1e5))
    with pytest.raises(ModelError, match=f"{name.removesuffix('.weight')}.*--dtype float32"):
        load(folder, "float16")
    load(folder, "float32")


def test_weights_are_copies(folder):
    """Overwriting the file under a running model changes nothing."""
    model = load(folder)
    before = logits(model)
    file = folder / "model.safetensors"
    with file.open("r+b") as handle:
        handle.seek(-40_000, 2)
        handle.write(b"\xff" * 40_000)
    assert torch.equal(logits(model), before)


def test_dummy_weights_need_the_config_alone(folder):
    (folder / "model.safetensors").unlink()
    model = load(folder, load_format="dummy", seed=3)
    first = logits(model)
    assert first.isfinite().all()
    assert 0.1 < first.std() < 10
    assert torch.equal(first, logits(load(folder, load_format="dummy", seed=3)))
    assert not torch.equal(first, logits(load(folder, load_format="dummy", seed=4)))


def test_unknown_options_are_named(folder):
    with pytest.raises(ModelError, match="dtype 'int3' must be one of"):
        load(folder, "int3")
    with pytest.raises(ModelError, match="load format 'npz' must be auto or dummy"):
        load(folder, load_format="npz")


@pytest.mark.parametrize(("device", "most"), [("cpu", 9), ("cuda", 4)])
def test_few_layers_are_packed_at_once_on_a_gpu(monkeypatch, device, most):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 9)
    here, too_many = threading.Semaphore(most), []
    all_here = threading.Barrier(most)

    def build(place):
        if not here.acquire(blocking=False):
            too_many.append(place)
        all_here.wait(timeout=20)  # no fewer, either
        here.release()
        return place

    kernels = SimpleNamespace(device=torch.device(device))
    builder = Builder(SimpleNamespace(num_layers=2 * most), None, kernels, "float16")
    assert builder.layers(build) == [f"model.layers.{index}" for index in range(2 * most)]
    assert too_many == []


def test_a_gpu_without_memory_for_weights_is_told_so(monkeypatch, folder):
    kernels = select("torch", 1)

    def pack(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    monkeypatch.setattr(Builder, "linear", pack)
    with pytest.raises(ModelError, match=r"no memory for its weights.*Tried to allocate 2 GiB\)"):
        load_model(folder, dtype="float32", kernels=kernels)
