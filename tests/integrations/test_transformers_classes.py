"""Every experts class of the installed transformers is computed correctly, or refused by name."""

import copy
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("the extra is not installed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from hf_suites.classes import Config, E, H, K, find_classes, make_experts

from modular_kernel.errors import UnsupportedError
from modular_kernel.integrations.transformers import register, registration

CLASSES = find_classes()
REFUSED = {"MuseSparkExperts": "norm after each expert"}


def test_experts_classes_are_found() -> None:
    assert len(CLASSES) >= 60
    assert {"MixtralExperts", "GptOssExperts", "NemotronHExperts"} <= CLASSES.keys()
    assert REFUSED.keys() <= CLASSES.keys()


@pytest.mark.parametrize("name", CLASSES)
def test_classes_equal_transformers_or_are_refused(name) -> None:
    cls = getattr(import_module(CLASSES[name]), name)
    experts, generator = make_experts(cls), torch.Generator().manual_seed(1)
    x = torch.randn(11, H, generator=generator)
    values, ids = torch.randn(11, E, generator=generator).topk(K)
    scores = values.softmax(-1)
    implementation = register("MoEPrepareAndFinalizeNoEP", "TorchExperts")
    with torch.no_grad():
        float64_experts = copy.deepcopy(experts).double()
        float64_experts.config = Config()
        float64_experts.config._experts_implementation = "batched_mm"
        expected = float64_experts(x.double(), ids, scores.double())
        experts.config._experts_implementation = implementation
        if name in REFUSED:
            with pytest.raises(UnsupportedError, match=REFUSED[name]):
                experts(x, ids, scores)
            return
        got = experts(x, ids, scores)
    error = (got.double() - expected).norm() / expected.norm()
    assert registration(implementation).kernels
    assert error <= 2e-6
