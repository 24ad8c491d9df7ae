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
    """The file of these tensors."""
    path.write_bytes(b"".join(bytes(block) for block in tensor_blocks(named)))
    return path


def read(path):
    """All tensors of a file."""
    with TensorReader(path) as reader:
        return {name: reader.read(name) for name in reader}


@given(st.dictionaries(st.text(max_size=8).filter(lambda name: name != "__metadata__"), tensors(), max_size=5))
def test_tensors_survive_bit_for_bit(tmp_path_factory, named):
    """Every dtype, shape and stride comes back with the same bits, under the same name, in the same order."""
    path = write(tmp_path_factory.mktemp("file") / "x.safetensors", named)
    assert same(read(path), named)
    assert path.stat().st_size == file_bytes(named)


def test_the_safetensors_package_reads_what_we_write(tmp_path):
    """The file is a plain safetensors file for everyone else."""
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
    """A file from elsewhere is read the same way."""
    named = {"b": torch.arange(5, dtype=torch.int16), "a": torch.randn(3, 2)}
    safetensors.torch.save_file(named, tmp_path / "x.safetensors")
    back = read(tmp_path / "x.safetensors")
    assert all(same(back[name], named[name]) for name in named)


def test_dtypes_the_format_lacks_have_a_readable_form(tmp_path):
    """Complex numbers are pairs for other readers, and complex again for us."""
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


def test_writing_copies_nothing_that_is_contiguous():
    """A large tensor on the CPU is written from its own memory, in blocks."""
    big = torch.zeros(BLOCK_BYTES + 100, dtype=torch.uint8)
    tracemalloc.start()
    sizes = [len(block) for block in tensor_blocks({"big": big})][1:]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sizes == [BLOCK_BYTES, 100]
    assert peak < BLOCK_BYTES / 8


def test_only_the_same_view_of_the_same_memory_is_the_same():
    """Slices, transposes and reinterpretations of one memory are tensors of their own."""
    x = torch.zeros(2, 2)
    views = [x[0], x.t(), x.view(torch.int32), x.reshape(4), x.clone()]
    assert view_key(x) == view_key(x.detach())
    assert len({view_key(v) for v in [x, *views]}) == 6
    assert view_key(a := torch.empty(0)) != view_key(b := torch.empty(0)), (a, b)


def header(document, data=b""):
    """A file with that header and data."""
    text = json.dumps(document).encode()
    return len(text).to_bytes(8, "little") + text + data


FOUR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"123", b"\xff" * 20, header([1]), header({"__metadata__": 1}), b"\x04" + bytes(7) + b"nope",
        header({"__metadata__": {"halfstep.dtypes": "["}}), b"\x02" + bytes(7) + b"\xff\xff",
    ],
)  # fmt: skip
def test_a_file_without_a_proper_header_is_refused(tmp_path, raw):
    """Anything but a safetensors file ends in one clear error."""
    (tmp_path / "x").write_bytes(raw)
    with pytest.raises(SettingError, match="not written by Halfstep"):
        TensorReader(tmp_path / "x")


@pytest.mark.parametrize(
    "entry",
    [
        None, {}, FOUR | {"dtype": "F128"}, FOUR | {"dtype": []}, FOUR | {"shape": [2]}, FOUR | {"shape": [-1]},
        FOUR | {"shape": "x"}, FOUR | {"data_offsets": [0, 8], "shape": [2]}, FOUR | {"data_offsets": [-4, 0]},
        FOUR | {"data_offsets": [0]}, FOUR | {"shape": [2**40, 2**40]},
    ],
)  # fmt: skip
def test_a_place_outside_the_file_is_refused(tmp_path, entry):
    """A header that lies about a tensor is found before any memory is taken for it."""
    (tmp_path / "x").write_bytes(header({"a": entry}, bytes(4)))
    with TensorReader(tmp_path / "x") as reader, pytest.raises(SettingError, match="'a'"):
        reader.read("a")


def test_odd_metadata_of_others_is_harmless(tmp_path):
    """Metadata that only looks like ours does not change a dtype."""
    (tmp_path / "x").write_bytes(header({"__metadata__": {"halfstep.dtypes": "[]"}, "a": FOUR}, bytes(4)))
    assert read(tmp_path / "x")["a"].tolist() == [0.0]


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path):
    """A short read is an error and never a tensor of leftovers."""
    path = write(tmp_path / "x", {"a": torch.ones(100_000)})
    with TensorReader(path) as reader:
        with path.open("r+b") as file:
            file.truncate(1000)
        with pytest.raises(SettingError, match="ended while it was read"):
            reader.read("a")


def test_complex_halves_survive(tmp_path):
    """Even a dtype torch calls experimental comes back."""
    z = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float16).view(torch.complex32)
    assert bits(read(write(tmp_path / "x", {"z": z}))["z"]) == bits(z)


@pytest.mark.gpu
def test_a_tensor_on_a_gpu_is_written_and_read_there(tmp_path):
    """Strided GPU tensors survive, and can be read straight to the GPU."""
    x = torch.randn(5, 3, device="cuda").t()
    with TensorReader(write(tmp_path / "x", {"x": x})) as reader:
        back = reader.read("x", "cuda")
    assert back.is_cuda
    assert torch.equal(back, x)
