"""Traces: every form of the public files, told by its content; every damage told by file and line."""

from pathlib import Path

import pytest

from legato.errors import ConfigError
from legato.workload.arrival import Part
from legato.workload.trace import read_trace

COMMON = "timestamp,input_length,output_length\n0.500,374,44\n4.815,396,109\n"
LENGTHS = "input_length,output_length\n926,139\n2574,123\n"
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,GPT-4,1087,0,1087,API log\n"
    "118,GPT-4,417,276,693,Conversation log\n"
)
MOONCAKE = (
    '{"timestamp":0,"input_length":1100,"output_length":500,"hash_ids":[0,1,2]}\n'
    "\n"
    '{"timestamp":27000,"input_length":1024,"output_length":7,"hash_ids":[0,14]}\n'
)


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "timed", "expected"),
    [
        (COMMON, True, [(0.5, 374, 44), (4.815, 396, 109)]),
        ("\ufeff" + COMMON.replace("\n", "\r\n"), True, [(0.5, 374, 44), (4.815, 396, 109)]),
        (LENGTHS, False, [(0, 926, 139), (0, 2574, 123)]),
        (AZURE, True, [(0, 374, 44), (4.314579, 396, 109)]),
        (BURST, True, [(5, 472, 18), (118, 417, 276)]),
        (MOONCAKE, True, [(0, 1100, 500), (27, 1024, 7)]),
        ("output_length,input_length,timestamp\n3,2,9\n5,4,1\n", True, [(1, 4, 5), (9, 2, 3)]),
        ('{"timestamp":1500,"input_length":3,"output_length":4}\n', True, [(1.5, 3, 4)]),
    ],
    ids=[
        "common",
        "common from Windows",
        "lengths",
        "Azure",
        "BurstGPT",
        "Mooncake",
        "unsorted",
        "Mooncake unhashed",
    ],
)
def test_a_trace_of_each_form(
    tmp_path: Path, text: str, timed: bool, expected: list[tuple[float, int, int]]
) -> None:
    trace = read_trace(written(tmp_path, text))
    assert trace.timed == timed
    assert [(a.time, a.input_length, a.output_length) for a in trace.arrivals] == expected


def test_a_time_that_is_no_date_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 3: TIMESTAMP must be a date such as 2023-11-16 18:15:46"):
        read_trace(written(tmp_path, AZURE.replace("2023-11-16 18:15:50.9951690", "yesterday")))


def test_hash_ids_are_blocks_of_512_tokens_that_prompts_share(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, MOONCAKE)).arrivals
    assert first.parts == (Part("hash 0", 512), Part("hash 1", 512), Part("hash 2", 76))
    one, other = first.prompt(range(1000)), second.prompt(range(1000))
    assert one[:512] == other[:512]
    assert one[512:530] != other[512:530]


def test_prompts_of_other_traces_share_nothing(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, COMMON)).arrivals
    assert first.prompt(range(1000))[:8] != second.prompt(range(1000))[:8]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "line 1: the header has to name"),
        ("", "line 1: the header has to name"),
        ("timestamp,input_length,output_length\n", "holds no request"),
        (COMMON + "1.0,many,3\n", "line 4: input_length must be a number of at least 0, not 'many'"),
        (COMMON + "1.0,3\n", "line 4: output_length is missing"),
        (COMMON + "-1,3,3\n", "line 4: timestamp must be a number of at least 0"),
        (COMMON + "nan,3,3\n", "line 4: timestamp must be a number of at least 0"),
        (COMMON + "1,3.5,3\n", "line 4: input_length must be a whole number"),
        (MOONCAKE + "{broken\n", "line 4: not JSON"),
        (MOONCAKE + "[1]\n", "line 4: not a JSON object"),
        (
            MOONCAKE + '{"timestamp":1,"input_length":true,"output_length":1}\n',
            "line 4: input_length must be",
        ),
        (MOONCAKE + '{"timestamp":1,"output_length":1}\n', "line 4: input_length is missing"),
        (
            '{"timestamp":1,"input_length":513,"output_length":1,"hash_ids":[1]}\n',
            "line 1: 513 prompt tokens are 2 blocks of 512; hash_ids has 1",
        ),
        ('{"timestamp":1,"input_length":5,"output_length":1,"hash_ids":7}\n', "hash_ids is not a list"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert str(path) in caught.value.message
    assert message in caught.value.message


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_trace(tmp_path / "binary")
