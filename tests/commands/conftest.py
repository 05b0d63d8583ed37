import pytest

from tests import arithmetic


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """An untrained model and sums to learn; a file may have a fixture of its own instead."""
    directory = tmp_path_factory.mktemp("arithmetic")
    arithmetic.write(directory)
    return directory
