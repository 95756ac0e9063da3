import os

import hypothesis
import pytest
import torch

# The same examples on every machine, and nothing left behind in the folder.
hypothesis.settings.register_profile("graphattn", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("graphattn")

if "PYTEST_XDIST_WORKER" in os.environ:  # tests run side by side: one thread each, where a test sets no other
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def poisoned_memory():
    """`torch.empty` comes filled with NaN, so memory that is read before it is written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# A plugin for a process of its own: imported to look for doctests, it would put the interpreter under every test.
collect_ignore = ["triton_interpreter.py"]
