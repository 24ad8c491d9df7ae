import json
import tracemalloc

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.checkpoint.tensorfile import BLOCK_BYTES, TensorReader, file_bytes, tensor_blocks, view_key
from halfstep.errors import SettingError
from tree_cases import bits, same, tensors


def write(path, named):
    """Write these tensors to a file."""
    path.write_bytes(b"".join(bytes(block) for block in tensor_blocks(named)))
    return path


def read(path):
    """Read all tensors of a file."""
    with TensorReader(path) as reader:
        return {name: reader.read(name) for name in reader}


@given(st.dictionaries(st.text(max_size=8).filter(lambda name: name != "__metadata__"), tensors(), max_size=5))
def test_tensors_round_trip_bit_for_bit(tmp_path_factory, named):
    """Every dtype, shape and stride is restored with the same bits, under the same name, in the same order."""
    path = write(tmp_path_factory.mktemp("file") / "x.safetensors", named)
    assert same(read(path), named)
    assert path.stat().st_size == file_bytes(named)


def test_the_safetensors_package_reads_what_we_write(tmp_path):
    """Our file is a plain safetensors file for other readers."""
    named = {
        "b": torch.arange(5, dtype=torch.int8),
        "a": torch.randn(3, 2),
        "half": torch.randn(4).bfloat16(),
        "e": torch.empty(0, 3),
    }
    path = write(tmp_path / "x.safetensors", named)
    assert all(same(tensor, named[name]) for name, tensor in safetensors.torch.load_file(path).items())
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(named)


def test_we_read_what_the_safetensors_package_writes(tmp_path):
    """A file that Halfstep did not write is read the same way."""
    named = {"b": torch.arange(5, dtype=torch.int16), "a": torch.randn(3, 2)}
    safetensors.torch.save_file(named, tmp_path / "x.safetensors")
    back = read(tmp_path / "x.safetensors")
    assert all(same(back[name], named[name]) for name in named)


def test_dtypes_without_a_name_in_the_format_are_readable_elsewhere(tmp_path):
    """Complex tensors are pairs of reals for other readers and complex again for us."""
    z = torch.tensor([[1 + 2j, 3 - 4j]])
    path = write(tmp_path / "x.safetensors", {"z": z, "conj": z.conj(), "neg": z.conj().imag})
    assert safetensors.torch.load_file(path)["z"].tolist() == [[[1, 2], [3, -4]]]
    back = read(path)
    assert same(back["z"], z)
    assert torch.equal(back["conj"], z.conj())
    assert back["neg"].tolist() == [[-2, 4]]


def test_every_tensor_starts_at_a_multiple_of_its_element_size(tmp_path):
    """Readers that map the file into memory get aligned tensors."""
    named = {
        "a": torch.ones(3, dtype=torch.uint8),
        "b": torch.ones(3, dtype=torch.float64),
        "c": torch.ones(1, dtype=torch.int16),
    }
    raw = write(tmp_path / "x", named).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert length % 8 == 0
    for name, tensor in named.items():
        assert header[name]["data_offsets"][0] % tensor.itemsize == 0


def test_writing_a_contiguous_tensor_does_not_copy_it():
    """A large contiguous tensor on the CPU is written from its own memory, in blocks."""
    big = torch.zeros(BLOCK_BYTES + 100, dtype=torch.uint8)
    tracemalloc.start()
    sizes = [len(block) for block in tensor_blocks({"big": big})][1:]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sizes == [BLOCK_BYTES, 100]
    assert peak < BLOCK_BYTES / 8


def test_view_key_is_equal_only_for_the_same_view_of_the_same_memory():
    """Slices, transposes, reinterpretations and copies of a tensor have different keys."""
    x = torch.zeros(2, 2)
    views = [x[0], x.t(), x.view(torch.int32), x.reshape(4), x.clone()]
    assert view_key(x) == view_key(x.detach())
    assert len({view_key(v) for v in [x, *views]}) == 6
    assert view_key(a := torch.empty(0)) != view_key(b := torch.empty(0)), (a, b)


