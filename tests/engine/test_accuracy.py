import math
from dataclasses import replace

import pytest
import torch

from tailrace import cli
from tailrace.config import EngineConfig
from tailrace.engine.accuracy import (
    CPU,
    DECODES,
    PROMPTS,
    WINDOW_TOKENS,
    Accuracy,
    Bound,
    Device,
    Reading,
    Report,
    check_accuracy,
    compare,
    cut_windows,
    readings_of,
    record,
)
from tailrace.engine.accuracy_record import LEAST_POSITIONS, Numerics, file_of, fingerprint
from tailrace.errors import ConfigError
from tailrace.kernels.select import select
from tailrace.models.loader import load_model
from tests.models.paged import PagedRun
from tests.support.interpreter import exact_float8
from tests.support.quantized import awq, float8, plain_beside, write_quantized
from tests.support.tiny import make_tiny_checkpoint

TEXT = "The quick brown fox jumps over the lazy dog, and thinks nothing of it. " * 40


def load(folder, dtype="float32"):
    return load_model(folder, dtype=dtype, kernels=select("torch", 1))


def config(folder, **settings):
    settings = {"dtype": "float32", "threads": 1, "cpu_kernels": "torch"} | settings
    return EngineConfig(model_path=str(folder), **settings)


@pytest.fixture
def source(tmp_path):
    return make_tiny_checkpoint(tmp_path / "source", max_position_embeddings=2048)


def test_the_figures_are_those_of_the_definition(tmp_path, source):
    other = make_tiny_checkpoint(tmp_path / "other", seed=1)
    # Longer than a chunk, so that a window is read in several steps.
    window = list(TEXT.encode()[:301])
    found = compare(load(source), load(other), [window], CPU)
    q, p = (
        PagedRun(load(folder), max_tokens=300).step({0: window[:-1]}).double().log_softmax(-1)
        for folder in (source, other)
    )
    costs = (p.exp() * (p - q)).sum(-1)
    answers = torch.tensor(window[1:]).unsqueeze(1)
    assert found.positions == 300
    assert found.agreement == (p.argmax(-1) == q.argmax(-1)).double().mean()
    assert found.divergence == pytest.approx(costs.mean().item(), rel=1e-4)
    assert found.worst_divergence == pytest.approx(costs.max().item(), rel=1e-4)
    surprise, reference = (-x.gather(1, answers).mean().item() for x in (q, p))
    assert math.log(found.perplexity) == pytest.approx(surprise, rel=1e-4)
    assert math.log(found.reference_perplexity) == pytest.approx(reference, rel=1e-4)
    assert not found.keeps(Bound())
    assert "MISSED" in found.describe(Bound())


def test_a_later_window_sees_nothing_of_the_one_before(source):
    first, second = list(TEXT.encode()[:200]), list(TEXT.encode()[71:200])
    model, other = load(source), load(source, "float16")
    alone = compare(other, model, [second], CPU)
    both = compare(other, model, [first, second], CPU)
    before = compare(other, model, [first], CPU)
    total = alone.divergence * alone.positions + before.divergence * before.positions
    assert both.divergence * both.positions == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_decodes_beside_one_another_are_what_their_windows_are_alone(tmp_path, source, count):
    """Of lengths that differ by one, more of them than a step has rows."""
    other = load(make_tiny_checkpoint(tmp_path / "other", seed=1))
    model, text = load(source), list(TEXT.encode())
    windows = [text[40 * n : 40 * n + 20 + (n > 1)] for n in range(count)]
    whole = compare(model, other, windows, CPU)
    found = compare(model, other, windows, CPU, reading=Reading("decodes", 3, decodes=True))
    assert found.positions == whole.positions == sum(map(len, windows)) - count
    assert (found.rows, whole.rows) == (min(count, 3), 19 + (count > 2))
    for name in ("agreement", "divergence", "worst_divergence", "perplexity"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name), rel=1e-4)


