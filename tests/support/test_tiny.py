import json

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.support.tiny import EOS_ID, SPECIALS, VOCAB_SIZE, byte_symbols, make_tiny_checkpoint


def test_ids_are_bytes_and_then_the_specials(tmp_path):
    tokenizer = Tokenizer.from_file(str(make_tiny_checkpoint(tmp_path) / "tokenizer.json"))
    text = "héllo 你 123\n"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.encode("a<|im_end|>").ids == [ord("a"), EOS_ID]
    assert tokenizer.get_vocab_size() == VOCAB_SIZE == 256 + len(SPECIALS)
    assert tokenizer.decode(list(range(256)), skip_special_tokens=False)
    assert len(set(byte_symbols())) == 256


def test_the_seed_decides_the_weights(tmp_path):
    weights = [
        load_file(make_tiny_checkpoint(tmp_path / str(i), seed=seed) / "model.safetensors")
        for i, seed in enumerate((5, 5, 6))
    ]
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(weights[0][name], weights[1][name])
    assert not torch.equal(weights[0][name], weights[2][name])


def test_overrides_reach_config_and_weights(tmp_path):
    folder = make_tiny_checkpoint(tmp_path, "qwen3", num_hidden_layers=1, vocab_size=300)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 1
    weights = load_file(folder / "model.safetensors")
    assert weights["lm_head.weight"].shape == (300, 64)
    assert not any(".layers.1." in name for name in weights)
