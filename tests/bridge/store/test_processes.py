"""A learner of two real processes publishes through a store."""

from tests.training.test_hosts import children, started


def test_each_process_writes_what_it_holds(tmp_path):
    with started(children("stored", tmp_path, count=2), tmp_path) as processes:
        ends = [process.wait() for process in processes]
    logs = [(tmp_path / f"{i}.log").read_text() for i in range(2)]
    assert ends == [0, 0], logs
    assert all("stored" in log for log in logs)
