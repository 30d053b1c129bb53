"""Every experts class that the installed transformers decorates: right, or refused by name."""

import copy
import inspect
import re
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("the extra is not installed", allow_module_level=True)

import transformers

from modular_kernel.errors import UnsupportedError
from modular_kernel.integrations.transformers import register, registration

MODELS = Path(transformers.__file__).parent / "models"
DECORATED = re.compile(r"^@use_experts_implementation.*\nclass (\w+)", re.MULTILINE)
E, H, I, K = 4, 32, 24, 2  # noqa: E741

REFUSED = {"MuseSparkExperts": "norm after each expert"}
# What a class asks its config for, by the words in the name; the first line that fits counts.
_VALUES = (
    (("latent",), None),
    (("act",), "silu"),
    (("alpha",), 1.7),
    (("limit",), 0.6),
    (("softcap",), 1.5),
    (("eps",), 1e-6),
    (("per_tok",), K),
    (("experts",), E),
    (("intermediate",), I),
    (("hidden",), H),
)


class Config:
    """A configuration of any model, as small as it gets."""

    _experts_implementation = "eager"

    def __getattr__(self, name: str) -> object:
        for words, value in _VALUES:
            if any(word in name for word in words) and not name.startswith("__"):
                return value
        raise AttributeError(name)


@cache
def classes() -> "dict[str, Path]":
    found = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        for name in DECORATED.findall(path.read_text()):
            found[name] = path
    return found


def made(name: str) -> torch.nn.Module:
    path = classes()[name]
    module = import_module(f"transformers.models.{path.parent.name}.{path.stem}")
    cls = getattr(module, name)
    given = inspect.signature(cls.__init__.__wrapped__).parameters
    more = {
        n: getattr(Config(), n)
        for n, p in given.items()
        if p.default is p.empty and n not in ("self", "config")
    }
    experts = cls(Config(), **more)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return experts.eval()


def test_the_classes_are_found() -> None:
    assert len(classes()) >= 60
    assert {"MixtralExperts", "GptOssExperts", "NemotronHExperts"} <= classes().keys()
    assert REFUSED.keys() <= classes().keys()


@pytest.mark.parametrize("name", classes())
def test_a_class_computes_what_transformers_computes_or_is_refused(name) -> None:
    experts, generator = made(name), torch.Generator().manual_seed(1)
    x = torch.randn(11, H, generator=generator)
    values, ids = torch.randn(11, E, generator=generator).topk(K)
    scores, ours = values.softmax(-1), register("MoEPrepareAndFinalizeNoEP", "TorchExperts")
    with torch.no_grad():
        exact = copy.deepcopy(experts).double()
        exact.config = Config()
        exact.config._experts_implementation = "batched_mm"
        want = exact(x.double(), ids, scores.double())
        experts.config._experts_implementation = ours
        if name in REFUSED:
            with pytest.raises(UnsupportedError, match=REFUSED[name]):
                experts(x, ids, scores)
            return
        got = experts(x, ids, scores)
    error = (got.double() - want).norm() / want.norm()
    assert registration(ours).kernels
    assert error <= 2e-6