@pytest.mark.parametrize(
    ("positions", "longest", "prompts", "decodes"),
    [(1, 4096, [1], [1]), (40, 4096, [40], [2] * 20), (20_000, 4096, [1000] * 20, [625] * 32),
     (40_000, 4096, [1000] * 40, [1000] * 40), (1200, 512, [400] * 3, [38] * 16 + [37] * 16)],
)  # fmt: skip
def test_prompts_come_in_steps_of_512_or_more_and_decodes_in_32(
    positions, longest, prompts, decodes
):
    text = list(range(2 * positions + 1))
    for reading, sizes in ((PROMPTS, prompts), (DECODES, decodes)):
        windows = reading.cut(text, positions, longest)
        assert [len(window) - 1 for window in windows] == sizes
    assert readings_of(EngineConfig(gpus=(0,))) == (PROMPTS, DECODES)


def test_every_reading_must_keep_the_bound():
    good = Accuracy(9, 1.0, 0.0, 0.0, 2.0, 2.0, "prompts", 1024)
    bad = replace(good, divergence=0.1, reading="decodes", rows=32)
    assert Report("s", "r", (good, good)).keeps(Bound())
    for readings in ((good, bad), (bad, good)):
        report = Report("s", "r", readings)
        assert not report.keeps(Bound())
        shown = report.describe(Bound())
        assert (shown.count("kept"), shown.count("MISSED")) == (1, 1)
        assert "prompts     1,024 rows a step" in shown
        assert "decodes     32 rows a step" in shown


class Unfinite:
    """A model some of whose logits are no numbers, as where half precision overflows."""

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)

    def logits(self, hidden):
        found = self._model.logits(hidden)
        found[3] = torch.nan
        return found


@pytest.mark.parametrize("faulty", [(True, False), (False, True), (True, True)])
def test_what_is_not_finite_keeps_no_bound_whose_ever_it_is(source, faulty):
    models = [Unfinite(load(source)) if is_faulty else load(source) for is_faulty in faulty]
    found = compare(*models, [list(TEXT.encode()[:20])], CPU)
    assert math.isnan(found.divergence)
    assert not found.keeps(Bound(agreement=0.0, divergence=1e6))
    asked = config(source, prefill_weights="fp8", gpus=(0,), dtype="float16")
    under = Numerics.of(asked, "float16", (9, 0))
    report = Report("s", "r", (replace(found, positions=LEAST_POSITIONS),), under)
    assert record(asked, report, against="") == "not recorded: not finite"


@pytest.mark.parametrize(
    ("dtype", "agreement", "divergence", "is_told"),
    [("bfloat16", 0.98, 0.001, True), ("bfloat16", 0.98, 0.1, False),
     ("bfloat16", 0.995, 0.001, False), ("float16", 0.98, 0.001, False),
     (None, 0.98, 0.001, False)],
)  # fmt: skip
def test_what_bfloat16_alone_may_do_is_told(dtype, agreement, divergence, is_told):
    numerics = None
    if dtype is not None:
        numerics = Numerics(dtype, "as stored", "many", dtype, "9.0", "0.1.0", "2.11", "3.6")
    found = Accuracy(9, agreement, divergence, 0.1, 2.0, 2.0, "decodes", 32)
    shown = Report("s", "r", (found,), numerics).describe(Bound())
    assert ("note        activations are rounded to bfloat16" in shown) == is_told


@pytest.mark.parametrize("form", [awq(32), float8(blocks=True)], ids=["awq", "fp8"])
def test_quantised_weights_in_float32_are_their_own_reference(tmp_path, source, form):
    folder = write_quantized(source, tmp_path / "q", form)
    for against in ("", str(plain_beside(folder))):
        report = check_accuracy(config(folder), TEXT, positions=150, against=against)
        (found,) = report.readings
        assert (found.agreement, found.divergence) == (1.0, 0.0)
        assert found.perplexity == found.reference_perplexity
        assert found.keeps(Bound(agreement=1.0, divergence=0.0))
    assert form.config["quant_method"] in report.served


