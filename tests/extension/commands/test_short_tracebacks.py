"""Errors of mesh tensors, and of modules on ranks, show the user's lines and none of ours; values of one rank."""

from __future__ import annotations

import pytest

from tests.extension.conftest import Notebook

SETUP = """
import torch, meshbook
from meshbook.distributed import Mesh
mesh = Mesh(procs)
x = meshbook.distribute(torch.arange(12.0).reshape(4, 3), mesh, sharding_spec=[None, None])
layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
model = meshbook.module_to_mesh(layers, mesh)
"""


@pytest.fixture(scope="module")
def tensors(notebook: Notebook) -> Notebook:
    notebook.run(SETUP)
    return notebook


def test_an_operation_that_cannot_be_shows_its_line_alone(tensors: Notebook) -> None:
    shown = tensors.fail("y = x @ x")
    assert "----> 1 y = x @ x" in shown and "same reduction dim" in shown
    assert shown.count("File ") == 1 and "mesh_tensor.py" not in shown, shown


def test_a_module_that_fails_shows_no_calling_of_modules(tensors: Notebook) -> None:
    for shown in (tensors.fail("model(x)"), tensors.fail("%%mesh\ntorch.nn.Sequential(torch.nn.Linear(4, 4))(x0)")):
        assert "_call_impl" not in shown, shown
    shown = tensors.fail("%%mesh\nx0 = torch.ones(3)\ntorch.nn.Sequential(torch.nn.Linear(4, 4))(x0)")
    assert "_call_impl" not in shown and "Linear.forward" in shown and "----> 3" in shown, shown


def test_the_part_of_one_rank_of_a_tensor_that_is_laid_out_can_be_looked_at(tensors: Notebook) -> None:
    tensors.run("whole = meshbook.inspect(x, gpus=2)\npart = meshbook.inspect(x + 1, gpus=1)")
    assert tensors["whole"].tolist() == tensors["x"].full_tensor().tolist()
    tensors.run("rows = meshbook.distribute(torch.arange(8.0), mesh, sharding_spec=['gpus'])")
    tensors.run("second = meshbook.inspect(rows * 10, gpus=1)\nweight = meshbook.inspect(model[0].weight, gpus=3)")
    assert tensors["second"].tolist() == [20.0, 30.0]
    assert tensors["weight"].shape == (4, 4) and not tensors["weight"].requires_grad
