import os

import pytest
from hypothesis import settings

# Derandomised in CI: a red run is then red for everyone. `HYPOTHESIS_PROFILE=random` explores.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("random", deadline=None, print_blob=True)
# Under tools that slow every launch down a hundredfold (compute-sanitizer).
settings.register_profile("few", derandomize=True, deadline=None, max_examples=5)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items):
    """GPU tests are skipped, and say why, where there is no GPU or no CUDA build of torch."""
    if not any("gpu" in item.keywords for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