def test_rounding_is_seen_and_held_to_its_bound(source):
    seen = []
    asked = config(source, quant_type="fp8")
    report = check_accuracy(asked, TEXT, positions=500, progress=seen.append)
    (found,) = report.readings
    assert sum(seen) == found.positions == 500
    assert 0 < found.divergence < 0.05
    assert found.divergence < found.worst_divergence
    assert not found.keeps(Bound(divergence=found.divergence / 2))
    assert not found.keeps(Bound(agreement=1.1, divergence=1.0))
    assert "rounded here" in report.served


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_gpus_kernels_are_compared_over_their_own_caches(tmp_path):
    """In the interpreter: the indices, the token-major caches and the unpacked reference."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from tailrace.engine.device_kv import allocate_kv  # noqa: PLC0415
    from tailrace.kernels.triton_kernels import UnpackedTritonKernels  # noqa: PLC0415

    source = make_tiny_checkpoint(tmp_path / "source", num_hidden_layers=1)
    folder = write_quantized(source, tmp_path / "q", awq(32))
    cpu = torch.device("cpu")

    def allocate(model, blocks, block_tokens):
        return allocate_kv(model, blocks, block_tokens, torch.float32, cpu)

    window = list(TEXT.encode()[:140])
    on_gpu = [
        load_model(path, dtype="float32", kernels=UnpackedTritonKernels(cpu, "float32"))
        for path in (folder, source)
    ]
    found = compare(*on_gpu, [window], Device(cpu, allocate, torch.int32))
    expected = compare(load(folder), load(source), [window], CPU)
    assert found.agreement == expected.agreement
    assert found.divergence == pytest.approx(expected.divergence, rel=1e-3)


def test_4_bits_rounded_to_fp8_are_held_to_the_4_bits(tmp_path, source):
    folder = write_quantized(source, tmp_path / "q", awq(32))
    asked = config(folder, quant_type="fp8", dtype="float32")
    report = check_accuracy(asked, TEXT, positions=500)
    assert report.served.endswith("; read from awq, 4 bits in groups of 32, rounded to FP8")
    assert report.reference.endswith("; read from awq, 4 bits in groups of 32")
    assert 0 < report.first.divergence < 0.05
    stands_for = check_accuracy(asked, TEXT, positions=500, against=str(plain_beside(folder)))
    assert stands_for.readings == report.readings


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_on_a_gpu_too_with_every_row_rounded(tmp_path, monkeypatch):
    """In the interpreter: one copy in FP8 serves both readings, the reference has the 4 bits."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from tailrace.engine import cuda_setup  # noqa: PLC0415

    exact_float8(monkeypatch)
    monkeypatch.setattr(cuda_setup, "load_device", lambda _: torch.device("cpu"))
    source = make_tiny_checkpoint(tmp_path / "source", num_hidden_layers=1)
    folder = write_quantized(source, tmp_path / "q", awq(32))
    settings = {"gpus": (0,), "dtype": "float16", "fp8_activations": "all"}
    with pytest.raises(ConfigError, match=r"no layer multiplies in FP8.*and of those in 4 bits"):
        check_accuracy(config(folder, **settings), TEXT, positions=80)
    asked = config(folder, quant_type="fp8", prefill_weights="same", **settings)
    report = check_accuracy(asked, TEXT, positions=80)
    assert "FP8 by channel" in report.served
    assert "4 bits in groups of 32, rounded to FP8" in report.served
    assert "rounded" not in report.reference
    assert all(0.0 < found.divergence < 0.05 for found in report.readings)
    assert report.numerics.weights == "rounded to FP8"
    with pytest.raises(ConfigError, match="has rounded the checkpoint's 4 bits to FP8"):
        check_accuracy(replace(asked, prefill_weights="fp8"), TEXT, positions=80)
    with pytest.raises(ConfigError, match="--decode-kernels hopper: .* dimensions a head"):
        check_accuracy(replace(asked, decode_kernels="hopper"), TEXT, positions=80)


