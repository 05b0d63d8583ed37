"""The reward that runs tests in one process against the code of a completion in another."""

import pytest

from jaxrl.environments.isolation.inside.testing import split_names
from jaxrl.environments.rewards.builtin import python_tests

import ast
