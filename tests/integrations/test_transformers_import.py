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
CHECK_NOT_IMPORTED = """
import sys
assert not {"torch", "transformers"} & sys.modules.keys()
"""
REGISTER_TORCH = """
from modular_kernel.integrations.transformers import register
register("MoEPrepareAndFinalizeNoEP", "TorchExperts")
"""
CHECK_PAIRING = """
from modular_kernel.integrations.transformers import registration
assert registration().pairing_text == "MoEPrepareAndFinalizeNoEP x {}"
"""


def run_python(*lines: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", "\n".join(lines)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "lines",
    [
        ("import modular_kernel", CHECK_NOT_IMPORTED, TRANSFORMERS),
        (TRANSFORMERS, "import modular_kernel"),
        (TRANSFORMERS, "import transformers.modeling_utils", "import modular_kernel"),
        ("import modular_kernel.integrations.transformers", TRANSFORMERS),
        ("import modular_kernel", "from transformers.models.mixtral import *", TRANSFORMERS),
    ],
    ids=["before", "after", "after its models", "the integration", "by a model"],
)
def test_importing_the_package_is_sufficient(lines) -> None:
    result = run_python(*lines, MODEL, CHECK_PAIRING.format("default"))
    assert result.returncode == 0, result.stderr


def test_a_previously_registered_pairing_is_kept() -> None:
    result = run_python(
        "import modular_kernel",
        REGISTER_TORCH,
        TRANSFORMERS,
        MODEL,
        CHECK_PAIRING.format("TorchExperts"),
    )
    assert result.returncode == 0, result.stderr


def test_without_the_import_transformers_reports_an_unknown_implementation() -> None:
    result = run_python(TRANSFORMERS, MODEL)
    assert result.returncode == 1
    assert 'experts_implementation="modular_kernel"` is not supported' in result.stderr
