"""What lies in a run's directory is whole at any time: others read it meanwhile."""

from jaxrl.run_directory import claim
from jaxrl.watch import rollbacks
from tests.watch.test_rollbacks import config, decide, write_steps


def test_who_reads_the_config_while_it_is_written_sees_a_whole_one(tmp_path):
    path, made = tmp_path / "config.toml", config(tmp_path)
    claim(tmp_path, made)
    write_steps(tmp_path, upto=12)
    first = path.read_text()
    with path.open() as reading:
        claim(tmp_path, config(tmp_path, checkpoint__keep="9"))
        assert reading.read() == first
    second = path.read_text()
    assert second != first
    decide(made, at=12, healthy=7)
    with path.open() as reading:
        rollbacks.settle(tmp_path, made)
        assert reading.read() == second
    assert path.read_text() != second
