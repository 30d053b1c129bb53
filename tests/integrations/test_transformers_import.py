"""`import modular_kernel` registers the implementation with transformers."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

if find_spec("transformers") is None:
    pytest.skip("the extra is not installed", allow_module_level=True)

MODEL = """
config = MixtralConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                       num_attention_heads=2, num_key_value_heads=2)
model = AutoModelForCausalLM.from_config(config, experts_implementation="modular_kernel").eval()
model(input_ids=torch.arange(8)[None])
"""
TRANSFORMERS = "import torch\nfrom transformers import AutoModelForCausalLM, MixtralConfig"
IMPORTED = """
import sys
assert not {"torch", "transformers"} & sys.modules.keys()
"""
CHOSEN = """
from modular_kernel.integrations.transformers import register
register("MoEPrepareAndFinalizeNoEP", "TorchExperts")
"""
CHECKED = """
from modular_kernel.integrations.transformers import registration
assert registration().pairing_text == "MoEPrepareAndFinalizeNoEP x {}"
"""


def run(*lines: str) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, "-c", "\n".join(lines)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "lines",
    [
        ("import modular_kernel", IMPORTED, TRANSFORMERS),
        (TRANSFORMERS, "import modular_kernel"),
        (TRANSFORMERS, "import transformers.modeling_utils", "import modular_kernel"),
        ("import modular_kernel.integrations.transformers", TRANSFORMERS),
        ("import modular_kernel", "from transformers.models.mixtral import *", TRANSFORMERS),
    ],
    ids=["before", "after", "after its models", "the integration", "by a model"],
)
def test_importing_the_package_is_sufficient(lines) -> None:
    done = run(*lines, MODEL, CHECKED.format("default"))
    assert done.returncode == 0, done.stderr


def test_a_previously_registered_pairing_is_kept() -> None:
    done = run("import modular_kernel", CHOSEN, TRANSFORMERS, MODEL, CHECKED.format("TorchExperts"))
    assert done.returncode == 0, done.stderr


def test_without_the_import_transformers_reports_an_unknown_implementation() -> None:
    done = run(TRANSFORMERS, MODEL)
    assert done.returncode == 1
    assert 'experts_implementation="modular_kernel"` is not supported' in done.stderr