@pytest.mark.parametrize(
    ("tokens", "positions", "sizes"),
    [
        (400, 1, [2]),
        (400, 399, [400]),
        (3100, 1024, [1025]),
        (3100, 1025, [514, 513]),
        (9000, 2500, [835, 834, 834]),
    ],
)
def test_windows_hold_the_positions_and_an_answer_each(tokens, positions, sizes):
    windows = cut_windows(list(range(tokens)), positions)
    assert [len(window) for window in windows] == sizes
    assert max(sizes) <= WINDOW_TOKENS + 1
    starts = [window[0] for window in windows]
    assert starts[0] == 0
    # No position is counted twice, and the last window ends where the text does, or nearly.
    assert all(b - a >= size for a, b, size in zip(starts, starts[1:], sizes, strict=False))
    if len(windows) > 1:
        assert tokens - windows[-1][-1] <= len(windows)


@pytest.mark.parametrize(("tokens", "positions"), [(100, 100), (100, 0), (2050, 2049)])
def test_a_text_that_is_too_short_is_refused(tokens, positions):
    with pytest.raises(ConfigError, match=f"--positions {positions}.*the text has {tokens} tokens"):
        cut_windows(list(range(tokens)), positions)


def test_models_of_two_vocabularies_are_not_compared(tmp_path, source):
    other = make_tiny_checkpoint(tmp_path / "other", vocab_size=300)
    with pytest.raises(ConfigError, match="its vocabulary of 300 is not that of .*, 259"):
        check_accuracy(config(source), TEXT, positions=10, against=str(other))


def test_tokenizers_that_differ_are_refused(tmp_path, source):
    other = make_tiny_checkpoint(tmp_path / "other")
    file = other / "tokenizer.json"
    # Two bytes change places.
    text = file.read_text().replace('"a":97', '"a":98').replace('"b":98', '"b":97')
    swapped = text.replace('"a": 97', '"a": 98x').replace('"b": 98', '"b": 97').replace("98x", "98")
    assert swapped != file.read_text()
    file.write_text(swapped)
    with pytest.raises(ConfigError, match="its tokenizer cuts the text differently"):
        check_accuracy(config(source), TEXT, positions=10, against=str(other))


def test_a_window_longer_than_the_models_context_is_not_asked_for(tmp_path):
    short = make_tiny_checkpoint(tmp_path / "short", max_position_embeddings=128)
    found = check_accuracy(config(short), TEXT, positions=1000).first
    assert found.positions == 1000
    assert found.agreement == 1.0


def test_the_bound_is_the_stated_one():
    assert (Bound().agreement, Bound().divergence) == (0.99, 0.005)
    assert replace(Bound(), agreement=0.5).divergence == 0.005


@pytest.fixture
def command(tmp_path, source, monkeypatch, capsys):
    """The command in this process; returns its exit status and what it printed."""
    # It would pin this process's threads, for good.
    monkeypatch.setattr("tailrace.engine.setup.pin_threads", lambda _: None)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.app(["check-accuracy", str(source), "--text", str(text), *arguments])
        return ended.value.code, capsys.readouterr().out

    return run


def test_the_command_says_what_it_found_and_whether_the_bound_is_kept(command):
    asked = ("--positions", "300", "--quant-type", "fp8")
    status, shown = command(*asked, "--min-agreement", "0.5", "--max-divergence", "1")
    assert (status, "positions   300" in shown, "bound       kept" in shown) == (0, True, True)
    status, shown = command(*asked, "--max-divergence", "1e-9")
    assert (status, "bound       MISSED" in shown) == (1, True)


