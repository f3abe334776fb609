# SPDX-License-Identifier: Apache-2.0
"""Each op with random valid arguments: its schema and its compiled form, and tensors on two devices."""

import random

import pytest
import torch

from tests.machinery.backends import each_real_backend
from tests.machinery.emulation import ASAN
from tests.machinery.hostile.ops import NAMES, Calls, Placed, written
from tests.machinery.shared import sampled

pytestmark = pytest.mark.skipif(ASAN, reason="this tests the ops, not the kernels")


def drawn(name, seed, device):
    """Return valid arguments of an op on a device."""
    args = Placed(name, getattr(Calls(random.Random(seed)), name)(), device).args
    if name == "permute_blocks_":  # opcheck copies the first layer, so there are no others
        args[1] = args[1][:1]
    return args


@pytest.mark.slow
@each_real_backend
@pytest.mark.parametrize("seed", sampled([0, 1, 3]))
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(backend, name, seed):
    args = drawn(name, seed, backend.device)
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not any("float8" in str(getattr(each, "dtype", "")) for each in args):
        checks.append("test_schema")  # torch cannot compare fp8
    op = getattr(torch.ops.kvcache, name).default
    torch.library.opcheck(op, tuple(args), {}, test_utils=tuple(checks))


@each_real_backend
@pytest.mark.parametrize("name", [name for name in NAMES if name != "copy_blocks"])
def test_tensors_on_two_devices_are_rejected(backend, name):
    args = drawn(name, 1, backend.device)
    at = max(
        i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and i not in written(name)
    )
    args[at] = args[at].to("meta")
    with pytest.raises(RuntimeError, match=r"on meta: expected|expected one device"):
        getattr(torch.ops.kvcache, name)(*args)
