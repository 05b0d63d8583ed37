"""A method that a test gives to a server's worker (`--worker-extension-cls`)."""

from typing import Any


class Zeroing:
    """Loses the weights, as a GPU does in vLLM's sleep of level 2; the CPU build keeps them."""

    model_runner: Any  # the worker's

    def zero_weights(self) -> None:
        """Sets all parameters to 0."""
        for parameter in self.model_runner.model.parameters():
            parameter.data.zero_()
