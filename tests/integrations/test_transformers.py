"""Our attention inside transformers' own models: SDPA's logits, or SDPA itself with the reason."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    StaticCache,
)

from tailrace.errors import ConfigError
from tailrace.integrations import transformers as hook
from tailrace.integrations.transformers import Reason
from tests.support.interpreter import quietly

pytest.importorskip("triton", reason="Triton is not installed")

from tests.kernels.hopper_stand_in import let_hopper_serve

VOCAB, LAYERS = 97, 2
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "phi3": Phi3Config(**SIZES),
    "olmo2": Olmo2Config(**SIZES),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2
    ),
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter has float32; no GPU serves it.
DTYPE = torch.float16 if torch.cuda.is_available() else torch.float32
NOISE = 2e-2 if torch.cuda.is_available() else 2e-5

LEFT = [[0] * 5 + [1] * 35, [1] * 40]
RIGHT = [[1] * 40, [1] * 22 + [0] * 18]


@pytest.fixture(autouse=True)
def _hook(monkeypatch):
    """The attention registered and its counts at 0; Triton's interpreter in silence."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    hook.register()
    hook.reset()
    with quietly():
        yield


def make(config, attention="tailrace"):
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention)
    return model.to(DEVICE, DTYPE).eval()


def ids(batch=2, length=40):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, VOCAB, (batch, length), generator=generator).to(DEVICE)


@torch.no_grad()
def logits(model, attention, *args, **kwargs):
    model.set_attn_implementation(attention)
    return model(*args, **kwargs).logits.float()


def assert_same(model, *args, keep=None, **kwargs):
    """Ours equals SDPA's where `keep` says, and every layer was ours."""
    found = logits(model, "tailrace", *args, **kwargs)
    assert hook.fallbacks() == {}
    assert hook.served() == LAYERS
    expected = logits(model, "sdpa", *args, **kwargs)
    assert hook.served() == LAYERS
    keep = torch.ones(found.shape[:2], dtype=torch.bool) if keep is None else keep
    torch.testing.assert_close(found[keep], expected[keep], rtol=NOISE, atol=NOISE)
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mask", [None, LEFT, RIGHT], ids=["whole", "left", "right"])
def test_a_prompts_logits_are_those_of_sdpa(family, mask):
    model = make(FAMILIES[family])
    if mask is None:
        assert_same(model, ids(), use_cache=False)
        return
    mask = torch.tensor(mask, device=DEVICE)
    assert_same(model, ids(), attention_mask=mask, use_cache=False, keep=mask.bool())


@pytest.mark.parametrize("is_padded", [False, True])
def test_a_chunk_over_a_cached_prefix_continues_the_prompt(is_padded):
    model, tokens = make(FAMILIES["qwen2"]), ids()
    mask = torch.tensor(LEFT if is_padded else [[1] * 40] * 2, device=DEVICE)
    whole = logits(model, "sdpa", tokens, attention_mask=mask)
    model.set_attn_implementation("tailrace")
    cache = None
    for begin, end in ((0, 17), (17, 29), (29, 40)):
        with torch.no_grad():
            step = model(
                tokens[:, begin:end],
                attention_mask=mask[:, :end],
                past_key_values=cache,
                use_cache=True,
            )
        cache = step.past_key_values
        keep = mask[:, begin:end].bool()
        expected = whole[:, begin:end][keep]
        torch.testing.assert_close(step.logits.float()[keep], expected, rtol=NOISE, atol=NOISE)
    assert hook.fallbacks() == {}
    assert hook.served() == 3 * LAYERS


def test_a_static_cache_is_read_up_to_the_queries():
    model, tokens = make(FAMILIES["llama"]), ids()
    whole = logits(model, "sdpa", tokens)
    model.set_attn_implementation("tailrace")
    cache = StaticCache(config=model.config, max_cache_len=64)
    for begin, end in ((0, 25), (25, 40)):
        positions = torch.arange(begin, end, device=DEVICE)
        with torch.no_grad():
            step = model(
                tokens[:, begin:end], past_key_values=cache, position_ids=positions[None],
                cache_position=positions,
            )  # fmt: skip
        expected = whole[:, begin:end]
        torch.testing.assert_close(step.logits.float(), expected, rtol=NOISE, atol=NOISE)
    assert hook.fallbacks() == {}
    assert hook.served() == 2 * LAYERS