def raw_file(header, data=b""):
    """The bytes of a file with that header and data."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


FOUR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
LYING_ENTRIES = [
    None, {}, FOUR | {"dtype": "F128"}, FOUR | {"dtype": []}, FOUR | {"shape": [2]}, FOUR | {"shape": [-1]},
    FOUR | {"shape": "x"}, FOUR | {"data_offsets": [0, 8], "shape": [2]}, FOUR | {"data_offsets": [-4, 0]},
    FOUR | {"data_offsets": [0]}, FOUR | {"shape": [2**40, 2**40]},
]  # fmt: skip


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"123", b"\xff" * 20, b"\x04" + bytes(7) + b"nope", b"\x02" + bytes(7) + b"\xff\xff", raw_file([1]),
        raw_file({"__metadata__": 1}), raw_file({"__metadata__": {"halfstep.dtypes": "["}}),
        raw_file({"a": FOUR}), raw_file({"a": FOUR}, bytes(8)), raw_file({"a": FOUR, "b": FOUR}, bytes(4)),
        *(raw_file({"a": entry}, bytes(4)) for entry in LYING_ENTRIES),
    ],
)  # fmt: skip
def test_a_file_with_an_invalid_header_is_rejected_when_it_is_opened(tmp_path, raw):
    """A foreign, truncated or lying header raises one clear error before memory is allocated for any tensor."""
    (tmp_path / "x").write_bytes(raw)
    with pytest.raises(SettingError, match=r"x .*; it was not written by Halfstep, or it changed later"):
        TensorReader(tmp_path / "x")


@pytest.mark.parametrize(
    ("entry", "dtypes"),
    [
        (FOUR | {"dtype": "F8_E8M0", "shape": [4]}, {}),  # known to newer versions of the library only
        (FOUR, {"a": "complex64"}),  # no last dimension of 2
        (FOUR | {"dtype": "F16", "shape": [2]}, {"a": "complex64"}),
        (FOUR | {"shape": []}, {"a": "float8_e8m0fnu"}),
        (FOUR | {"dtype": "U8", "shape": [4]}, {"a": "float32"}),
        (FOUR | {"dtype": "U8", "shape": [4]}, {"a": ["float8_e8m0fnu"]}),
    ],
)
def test_a_dtype_that_halfstep_does_not_write_is_rejected(tmp_path, entry, dtypes):
    """A tensor whose stored dtype, or whose recorded original dtype, cannot be Halfstep's is rejected."""
    metadata = {"halfstep.dtypes": json.dumps(dtypes)}
    (tmp_path / "x").write_bytes(raw_file({"__metadata__": metadata, "a": entry}, bytes(4)))
    with (
        pytest.raises(SettingError, match=r"('a'|not a valid).*not written by Halfstep"),
        TensorReader(tmp_path / "x") as reader,
    ):
        reader.read("a")


def test_a_name_that_is_not_in_the_file_is_rejected(tmp_path):
    """Asking for a missing tensor raises an error that names it."""
    path = write(tmp_path / "x", {"a": torch.ones(1)})
    with TensorReader(path) as reader, pytest.raises(SettingError, match="has no tensor 'b'"):
        reader.read("b")


def test_unrelated_metadata_is_ignored(tmp_path):
    """Metadata under our key that is not a dictionary does not change a dtype."""
    (tmp_path / "x").write_bytes(raw_file({"__metadata__": {"halfstep.dtypes": "[]"}, "a": FOUR}, bytes(4)))
    assert read(tmp_path / "x")["a"].tolist() == [0.0]


def test_a_file_that_shrinks_while_it_is_read_is_rejected(tmp_path):
    """A truncated file raises an error instead of returning part of a tensor or killing the process."""
    path = write(tmp_path / "x", {"a": torch.ones(100_000)})
    with TensorReader(path) as reader:
        with path.open("r+b") as file:
            file.truncate(1000)
        with pytest.raises(SettingError, match=r"shrank from 400\d\d\d to 1000 bytes while it was read"):
            reader.read("a")


def test_a_tensor_does_not_depend_on_its_file(tmp_path):
    """Tensors are copied out of the memory map: overwriting the file in place later does not change them."""
    path = write(tmp_path / "x", {"a": torch.ones(1000)})
    back = read(path)["a"]
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(back, torch.ones(1000))


def test_complex32_round_trips(tmp_path):
    """A dtype that torch calls experimental is restored."""
    z = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float16).view(torch.complex32)
    assert bits(read(write(tmp_path / "x", {"z": z}))["z"]) == bits(z)


@pytest.mark.gpu
def test_a_tensor_on_a_gpu_is_written_and_read_there(tmp_path):
    """A strided GPU tensor round-trips and can be read to the GPU."""
    x = torch.randn(5, 3, device="cuda").t()
    with TensorReader(write(tmp_path / "x", {"x": x})) as reader:
        back = reader.read("x", "cuda")
    assert back.is_cuda
    assert torch.equal(back, x)
