"""Runs the experts of transformers models on a pairing of this toolkit.

    import modular_kernel

    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="modular_kernel")
    model.set_experts_implementation("modular_kernel")            # for a loaded model

All experts modules that transformers dispatches are supported: modules with gate_up_proj (or
up_proj) and down_proj in one dtype, and FP8Experts. The activation is identified by evaluating it
on sample values, not by the name of the module's class. A module with an unknown activation raises
UnsupportedError. Weights are not copied. torch.compile and torch.export trace a call as one
operator.

`register` selects another pairing. In training mode, and by default on a CPU, transformers'
grouped_mm runs instead of this package's kernels.
"""

from importlib import import_module
from typing import TYPE_CHECKING

# The oldest release that is tested, which is also the minimum of the extra in setup.py. Releases
# before 5.8 accept only the names of their own implementations.
_MIN_VERSION = (5, 23)
_NEED = 'transformers >= {}.{}: pip install "modular-kernel[transformers]"'.format(*_MIN_VERSION)

try:
    import transformers
    from transformers.integrations.moe import ExpertsInterface as _Interface  # noqa: F401
except ImportError as error:
    raise ImportError(f"modular_kernel.integrations.transformers needs {_NEED}") from error
if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < _MIN_VERSION:
    raise ImportError(f"transformers {transformers.__version__} is too old, need {_NEED}")

from modular_kernel.integrations.transformers.activations import activation_of  # noqa: E402
from modular_kernel.integrations.transformers.modules import weights_of  # noqa: E402
from modular_kernel.integrations.transformers.register import (  # noqa: E402
    Registration,
    register,
    register_default,
    registration,
)
from modular_kernel.integrations.transformers.replacement import serve  # noqa: E402
from modular_kernel.integrations.transformers.report import report  # noqa: E402

if TYPE_CHECKING:
    from modular_kernel.integrations.transformers.pretrained import from_pretrained

__all__ = [
    "Registration",
    "activation_of",
    "from_pretrained",
    "register",
    "registration",
    "report",
    "serve",
    "weights_of",
]

# `import modular_kernel` skips this call if transformers is still being imported at that time.
register_default()


def __getattr__(name: str) -> object:
    # Import `pretrained` on first use, because it imports transformers' model classes, which may
    # import this package.
    if name == "from_pretrained":
        pretrained = import_module("modular_kernel.integrations.transformers.pretrained")
        return pretrained.from_pretrained
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
