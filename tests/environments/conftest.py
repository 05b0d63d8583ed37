import pytest

from jaxrl.environments.isolation import walls


@pytest.fixture(params=["bubblewrap", "own"])
def each_wall(request, monkeypatch):
    """Runs a test with bubblewrap, where it works, and without."""
    if request.param == "own":
        monkeypatch.setattr(walls, "find_bubblewrap", lambda: None)
    elif walls.find_bubblewrap() is None:
        pytest.skip("bubblewrap is not installed, or does not work here")
