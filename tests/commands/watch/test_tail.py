import pytest
from hypothesis import given, strategies as st

from jaxrl.commands.watch import Tail
from jaxrl.tracking.tracker import JsonLines, parse_entry, read_metrics, write_lines


def test_lines_are_parsed_once(tmp_path):
    path, parsed = tmp_path / "metrics.jsonl", []
    reading = Tail(path, parse=lambda line: parsed.append(line) or parse_entry(line))
    assert reading.read() == []
    lines = JsonLines(path, start_step=0)
    for step in range(1, 4):
        lines.write(step, {"reward": step / 4})
        assert [e["step"] for e in reading.read()] == list(range(1, step + 1))
        assert len(parsed) == step
    lines.close()
    with path.open("a") as file:
        file.write('{"step": 4, ')
        file.flush()
        assert len(reading.read()) == 3
        file.write('"reward": 1}\n')
    assert len(reading.read()) == 4
    assert len(parsed) == 4


@given(
    st.lists(
        st.tuples(st.sampled_from(["append", "replace"]), st.integers(0, 6)), min_size=1, max_size=8
    )
)
def test_tail_equals_the_file_after_any_changes(tmp_path_factory, changes):
    path, time = tmp_path_factory.mktemp("run") / "metrics.jsonl", 0
    reading = Tail(path)
    for kind, count in changes:
        kept = read_metrics(path)[: count if kind == "replace" else None]
        new = []
        for step in range(count):
            time += 1  # every line is unique by its time
            new.append({"step": step, "time": time})
        write_lines(path, [*kept, *new])
        assert reading.read() == read_metrics(path)


@pytest.mark.parametrize("line", ['{"st', "7", '{"time": 1}', '{"step": 1, "event": {}}'])
def test_invalid_line_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not an entry"):
        Tail(tmp_path / "metrics.jsonl").read()
