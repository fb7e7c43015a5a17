"""Safetensors files: agreement with the format's own library, and every kind of damage."""

import io
import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from polyjax.core.errors import ModelError
from polyjax.io.safetensors import SafetensorsReader, read_header, write_safetensors

TENSORS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "empty": np.zeros((0, 5), np.float16),
    "scalar": np.array(7, np.int64),
}


def written(tmp_path: Path, tensors: dict[str, np.ndarray] = TENSORS) -> Path:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        declared = [(name, array.dtype, array.shape) for name, array in tensors.items()]
        write_safetensors(file, declared, tensors.__getitem__)
    return path


def assert_same(left: np.ndarray, right: np.ndarray) -> None:
    assert left.dtype == right.dtype and left.shape == right.shape
    assert left.tobytes() == right.tobytes()


def test_reads_what_it_wrote(tmp_path: Path) -> None:
    entries, problems = read_header(written(tmp_path))
    assert not problems
    reader = SafetensorsReader(entries)
    assert sorted(reader.names()) == sorted(TENSORS)
    for name, array in TENSORS.items():
        assert reader.shape(name) == array.shape and reader.dtype(name) == array.dtype
        assert_same(reader.read(name), array)


def test_library_reads_what_we_wrote(tmp_path: Path) -> None:
    for name, array in safetensors.numpy.load_file(written(tmp_path)).items():
        assert_same(array, TENSORS[name])


def test_we_read_what_the_library_wrote(tmp_path: Path) -> None:
    path = tmp_path / "theirs.safetensors"
    plain = {k: v for k, v in TENSORS.items() if v.dtype != ml_dtypes.bfloat16}
    safetensors.numpy.save_file(plain, path)
    reader = SafetensorsReader(read_header(path)[0])
    for name, array in plain.items():
        assert_same(reader.read(name), array)


def test_writer_refuses_another_shape_than_declared() -> None:
    declared = [("a", np.dtype(np.float32), (3, 3))]
    with pytest.raises(ValueError, match="declared float32"):
        write_safetensors(io.BytesIO(), declared, lambda _: np.zeros((3, 4), np.float32))


def with_header(tmp_path: Path, header: bytes, data: bytes = b"") -> list[str]:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return read_header(path)[1]


@pytest.mark.parametrize("keep", [0, 5, 8, 40])
def test_cut_off_in_the_header(tmp_path: Path, keep: int) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    assert "cut off" in read_header(path)[1][0]


def test_cut_off_in_the_data_names_the_tensors(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    (problem,) = read_header(path)[1]
    assert "scalar" in problem and "past the end" in problem


def test_file_shrinks_after_its_header_was_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    reader = SafetensorsReader(read_header(path)[0])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match="scalar: the file ended 1 bytes early"):
        reader.read("scalar")


@pytest.mark.parametrize(
    "header, complaint",
    [
        (b"not json", "does not parse"),
        (b"\xff\xfe", "does not parse"),
        (b"[1]", "not a JSON object"),
        (json.dumps({"x": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}).encode(), "F3"),
        (
            json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode(),
            "hold",
        ),
        (
            json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}).encode(),
            "hold",
        ),
        (
            json.dumps({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}).encode(),
            "hold",
        ),
        (json.dumps({"x": {"dtype": "F32", "data_offsets": [0, 4]}}).encode(), "shape"),
        (json.dumps({"x": 3}).encode(), "x: "),
    ],
)
def test_malformed_header(tmp_path: Path, header: bytes, complaint: str) -> None:
    (problem,) = with_header(tmp_path, header, b"\0" * 4)
    assert complaint in problem and "bad.safetensors" in problem


def test_every_bad_tensor_is_listed(tmp_path: Path) -> None:
    header = {
        name: {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]} for name in ("x", "y", "z")
    }
    assert len(with_header(tmp_path, json.dumps(header).encode(), b"\0" * 4)) == 3


def test_absurd_header_length_reads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    assert "not a safetensors file" in read_header(path)[1][0]


def test_missing_file_is_a_problem_not_a_crash(tmp_path: Path) -> None:
    assert read_header(tmp_path / "nowhere.safetensors")[1] == [
        "nowhere.safetensors: No such file or directory"
    ]
