"""Batch files: one bad line fails alone, torn lines are repaired, merges keep the order."""

import json

import pytest

from polyjax.batch_file import ResultFile, Shard, merge, read_requests, result_line
from polyjax.core.errors import ConfigError


def request(custom_id, **changes):
    line = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "x"},
    }
    return json.dumps({**line, **changes})


def write(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_bad_lines_carry_their_reason_and_good_ones_their_body(tmp_path):
    path = write(
        tmp_path / "in.jsonl",
        request("a"),
        "{broken",
        "",
        request("d", method="GET"),
        json.dumps({"custom_id": "e"}),
        request("f", body=[1]),
        "[" * 100_000,
    )
    lines = list(read_requests(path, Shard()))
    assert [line.number for line in lines] == [0, 1, 3, 4, 5, 6]
    assert json.loads(lines[0].body) == {"prompt": "x"}
    assert [line.custom_id for line in lines] == ["a", None, "d", "e", "f", None]
    assert [line.error is None for line in lines] == [True, False, False, False, True, False]


def test_invalid_utf8_is_one_bad_line(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"custom_id": "\xff"}\n' + request("b").encode() + b"\n")
    first, second = read_requests(path, Shard())
    assert first.error is not None and second.error is None


def test_shards_share_out_every_line_once(tmp_path):
    path = write(tmp_path / "in.jsonl", *(request(str(i)) for i in range(10)))
    seen = [line.number for i in range(3) for line in read_requests(path, Shard(i, 3))]
    assert sorted(seen) == list(range(10))


@pytest.mark.parametrize("text", ["3/3", "1", "a/2", "-1/2", "0/0", "1/"])
def test_nonsense_shards_are_refused(text):
    with pytest.raises(ConfigError, match="--shard"):
        Shard.parse(text)


def results(path, lines, *numbers):
    file = ResultFile(path)
    for line in lines:
        if line.number in numbers and line.number not in file.done:
            file.append(line, result_line(line, 200, {"n": line.number}))
    file.close()


@pytest.mark.parametrize("cut", range(1, 40, 7))
def test_a_torn_last_line_is_cut_off_and_asked_again(tmp_path, cut):
    lines = list(read_requests(write(tmp_path / "in", *map(request, "abc")), Shard()))
    path = tmp_path / "out.jsonl"
    results(path, lines, 0, 1)
    path.write_bytes(path.read_bytes()[:-cut])
    resumed = ResultFile(path)
    resumed.close()
    assert resumed.done == {0}
    results(path, lines, 0, 1, 2)
    ids = [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]
    assert ids == ["a", "b", "c"]


def test_an_output_that_is_something_else_is_left_alone(tmp_path):
    path = write(tmp_path / "notes.txt", "dear diary")
    with pytest.raises(ConfigError, match="no batch result"):
        ResultFile(path)
    assert path.read_text() == "dear diary\n"


def test_a_merge_keeps_the_order_and_refuses_what_is_torn_or_double(tmp_path):
    lines = list(read_requests(write(tmp_path / "in", *map(request, "abcde")), Shard()))
    even, odd = tmp_path / "even", tmp_path / "odd"
    results(even, lines, 4, 0, 2)
    results(odd, lines, 3, 1)
    assert merge([odd, even], tmp_path / "all") == 5
    merged = [json.loads(line)["custom_id"] for line in (tmp_path / "all").read_text().splitlines()]
    assert merged == list("abcde")
    with pytest.raises(ConfigError, match="repeated"):
        merge([even, even], tmp_path / "twice")
    odd.write_bytes(odd.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="torn"):
        merge([odd, even], tmp_path / "torn")
    assert not (tmp_path / "twice").exists() and not (tmp_path / "torn").exists()
