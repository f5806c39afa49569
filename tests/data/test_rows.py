"""Rows from every kind of place, and one clear error for each place that holds none."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.data.rows import Rows, open_rows
from rollplex.errors import ConfigError, DataError


def values(rows: Rows) -> list[Any]:
    found = [rows[index].value for index in range(len(rows))]
    return [json.loads(value) if isinstance(value, bytes) else value for value in found]


def sources(rows: Rows) -> list[str]:
    return [rows[index].source for index in range(len(rows))]


def test_jsonl_with_bom_crlf_blank_lines_and_unicode(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\xe6\x95\xb0"}\r\n\r\n{"a": 2}\r\n   \n\n')
    rows = open_rows(str(path), "data.train")
    assert values(rows) == [{"a": "数"}, {"a": 2}]
    assert sources(rows) == [f"{path}, row 1", f"{path}, row 3"]


@settings(max_examples=50)
@given(lines=st.lists(st.dictionaries(st.text(max_size=3), st.text()), min_size=1, max_size=8), gap=st.integers(0, 2))
def test_jsonl_rows_are_found_in_any_order(
    lines: list[dict[str, str]], gap: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lines") / "d.jsonl"
    text = ("\n" * (gap + 1)).join(json.dumps(line, ensure_ascii=False) for line in lines)
    path.write_text(text, encoding="utf-8", newline="")
    rows = open_rows(str(path), "data.train")
    for index in reversed(range(len(lines))):
        assert json.loads(rows[index].value) == lines[index]
        assert rows[index].source == f"{path}, row {1 + index * (gap + 1)}"


@pytest.mark.parametrize("text", ['\ufeff[{"a": 1}, {"a": 2}]', '{"a": 1}\n{"a": 2}'])
def test_json_file_holds_an_array_or_lines(text: str, tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text(text, encoding="utf-8")
    rows = open_rows(str(path), "data.train")
    assert values(rows) == [{"a": 1}, {"a": 2}]
    assert sources(rows)[1] == f"{path}, row 2"


def test_glob_of_parquet_files_in_sorted_order(tmp_path: Path) -> None:
    for name, start in (("part-1", 3), ("part-0", 0)):
        table = pyarrow.table({"a": list(range(start, start + 3))})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=2)
    rows = open_rows(str(tmp_path / "*.parquet"), "data.train")
    assert values(rows) == [{"a": number} for number in range(6)]
    assert sources(rows)[3] == f"{tmp_path / 'part-1.parquet'}, row 1"


def test_function_in_a_file_and_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "def rows():\n    return ({'a': 1}, {'a': 2})\n"
    (tmp_path / "rows_of_mine.py").write_text(code, encoding="utf-8")
    location = f"{tmp_path / 'rows_of_mine.py'}:rows"
    rows = open_rows(location, "data.train")
    assert values(rows) == [{"a": 1}, {"a": 2}]
    assert (rows[1].source, rows[1].folder) == (f"{location}, row 2", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert values(open_rows("rows_of_mine:rows", "data.train")) == [{"a": 1}, {"a": 2}]


FUNCTIONS = """
def generator():
    yield {}
def splits():
    return {"train": []}
def broken():
    raise RuntimeError("no disk")
number = 3
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("generator", "returned generator"),
        ("splits", "returned dict"),
        ("broken", "no disk"),
        ("number", "no function 'number'"),
        ("absent", "no function 'absent'"),
    ],
)
def test_unusable_functions(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(FUNCTIONS, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        open_rows(f"{tmp_path}/f.py:{name}", "data.train")


def test_unusable_modules(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("1/0", encoding="utf-8")
    with pytest.raises(ConfigError, match="division by zero"):
        open_rows(f"{tmp_path}/f.py:rows", "data.train")
    with pytest.raises(ConfigError, match="there is no file"):
        open_rows(f"{tmp_path}/g.py:rows", "data.train")
    with pytest.raises(ConfigError, match=r"no_such_module_xyz.*path/to/file\.py:rows"):
        open_rows("no_such_module_xyz:rows", "data.train")


def test_places_without_rows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.eval = .*directory.*\*\.parquet"):
        open_rows(str(tmp_path), "data.eval")
    with pytest.raises(ConfigError, match="no such file"):
        open_rows(str(tmp_path / "*.jsonl"), "data.train")
    (tmp_path / "d.jsonl.gz").write_bytes(b"x")
    with pytest.raises(ConfigError, match="decompress"):
        open_rows(str(tmp_path / "d.jsonl.gz"), "data.train")
    (tmp_path / "d.csv").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"'\.csv'.*parquet"):
        open_rows(str(tmp_path / "d.csv"), "data.train")


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.parquet"])
def test_empty_and_broken_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"")
    with pytest.raises(DataError, match="empty"):
        open_rows(str(path), "data.train")
    path.write_bytes(b"[1, ")
    if name != "d.jsonl":  # in which a broken line is a broken row
        with pytest.raises(DataError, match=name):
            open_rows(str(path), "data.train")


def test_a_failing_sequence_is_a_problem_of_its_row(tmp_path: Path) -> None:
    code = (
        "class Rows:\n"
        "    def __len__(self): return 2\n"
        "    def __getitem__(self, i):\n"
        "        if i: raise OSError('gone')\n"
        "        return {}\n"
        "def rows(): return Rows()\n"
    )
    (tmp_path / "f.py").write_text(code, encoding="utf-8")
    rows = open_rows(f"{tmp_path}/f.py:rows", "data.train")
    assert rows[0].problem == ""
    assert "gone" in rows[1].problem
