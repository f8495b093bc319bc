import struct

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.errors import ModelError
from tailrace.models.gguf_file import GgufFile
from tests.models.gguf_maker import Kind, gguf_of, tiny_source, write_gguf

RNG = np.random.default_rng(3)


def half(raw):
    return float(np.frombuffer(raw, np.float16)[0])


def decode_q4_0(block):
    scale = half(block[:2])
    low = [(byte & 15) - 8 for byte in block[2:]]
    high = [(byte >> 4) - 8 for byte in block[2:]]
    return [scale * value for value in low + high]


def decode_q4_1(block):
    scale, least = half(block[:2]), half(block[2:4])
    nibbles = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
    return [scale * value + least for value in nibbles]


def decode_q8_0(block):
    return [half(block[:2]) * value for value in np.frombuffer(block[2:], np.int8).tolist()]


def fifth_bits(block, at):
    """The highest bit of 32 values, as one little-endian number holds them."""
    word = int.from_bytes(block[at : at + 4], "little")
    return [(word >> i & 1) << 4 for i in range(32)]


def decode_q5_0(block):
    nibbles = [byte & 15 for byte in block[6:]] + [byte >> 4 for byte in block[6:]]
    return [
        half(block[:2]) * ((low | high) - 16)
        for low, high in zip(nibbles, fifth_bits(block, 2), strict=True)
    ]


def decode_q5_1(block):
    nibbles = [byte & 15 for byte in block[8:]] + [byte >> 4 for byte in block[8:]]
    return [
        half(block[:2]) * (low | high) + half(block[2:4])
        for low, high in zip(nibbles, fifth_bits(block, 4), strict=True)
    ]


def scales_and_least(packed):
    """Eight pairs of 6-bit numbers in 12 bytes: of the last four pairs, two bits lie elsewhere."""
    pairs = [(packed[i] & 63, packed[i + 4] & 63) for i in range(4)]
    for i in range(4):
        low, top = packed[i + 8], (packed[i] >> 6, packed[i + 4] >> 6)
        pairs.append((low & 15 | top[0] << 4, low >> 4 | top[1] << 4))
    return pairs


