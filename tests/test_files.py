"""Files of lines, which a crash may cut off."""

import resource

import pytest

from lightning_rob.runtime.files import append_lines, read_json_lines, stamp_of


def test_a_line_that_was_cut_off_is_ended_and_skipped(tmp_path):
    path = tmp_path / "new/lines.jsonl"
    assert list(read_json_lines(path)) == []
    append_lines(path, ['{"a": 1}', '{"a": 2}'])
    with path.open("a") as file:
        file.write('{"a": ')
    append_lines(path, ["[4]", '{"a": 3}'])
    assert path.read_text().splitlines() == ['{"a": 1}', '{"a": 2}', '{"a": ', "[4]", '{"a": 3}']
    assert [line["a"] for line in read_json_lines(path)] == [1, 2, 3]


def test_lines_are_appended_all_or_none(tmp_path):
    path = tmp_path / "lines"
    append_lines(path, ["first"])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="lines"):
            append_lines(path, ["second", "third"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "first\n"


def test_the_stamp_of_a_file_changes_with_it(tmp_path):
    path = tmp_path / "file"
    assert stamp_of(path) is None
    assert stamp_of(tmp_path) is None
    path.write_text("one")
    before = stamp_of(path)
    assert stamp_of(path) == before
    path.write_text("other")
    assert stamp_of(path) != before
