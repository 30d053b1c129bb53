"""Modules that register operators can be imported again."""

import subprocess
import sys

PROGRAM = """
import importlib
import torch
from modular_kernel.integrations import fused_moe
from modular_kernel.operators import experts
from modular_kernel.ops import route

for module in (route, experts, fused_moe):
    importlib.reload(module)

import modular_kernel as mk
from modular_kernel.operators.pairing import Pairing, serialize_layer

problem = mk.Problem(4, 16, 8, 4, 2, dtype=torch.float32)
w1, w2 = torch.randn(4, 16, 16, requires_grad=True), torch.randn(4, 16, 8)
x, ids, scores = torch.randn(4, 16), torch.arange(8).view(4, 2) % 4, torch.rand(4, 2)
pairing = Pairing("MoEPrepareAndFinalizeNoEP", "TorchExperts")
strings = "w1,w2", serialize_layer(problem), str(pairing)
y = experts.EXPERTS(x, ids, scores, [w1, w2], *strings)
y.sum().backward()
assert w1.grad is not None and w1.grad.abs().sum() > 0
with torch.no_grad():
    assert torch.equal(experts.EXPERTS_FORWARD(x, ids, scores, [w1, w2], *strings), y)
    no_tensors = [None] * 9
    options = "none", "silu", False, 1.0, "sum"
    got = fused_moe.outplace_fused_experts(x, w1.detach(), w2, scores, ids, no_tensors, *options)
torch.testing.assert_close(got, y.detach())
print("registered again")
"""


def test_modules_may_be_imported_again() -> None:
    """Mutation tests change the source of a module and import it again."""
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert process.stdout == "registered again\n", process.stderr[-2000:]