def decode_k(block, high, low):
    """256 values in runs of 32, each with a scale and a least value of 6 bits."""
    scale, least = half(block[:2]), half(block[2:4])
    values = []
    for run, (steps, lift) in enumerate(scales_and_least(block[4:16])):
        for i in range(32):
            byte = low[32 * (run // 2) + i]
            code = byte >> 4 if run % 2 else byte & 15
            if high:
                code |= (high[i] >> run & 1) << 4
            values.append(scale * steps * code - least * lift)
    return values


def decode_q4_k(block):
    return decode_k(block, b"", block[16:])


def decode_q5_k(block):
    return decode_k(block, block[16:48], block[48:])


def decode_q6_k(block):
    """256 values: four low bits, two high bits, an 8-bit scale for every 16, one scale for all."""
    scale = half(block[208:210])
    scales = np.frombuffer(block[192:208], np.int8).tolist()
    values = [0.0] * 256
    for start in (0, 128):
        low = block[start // 2 : start // 2 + 64]
        high = block[128 + start // 4 : 128 + start // 4 + 32]
        for quarter in range(4):
            for i in range(32):
                nibble = low[i + 32 * (quarter % 2)]
                nibble = nibble >> 4 if quarter >= 2 else nibble & 15
                six_bits = nibble | ((high[i] >> (2 * quarter)) & 3) << 4
                at = start + 32 * quarter + i
                values[at] = scale * scales[at // 16] * (six_bits - 32)
    return values


BLOCKS = {
    Kind.Q4_0: (18, 32, decode_q4_0, (0,)),
    Kind.Q4_1: (20, 32, decode_q4_1, (0, 2)),
    Kind.Q8_0: (34, 32, decode_q8_0, (0,)),
    Kind.Q5_0: (22, 32, decode_q5_0, (0,)),
    Kind.Q5_1: (24, 32, decode_q5_1, (0, 2)),
    Kind.Q4_K: (144, 256, decode_q4_k, (0, 2)),
    Kind.Q5_K: (176, 256, decode_q5_k, (0, 2)),
    Kind.Q6_K: (210, 256, decode_q6_k, (208,)),
}


def random_blocks(kind, rows, blocks):
    """Random bytes, but for the scales: sane half-precision numbers."""
    size, _, _, scales_at = BLOCKS[kind]
    raw = RNG.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in scales_at:
        scales = RNG.normal(size=(rows, blocks, 1)).astype(np.float16)
        raw[:, :, at : at + 2] = scales.view(np.uint8)
    return raw


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_quantised_blocks_are_read_as_their_format_defines(tmp_path, kind):
    size, values_each, decode, _ = BLOCKS[kind]
    raw = random_blocks(kind, rows=3, blocks=2)
    file = write_gguf(tmp_path / "a.gguf", {}, {"w": raw.reshape(3, 2 * size)}, kind)
    expected = [[value for block in row for value in decode(block.tobytes())] for row in raw]
    got = GgufFile(file).read("w")
    assert got.shape == (3, 2 * values_each)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, np.array(expected), rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(got, gguf.quants.dequantize(raw.reshape(3, 2 * size), kind))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
def test_plain_floats_are_read_exactly(tmp_path, kind):
    # Eight bits of precision, which all three hold.
    values = RNG.integers(-255, 256, size=(5, 7)).astype(np.float32) / 64
    file = write_gguf(tmp_path / "a.gguf", {}, {"w": values, "v": values[0]}, kind)
    np.testing.assert_array_equal(GgufFile(file).read("w"), values)
    np.testing.assert_array_equal(GgufFile(file).read("v"), values[0])


def test_the_header_is_read_as_the_gguf_package_reads_it(tmp_path):
    file = gguf_of(tiny_source(tmp_path / "hf"), tmp_path / "a.gguf", kind=Kind.Q8_0)
    ours, theirs = GgufFile(file), gguf.GGUFReader(file)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    assert len(ours.tensors) == len(theirs.tensors) > 10
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.offset, mine.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))


@pytest.mark.parametrize("kind", [Kind.TQ1_0, Kind.Q3_K], ids=lambda kind: kind.name)
def test_an_unsupported_type_is_named_with_its_tensor(tmp_path, kind):
    blocks = np.zeros((2, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    file = write_gguf(tmp_path / "a.gguf", {}, {"blk.0.w": blocks}, kind)
    with pytest.raises(ModelError, match=rf"blk\.0\.w has type {kind.name}.*Q6_K"):
        GgufFile(file)


def test_values_that_are_not_finite_are_refused(tmp_path):
    values = np.array([[1.0, np.inf]], np.float32)
    file = GgufFile(write_gguf(tmp_path / "a.gguf", {}, {"w": values}))
    with pytest.raises(ModelError, match="tensor w holds values that are no finite"):
        file.read("w")


def test_a_file_cut_after_it_was_opened_is_refused(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", {}, {"w": np.ones((64, 64), np.float32)})
    file = GgufFile(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelError, match="tensor w ends early"):
        file.read("w")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"nowhere\.gguf: No such file"):
        GgufFile(tmp_path / "nowhere.gguf")


def test_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(ModelError, match="not a GGUF file"):
        GgufFile(tmp_path / "a.gguf")


# --- crafted headers -------------------------------------------------------------------------


def text(value):
    return struct.pack("<Q", len(value)) + value


def header(*, tensors=1, pairs=0, version=3, body=b""):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + body


def entry(name=b"w", dims=(32,), kind=0, offset=0):
    packed = b"".join(struct.pack("<Q", size) for size in dims)
    return text(name) + struct.pack("<I", len(dims)) + packed + struct.pack("<IQ", kind, offset)


DATA = bytes(512)
BAD_FILES = {
    "empty": (b"", "the magic needs 4 bytes"),
    "magic only": (b"GGUF", "the version needs 4 bytes"),
    "version": (header(version=1), "GGUF version 1 is not supported"),
    "big endian": (header(version=3 << 24), "version 50331648 is not supported"),
    "huge pair count": (header(pairs=2**63), "a metadata key needs 8 bytes"),
    "huge tensor count": (header(tensors=2**63), "a tensor's name needs 8 bytes"),
    "huge key": (header(pairs=1, body=struct.pack("<Q", 2**62)), "a metadata key of 4611"),
    "huge string": (
        header(pairs=1, body=text(b"k") + struct.pack("<IQ", 8, 2**62)),
        "metadata 'k' needs 4611686018427387904 bytes",
    ),
    "huge array": (
        header(pairs=1, body=text(b"k") + struct.pack("<IIQ", 9, 4, 2**61)),
        "metadata 'k' needs 9223372036854775808 bytes",
    ),
    "huge string array": (
        header(pairs=1, body=text(b"k") + struct.pack("<IIQ", 9, 8, 2**61)),
        "metadata 'k' needs 8 bytes",
    ),
    "nested arrays": (
        header(pairs=1, body=text(b"k") + struct.pack("<IIQ", 9, 9, 1) + DATA),
        "metadata 'k' has the unknown value type 9",
    ),
    "value type": (
        header(pairs=1, body=text(b"k") + struct.pack("<I", 99)),
        "unknown value type 99",
    ),
    "not UTF-8": (header(pairs=1, body=text(b"\xff\xfe")), "a metadata key is not UTF-8"),
    "key twice": (
        header(pairs=2, body=(text(b"k") + struct.pack("<IB", 0, 1)) * 2),
        "metadata key 'k' appears twice",
    ),
    "alignment": (
        header(pairs=1, body=text(b"general.alignment") + struct.pack("<II", 4, 3) + entry()),
        "general.alignment is 3, must be a power of two",
    ),
    "offset past the end": (header(body=entry(offset=4096) + DATA), "tensor w .* ends at byte"),
    "offset that wraps in 64 bits": (
        header(body=entry(offset=2**64 - 64) + DATA),
        "tensor w .* ends at byte 18446744073709551",
    ),
    "shape that wraps in 64 bits": (
        header(body=entry(dims=(2**33, 2**33)) + DATA),
        "tensor w .* ends at byte",
    ),
    "no values": (header(body=entry(dims=(32, 0)) + DATA), "impossible shape"),
    "no dimensions": (header(body=entry(dims=()) + DATA), "impossible shape"),
    "many dimensions": (
        header(body=text(b"w") + struct.pack("<I", 2**31)),
        "tensor w has 2147483648 dimensions, at most 4",
    ),
    "partial block": (header(body=entry(dims=(33,), kind=2) + DATA), "33 values do not divide"),
    "type": (header(body=entry(kind=4242) + DATA), "tensor w has type number 4242"),
    "overlap": (
        header(tensors=2, body=entry(b"a", (128,)) + entry(b"b", (128,)) + bytes(576)),
        "tensors claim 1024 bytes, and 5.. follow the header: they overlap",
    ),
    "tensor twice": (header(tensors=2, body=entry() * 2 + DATA), "tensor w appears twice"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_lying_header_is_refused_by_name(tmp_path, name):
    content, message = BAD_FILES[name]
    file = tmp_path / "a.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        GgufFile(file)


def test_a_truthful_crafted_header_is_read(tmp_path):
    """The control of the cases above: the same helpers, no lie."""
    (tmp_path / "a.gguf").write_bytes(header(body=entry(dims=(32, 2)) + DATA))
    assert GgufFile(tmp_path / "a.gguf").read("w").shape == (2, 32)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    metadata = {"k": ["a", "bc"], "n": 7, "x": [1, 2, 3], "general.alignment": 32}
    tensors = {"w": np.ones((2, 32), np.float32), "v": np.ones(4, np.float32)}
    return write_gguf(tmp_path_factory.mktemp("gguf") / "a.gguf", metadata, tensors)


@given(data=st.data())
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_damage_anywhere_is_an_error_or_harmless(small_file, tmp_path, data):
    """Cut anywhere, overwrite a few bytes: a `ModelError` at worst, never another exception."""
    content = bytearray(small_file.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.sampled_from([0, 1, 8, 9, 127, 128, 255]))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        file = GgufFile(damaged)
        for name, tensor in file.tensors.items():
            assert file.read(name).shape == tensor.shape
    except ModelError:
        pass
