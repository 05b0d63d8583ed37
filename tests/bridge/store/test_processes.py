"""A learner of two real processes publishes through a store."""

import pytest

from tests.training.test_hosts import children, started

pytestmark = pytest.mark.timeout(900)  # processes start slowly on a busy machine


def test_each_process_writes_what_it_holds(tmp_path):
    with started(children("stored", tmp_path, count=2), tmp_path) as processes:
        ends = [process.wait() for process in processes]
    logs = [(tmp_path / f"{i}.log").read_text() for i in range(2)]
    assert ends == [0, 0], logs
    assert all("stored" in log for log in logs)