def test_generate_prefills_here_and_decodes_by_sdpa():
    model = make(FAMILIES["qwen3"])
    mask = torch.tensor(LEFT, device=DEVICE)
    settings = {"attention_mask": mask, "max_new_tokens": 6, "min_new_tokens": 6}
    found = model.generate(ids(), do_sample=False, **settings)
    assert hook.served() == LAYERS
    assert hook.fallbacks() == {str(Reason.DECODE): 5 * LAYERS}
    model.set_attn_implementation("sdpa")
    assert torch.equal(found, model.generate(ids(), do_sample=False, **settings))


def test_a_loaded_model_is_switched_back_and_forth():
    model = make(FAMILIES["llama"], "sdpa")
    for attention, count in (("sdpa", 0), ("tailrace", 1), ("sdpa", 1), ("tailrace", 2)):
        logits(model, attention, ids(1, 8))
        assert hook.served() == count * LAYERS


def test_training_is_sdpas_with_its_gradients():
    model = make(FAMILIES["qwen2"])
    gradients = []
    for attention in ("tailrace", "sdpa"):
        model.set_attn_implementation(attention)
        model.zero_grad()
        model(ids(), labels=ids()).loss.backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
    assert torch.equal(*gradients)
    assert hook.fallbacks() == {str(Reason.GRADIENTS): LAYERS}


def test_a_window_longer_than_the_prompt_is_served_and_a_shorter_one_is_sdpas():
    model = make(MistralConfig(**SIZES, sliding_window=16))
    short = ids(2, 12)
    assert_same(model, short)
    hook.reset()
    found = logits(model, "tailrace", ids())
    assert hook.fallbacks() == {str(Reason.SLIDING_WINDOW): LAYERS}
    assert torch.equal(found, logits(model, "sdpa", ids()))


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        pytest.param([[1] * 10 + [0] * 4 + [1] * 26, [1] * 40], Reason.MASK_WITH_HOLES, id="holes"),
        pytest.param(
            torch.ones(40, 40, dtype=torch.bool).tril().tolist(), Reason.MASK_OF_CALLER, id="own"
        ),
    ],
)
def test_a_mask_that_the_kernel_cannot_follow_is_sdpas(mask, reason):
    model, mask = make(FAMILIES["llama"]), torch.tensor(mask, device=DEVICE)
    if reason is Reason.MASK_OF_CALLER:
        mask = mask[None, None].expand(2, 1, 40, 40)
    found = logits(model, "tailrace", ids(), attention_mask=mask)
    assert hook.fallbacks() == {str(reason): LAYERS}
    assert torch.equal(found, logits(model, "sdpa", ids(), attention_mask=mask))


def test_prompts_packed_into_one_row_are_sdpas():
    """Positions that begin anew say so, without a mask."""
    model = make(FAMILIES["llama"])
    positions = torch.cat([torch.arange(25), torch.arange(15)])[None].to(DEVICE)
    packed = {"position_ids": positions, "use_cache": False}
    found = logits(model, "tailrace", ids(1), **packed)
    assert hook.fallbacks() == {str(Reason.MASK_NOT_CAUSAL): LAYERS}
    assert torch.equal(found, logits(model, "sdpa", ids(1), **packed))


def call(**changes):
    """Return the arguments of a layer's call that the kernel serves, but for the changes."""
    head_dim = changes.pop("head_dim", 16)
    queries = changes.pop("queries", 8)
    q = torch.randn(1, 4, queries, head_dim, device=DEVICE, dtype=DTYPE)
    k, v = torch.randn(2, 1, 2, 8, head_dim, device=DEVICE, dtype=DTYPE)
    known = {
        "module": SimpleNamespace(num_key_value_groups=2, is_causal=True), "query": q, "key": k,
        "value": v, "attention_mask": None,
    }  # fmt: skip
    return known | changes