def test_the_commands_text_must_be_long_enough(command, source):
    with pytest.raises(ConfigError, match="--positions 20000.*give a longer one with --text"):
        cli.app(["check-accuracy", str(source), "--text", str(source.parent / "text.txt")])


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("copy", "most"), [("fp8", 0.05), ("int8", 0.005)])
def test_a_copy_for_prompts_is_what_the_text_is_read_by(tmp_path, monkeypatch, copy, most):
    """On a GPU that is none: too few positions to be recorded, in the interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from tailrace.engine import cuda_setup  # noqa: PLC0415

    exact_float8(monkeypatch)
    monkeypatch.setattr(cuda_setup, "load_device", lambda _: torch.device("cpu"))
    source = make_tiny_checkpoint(tmp_path, num_hidden_layers=1)
    asked = config(source, prefill_weights=copy, gpus=(0,), dtype="float16")
    # More rows than an FP8 copy takes without rounding them.
    seen = []
    report = check_accuracy(asked, TEXT, positions=80, progress=seen.append)
    assert f"for prompts {copy.replace('fp', 'FP')} by channel" in report.served
    prompts, decodes = report.readings
    assert [(found.reading, found.rows, found.positions) for found in report.readings] == [
        ("prompts", 80, 80),
        ("decodes", 27, 80),
    ]
    assert sum(seen) == 160
    assert 0.0 < prompts.divergence < most
    # By the weights as they are, which are their own reference.
    assert (decodes.agreement, decodes.divergence) == (1.0, pytest.approx(0.0, abs=1e-9))
    assert "not recorded: fewer than" in record(asked, report, against="")
    with pytest.raises(ConfigError, match="weights are in float16 already, so no copy is made"):
        check_accuracy(replace(asked, prefill_weights="bf16"), TEXT, positions=80)


def test_what_could_not_be_recorded_is_found_before_anything_is_measured(
    tmp_path, source, monkeypatch
):
    def load(*_):
        raise AssertionError("models are loaded")

    monkeypatch.setenv("TAILRACE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tailrace.engine.accuracy._load", load)
    asked = config(source, prefill_weights="fp8", gpus=(0,), dtype="float16")
    file = file_of(fingerprint(source))
    file.parent.mkdir(parents=True)
    file.write_bytes(b"{")

    def check(config=asked, positions=LEAST_POSITIONS, against=""):
        check_accuracy(config, TEXT * 10, positions=positions, against=against)

    with pytest.raises(ConfigError, match="accuracy record .*truncated"):
        check()
    # Who records nothing does not care.
    unrecorded = {"config": replace(asked, prefill_weights="same")}, {"positions": 100}
    for others in (*unrecorded, {"against": str(source)}):
        with pytest.raises(AssertionError, match="models are loaded"):
            check(**others)
    file.write_bytes(b'{"format": 1}')  # another version's
    with pytest.raises(AssertionError, match="models are loaded"):
        check()


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_served_models_kv_is_rounded_as_it_is_served_and_its_references_is_not(
    tmp_path, monkeypatch
):
    """On a GPU that is none, in the interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from tailrace.engine import cuda_setup  # noqa: PLC0415

    exact_float8(monkeypatch)
    monkeypatch.setattr(cuda_setup, "load_device", lambda _: torch.device("cpu"))
    source = make_tiny_checkpoint(tmp_path, num_hidden_layers=1)
    asked = config(source, gpus=(0,), dtype="float16")
    exact = check_accuracy(asked, TEXT, positions=40)
    rounded = check_accuracy(replace(asked, kv_cache_dtype="fp8"), TEXT, positions=40)
    for reading, plain in zip(rounded.readings, exact.readings, strict=True):
        assert plain.divergence == pytest.approx(0.0, abs=1e-9)
        assert 1e-9 < reading.divergence < 0.05
        assert reading.reference_perplexity == plain.reference_perplexity
    assert (exact.numerics.kv_dtype, rounded.numerics.kv_dtype) == ("float16", "float8")
    assert rounded.numerics.fp8_activations == "many"


@pytest.mark.parametrize(
    ("asked", "why"),
    [("auto", "name the copy to measure"), ("fp8", "use auto or same, or name a GPU")],
)
def test_the_copy_must_be_named_and_have_a_gpu(command, source, asked, why):
    with pytest.raises(ConfigError, match=why):
        cli.app(["check-accuracy", str(source), "--prefill-weights", asked])
