"""The stand-in for a vLLM server."""

from tests.sampling.conftest import server as server