CALLS = {
    Reason.GRADIENTS: {"key": torch.randn(1, 2, 8, 16, requires_grad=True, dtype=DTYPE)},
    Reason.DROPOUT: {"dropout": 0.25},
    Reason.HEAD_DIM: {"head_dim": 24},
    Reason.DECODE: {"queries": 1},
    Reason.NOT_CAUSAL: {"is_causal": False},
    Reason.SLIDING_WINDOW: {"sliding_window": 7},
    Reason.POSITION_BIAS: {"position_bias": torch.zeros(1, 1, 8, 8, dtype=DTYPE)},
    Reason.WEIGHTS_WANTED: {"output_attentions": True},
    Reason.MASK_OF_CALLER: {"attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()},
}


def on_device(value):
    is_leaf = isinstance(value, torch.Tensor)
    return value.detach().to(DEVICE).requires_grad_(value.requires_grad) if is_leaf else value


@pytest.mark.parametrize("reason", CALLS, ids=lambda reason: reason.name)
def test_what_the_kernel_does_not_serve_is_sdpas_and_says_why(reason, caplog):
    arguments = call(**{name: on_device(value) for name, value in CALLS[reason].items()})
    with caplog.at_level(logging.INFO, logger=hook.LOGGER.name):
        torch.manual_seed(1)
        found, weights = hook.tailrace_attention(**arguments)
        hook.tailrace_attention(**arguments)
    assert weights is None
    assert hook.fallbacks() == {str(reason): 2}
    assert hook.served() == 0
    # Once for each reason, however often it is met.
    said = [entry.message for entry in caplog.records if entry.name == hook.LOGGER.name]
    assert said == [f"attention goes to SDPA: {reason}"]
    torch.manual_seed(1)
    expected, _ = hook.sdpa_attention_forward(**arguments)
    assert torch.equal(found, expected)


def test_the_call_without_changes_is_served():
    """Without which the test above would prove nothing."""
    found, _ = hook.tailrace_attention(**call())
    assert (hook.served(), hook.fallbacks()) == (1, {})
    assert found.shape == (1, 8, 4, 16)


def tensor(shape=(1, 4, 8, 64), dtype=torch.float16, device="cuda"):
    """Return what the rules ask of a tensor on a GPU, where there is none."""
    return SimpleNamespace(
        shape=shape, dtype=dtype, device=torch.device(device), is_cuda=device == "cuda",
        requires_grad=False,
    )  # fmt: skip


def reason_of(
    monkeypatch, query=None, key=None, *, capability=(9, 0), captured=False, by_hopper=False
):
    """Return why a call on a GPU would be SDPA's."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    monkeypatch.setattr("tailrace.kernels.paged_attention.contiguous.reaches", lambda _: True)
    query, key = query or tensor(), key or tensor((1, 2, 8, 64))
    call = hook._Call(torch.nn.Identity(), query, key, key, 0.0, None, {})
    return hook._why_not(call, by_hopper=by_hopper)


def test_what_a_gpu_must_be_and_hold(monkeypatch):
    assert reason_of(monkeypatch) is None
    assert reason_of(monkeypatch, capability=(7, 5)) is Reason.OLD_GPU
    assert reason_of(monkeypatch, captured=True) is Reason.CAPTURE
    assert reason_of(monkeypatch, tensor(dtype=torch.float32)) is Reason.DTYPE
    assert reason_of(monkeypatch, tensor(dtype=torch.float8_e4m3fn)) is Reason.DTYPE
    assert reason_of(monkeypatch, tensor(dtype=torch.bfloat16)) is Reason.DTYPE  # keys: float16
    assert reason_of(monkeypatch, tensor((1, 3, 8, 64))) is Reason.HEADS
    assert reason_of(monkeypatch, tensor((2, 4, 8, 64))) is Reason.HEADS
    assert reason_of(monkeypatch, tensor(device="cpu")) is Reason.NO_GPU  # keys: elsewhere
    assert reason_of(monkeypatch, by_hopper=True) is None
    assert reason_of(monkeypatch, capability=(8, 9)) is None
    assert reason_of(monkeypatch, capability=(8, 9), by_hopper=True) is Reason.NOT_HOPPER
    narrow = tensor((1, 4, 8, 32)), tensor((1, 2, 8, 32))
    assert reason_of(monkeypatch, *narrow) is None
    assert reason_of(monkeypatch, *narrow, by_hopper=True) is Reason.HOPPER_HEAD_DIM
    monkeypatch.setattr(hook, "_has_triton", lambda: False)
    assert reason_of(monkeypatch) is Reason.NO_TRITON


def test_keys_beyond_32_bits_are_sdpas(monkeypatch):
    monkeypatch.setattr("tailrace.kernels.paged_attention.contiguous.INT32_END", 100)
    hook.tailrace_attention(**call())
    assert hook.fallbacks() == {str(Reason.TOO_FAR): 1}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_and_without_the_interpreter_everything_is_sdpas(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    model = make(FAMILIES["llama"])
    found = logits(model, "tailrace", ids())
    assert hook.fallbacks() == {str(Reason.NO_GPU): LAYERS}
    assert torch.equal(found, logits(model, "sdpa", ids()))


def test_a_mask_made_for_other_shapes_is_sdpas():
    mask = hook.tailrace_mask(
        batch_size=1, q_length=8, kv_length=9, q_offset=1,
        cache_position=torch.arange(1, 9), mask_function=hook.causal_mask_function,
    )  # fmt: skip
    found = hook._spans(hook._Call(**without_mask(call())), mask.to(DEVICE))
    assert found is (Reason.MASK_SHAPE if DEVICE.type == "cpu" else Reason.MASK_OF_CALLER)


def without_mask(arguments):
    kept = {name: arguments[name] for name in ("module", "query", "key", "value")}
    return kept | {"dropout": 0.0, "is_causal": None, "extras": {}}


def test_every_reason_is_met_by_some_test():
    elsewhere = {
        Reason.NO_GPU, Reason.NO_TRITON, Reason.OLD_GPU, Reason.CAPTURE, Reason.DTYPE,
        Reason.HEADS, Reason.TOO_FAR, Reason.MASK_NOT_CAUSAL, Reason.MASK_WITH_HOLES,
        Reason.MASK_SHAPE, Reason.NOT_HOPPER, Reason.HOPPER_HEAD_DIM,
    }  # fmt: skip
    assert elsewhere | CALLS.keys() == set(Reason)


def test_a_name_may_have_hoppers_kernel_and_the_other_keeps_tritons(monkeypatch):
    stand_in = let_hopper_serve(monkeypatch)
    hook.register("tailrace-hopper", prefill_attention="hopper")
    model = make(LlamaConfig(**SIZES, head_dim=64))
    mask = torch.tensor(LEFT, device=DEVICE)
    known = {"attention_mask": mask, "use_cache": False}
    found = [logits(model, f"tailrace{name}", ids(), **known) for name in ("", "-hopper")]
    assert len(stand_in.calls) == LAYERS
    assert (hook.served(), hook.fallbacks()) == (2 * LAYERS, {})
    expected = logits(model, "sdpa", ids(), **known)
    for ours in found:
        torch.testing.assert_close(ours[mask.bool()], expected[mask.bool()], rtol=NOISE, atol=NOISE)


@pytest.mark.parametrize(
    ("kernel", "head_dim", "by_hopper"),
    [("auto", 128, True), ("auto", 64, False), ("triton", 128, False), ("hopper", 64, True)],
)
def test_a_name_without_a_kernel_has_the_faster_one(monkeypatch, kernel, head_dim, by_hopper):
    stand_in = let_hopper_serve(monkeypatch)
    chosen = {} if kernel == "auto" else {"prefill_attention": kernel}
    hook.register("tailrace-chosen", **chosen)
    model = make(LlamaConfig(**SIZES, head_dim=head_dim))
    found = logits(model, "tailrace-chosen", ids(), use_cache=False)
    assert (hook.served(), hook.fallbacks()) == (LAYERS, {})
    assert len(stand_in.calls) == by_hopper * LAYERS
    expected = logits(model, "sdpa", ids(), use_cache=False)
    torch.testing.assert_close(found, expected, rtol=NOISE, atol=NOISE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have the kernel")
def test_by_itself_a_name_has_tritons_kernel_where_there_is_no_hopper_gpu():
    hook.register("tailrace-chosen")
    logits(make(LlamaConfig(**SIZES, head_dim=128)), "tailrace-chosen", ids(), use_cache=False)
    assert (hook.served(), hook.fallbacks()) == (LAYERS, {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have the kernel")
def test_hoppers_kernel_without_a_hopper_gpu_is_sdpa_with_the_reason():
    hook.register("tailrace-hopper", prefill_attention="hopper")
    model = make(LlamaConfig(**SIZES, head_dim=64))
    found = logits(model, "tailrace-hopper", ids(), use_cache=False)
    assert (hook.served(), hook.fallbacks()) == (0, {str(Reason.NOT_HOPPER): LAYERS})
    assert torch.equal(found, logits(model, "sdpa", ids(), use_cache=False))


def test_a_kernel_that_is_none_is_refused():
    known = "'hoper': must be one of auto, triton, hopper .*'hopper'"
    with pytest.raises(ConfigError, match=known):
        hook.register(prefill_attention="hoper")


@pytest.mark.parametrize(
    ("extra", "what"),
    [("softcap", "soft-capped"), ("s_aux", "attention sinks"), ("read_index", "paged cache")],
)
def test_what_sdpa_would_leave_out_is_an_error(extra, what):
    with pytest.raises(ConfigError, match=f"{what}.*neither.*set_attn_implementation"):
        hook.tailrace_attention(**call(**{extra: 30.0}))
    assert hook.fallbacks() == {}


def test_inside_torch_compile_it_is_sdpa_without_a_break():
    arguments = call()
    tensors = {name: arguments.pop(name) for name in ("query", "key", "value")}

    def layer(query, key, value):
        return hook.tailrace_attention(query=query, key=key, value=value, **arguments)[0]

    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    expected, _ = hook.sdpa_attention_forward(**tensors, **arguments)
    assert torch.equal(compiled(**tensors), expected)
    assert (hook.served(), hook.fallbacks()) == (0, {})
