# SPDX-License-Identifier: Apache-2.0
"""Tensors on a device that is neither CPU nor CUDA: every public name works there through torch
copies, or rejects the device.
"""

import importlib
import inspect

import pytest
import torch

from tests.machinery.hostile.other_device import table
from tests.machinery.hostile.other_device_cases import CASES, NO_TENSORS, PACKAGES
from tests.project.test_layers import modules_without_torch


@pytest.mark.slow
def test_every_public_name_works_on_the_other_device_or_is_rejected():
    rows = table()
    assert not [row for row in rows if row.is_wrong]
    refused = {row.name for row in rows if row.outcome == "refuses"}
    assert refused == {name for name, case in CASES.items() if case.refusal is not None}


def test_device_matrix_contains_every_op():
    schemas = [x for x in torch._C._dispatch_get_all_op_names() if x.startswith("kvcache::")]
    registered = {x.removeprefix("kvcache::") for x in schemas if "::_" not in x}
    ops = importlib.import_module("kvcache.ops")
    public = {
        x for x, f in inspect.getmembers(ops, inspect.isfunction) if f.__module__ == ops.__name__
    }
    public = {name for name in public if not name.startswith("_")}
    assert registered <= public
    assert {f"ops.{name}" for name in public} <= set(CASES)


@pytest.mark.parametrize("package", PACKAGES)
def test_device_matrix_contains_every_public_name_that_may_hold_tensors(package):
    module = importlib.import_module(package)
    objects = {name: getattr(module, name) for name in module.__all__}
    without_torch = modules_without_torch()
    with_torch = {
        name
        for name, value in objects.items()
        if not inspect.ismodule(value) and value.__module__ not in without_torch
    }
    assert with_torch <= set(CASES) | NO_TENSORS
    assert not set(CASES) & NO_TENSORS
