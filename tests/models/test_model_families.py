"""Every configuration class with experts in the installed transformers is read or refused.

The tests read the files that these classes write. They compare the result with the model's modules:
with the shapes of the experts' parameters on the meta device, and with their activation on random
values.
"""

import json
import re
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from modular_kernel.errors import ConfigurationError
from modular_kernel.models.config_file import problem_fields_of_file
from modular_kernel.models.families import FAMILIES
from modular_kernel.reference import activation
from modular_kernel.spec.problem import ActivationSpec, Problem

transformers = pytest.importorskip("transformers")

MODELS = Path(transformers.__file__).parent / "models"
EXPERT_FIELD = re.compile("expert|moe")
SCALING_FIELD = re.compile(r"[a-z_]*rout(?:ed|er|e)_scal(?:ing_factor|e)")

# Values for classes whose defaults do not describe a layer.
MISSING_VALUES: dict[str, dict[str, object]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "deepseek_ocr2_text": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6},
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "diffusion_gemma_text": {"num_experts": 64, "top_k_experts": 4, "moe_intermediate_size": 704},
    "longcat_flash": {"zero_expert_num": 0},
    "hunyuan_v1_moe": {"num_experts": 64, "moe_topk": 8, "intermediate_size": 3072},
    "nemotron_h": {"hidden_size": 2688},
}
# Types that apply router weights to the input. The parameters do not show this.
ON_INPUT = {"llama4_text"}
REFUSED = {
    "doge",
    "dots3_note_vision_encoder",
    "ernie4_5_vl_moe_text",
    "inkling2_loop_text",
    "inkling2_text",
    "muse_spark_text",
    "nllb-moe",
    "switch_transformers",
    "vitpose_backbone",
}
# Types that are newer than the oldest tested release, and the release that added them.
ADDED_IN = {
    "hy_v4_vl_text": (5, 24),
    "inkling2_loop_text": (5, 24),
    "lara_mini": (5, 24),
    "sarvam_mla": (5, 24),
    "sarvam_moe": (5, 24),
}
RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])
INSTALLED = {
    kind: family for kind, family in FAMILIES.items() if ADDED_IN.get(kind, RELEASE) <= RELEASE
}
# Classes without a model_type. They are parts of the files of DBRX and Qwen3-Omni.
WITHOUT_TYPE = {"DbrxFFNConfig", "Qwen3OmniMoeTalkerConfig"}
# The published defaults of some classes, from the papers and files that they name.
PUBLISHED_SIZES = {
    "mixtral": (8, 2, 4096, 14336, 1.0),
    "deepseek_v3": (256, 8, 7168, 2048, 2.5),
    "qwen3_moe": (128, 8, 2048, 768, 1.0),
    "gpt_oss": (128, 4, 2880, 2880, 1.0),
    "qwen3_next": (512, 10, 2048, 512, 1.0),
    "llama4_text": (16, 1, 5120, 8192, 1.0),
    "kimi_linear": (256, 8, 2304, 1024, 2.446),
    "minimax_m2": (256, 8, 3072, 1536, 1.0),
    "glm4_moe": (128, 8, 4096, 1408, 1.0),
    "olmoe": (64, 8, 2048, 2048, 1.0),
}


# Classes that need arguments.
WITHOUT_DEFAULTS = {"Gemma4AssistantConfig", "NougatConfig"}


@cache
def config_classes() -> dict[str, type]:
    classes: dict[str, type] = {}
    for path in sorted(MODELS.glob("*/configuration_*.py")):
        module = import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for name, value in vars(module).items():
            is_defined_here = isinstance(value, type) and value.__module__ == module.__name__
            if is_defined_here and issubclass(value, transformers.PreTrainedConfig):
                classes[name] = value
    return classes


def mentions_experts(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return any(EXPERT_FIELD.search(str(key)) or mentions_experts(one) for key, one in value.items())


@cache
def classes_with_experts() -> dict[str, type]:
    """Return the classes with fields about experts. The fields may be in a part of the config."""
    classes = {}
    for name, cls in config_classes().items():
        try:
            has_experts = mentions_experts(cls().to_dict())
        except (ValueError, StrictDataclassError):
            assert name in WITHOUT_DEFAULTS
            has_experts = any(EXPERT_FIELD.search(field.name) for field in fields(cls))
        if has_experts:
            classes[name] = cls
    return classes


def write_config(config: Any, path: Path) -> str:
    path.write_text(config.to_json_string())
    return str(path)


def language_config_of(config: Any) -> Any:
    """Return the part of a configuration that should be read."""
    for _ in range(3):
        if config.model_type in FAMILIES:
            return config
        config = getattr(config, "thinker_config", None) or config.text_config
    raise AssertionError("no part of a known type")


def make_config(cls: type) -> Any:
    """Return an instance in which all sizes are set, also in its language model."""
    config = cls(**MISSING_VALUES.get(cls.model_type, {}))
    inner_config = getattr(config, "text_config", None)
    missing_values = MISSING_VALUES.get(getattr(inner_config, "model_type", ""), {})
    return (
        cls(text_config={"model_type": inner_config.model_type, **missing_values})
        if missing_values
        else config
    )


def experts_of(config: Any) -> Any:
    """Return the experts module, on the meta device."""
    folder, name, *_ = FAMILIES[config.model_type].source.split()
    module = import_module(f"transformers.models.{folder}.modeling_{folder}")
    with torch.device("meta"):
        return getattr(module, name)(getattr(config, "ffn_config", config))


def expert_sizes(config: Any, module: Any) -> tuple[int, int, int, int]:
    """Return the number of experts, the hidden size, the intermediate size, and the rows of w1.
    They are taken from the parameters.
    """
    shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
    if config.model_type == "dbrx":
        width = config.ffn_config.ffn_hidden_size
        rows, hidden = shapes["w2"]
        assert shapes["w1"] == shapes["v1"] == shapes["w2"]
        return rows // width, hidden, width, 2 * width
    if config.model_type == "jetmoe":
        experts, hidden, width = shapes["output_linear.weight"]
        return experts, hidden, width, shapes["input_linear.weight"][1]
    first = shapes.get("gate_up_proj", shapes.get("up_proj"))
    transposed = getattr(module, "is_transposed", config.model_type == "llama4_text")
    experts, *rest = shapes["down_proj"]
    hidden, width = reversed(rest) if transposed else rest
    rows, columns = reversed(first[1:]) if transposed else first[1:]
    assert (first[0], columns) == (experts, hidden)
    return experts, hidden, width, rows


def apply_activation(config: Any, module: Any, values: torch.Tensor) -> torch.Tensor:
    """Return the activation of the experts module for (rows, 2I), or for (rows, I) if it is
    ungated.
    """
    apply = getattr(module, "_apply_gate", None)
    if config.model_type == "nemotron_h":
        return module.act_fn(values)
    if apply is not None:
        return apply(values)
    act = {"dbrx": "activation_fn", "jetmoe": "activation"}.get(config.model_type, "act_fn")
    gate, up = values.chunk(2, dim=-1)
    return getattr(module, act)(gate) * up


# Types that a wrapper renames, or whose code is published with the model.
WITHOUT_CLASS = {"kimi_k2", "bailing_moe", "bailing_moe_v2", "deepseek", "step3_text"}


def list_readable_types() -> list[str]:
    return [name for name in INSTALLED if name not in REFUSED | WITHOUT_CLASS]


def class_of(kind: str) -> type:
    return next(cls for cls in classes_with_experts().values() if cls.model_type == kind)


def test_every_class_with_experts_is_known() -> None:
    """The table has no other entries except WITHOUT_CLASS."""
    types = {cls.model_type for cls in classes_with_experts().values()}
    assert {
        name for name, cls in classes_with_experts().items() if not cls.model_type
    } == WITHOUT_TYPE
    leaves = {kind for kind in types if kind and mentions_experts(expert_fields(kind))}
    assert leaves == set(INSTALLED) - WITHOUT_CLASS
    assert {kind for kind, family in FAMILIES.items() if family.unsupported_reason} == REFUSED


def expert_fields(kind: str) -> dict[str, None]:
    config = class_of(kind)
    inner_fields = {"ffn_config": None} if kind == "dbrx" else {}
    names = [field.name for field in fields(config) if EXPERT_FIELD.search(field.name)]
    return dict.fromkeys(["moe"] if inner_fields else names)


@pytest.mark.parametrize("kind", list_readable_types())
def test_configs_are_read_as_their_experts_compute(kind: str, tmp_path: Path) -> None:
    config = make_config(class_of(kind))
    facts = problem_fields_of_file(write_config(config, tmp_path / "config.json"))
    problem = Problem(tokens=1, **facts)  # type: ignore[arg-type]
    module = experts_of(config)
    shape = (problem.experts, problem.hidden, problem.intermediate, problem.w1_rows)
    assert shape == expert_sizes(config, module)
    names = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k")
    inner = getattr(config, "ffn_config", config)
    top_k = [getattr(inner, n) for n in (*names, "moe_top_k") if hasattr(inner, n)]
    assert problem.top_k == top_k[0]
    assert problem.bias == bool(getattr(module, "has_bias", False))
    assert problem.apply_router_weight_on_input == (kind in ON_INPUT)
    assert not getattr(module, "has_post_expert_norm", False)
    values = 4 * torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    expected = apply_activation(config, module, values)
    torch.testing.assert_close(activation(values, problem.act), expected)


@pytest.mark.parametrize("kind", list_readable_types())
def test_table_agrees_with_the_sources(kind: str) -> None:
    """The named classes exist. A scaling factor is read exactly if the source uses one."""
    family = FAMILIES[kind]
    folder, *names = family.source.split()
    code = (MODELS / folder / f"modeling_{folder}.py").read_text()
    assert [name for name in names if f"class {name}(" not in code] == []
    relevant_code = code
    if folder == "dots3_note":  # its image experts have a factor with another name
        relevant_code = code.replace("router_scaling_factor", "")
    used = {
        name for name in SCALING_FIELD.findall(relevant_code) if f"config.{name}" in relevant_code
    }
    assert used <= {family.scaling.removesuffix("?")}
    assert not family.scaling or f"config.{family.scaling.removesuffix('?')}" in code


@pytest.mark.parametrize("kind", sorted(REFUSED & set(INSTALLED)))
def test_unsupported_layers_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    family = FAMILIES[kind]
    folder, name = family.source.split()
    code = (MODELS / folder / f"modeling_{folder}.py").read_text()
    assert f"class {name}(" in code
    with pytest.raises(ConfigurationError, match=re.escape(kind)) as caught:
        problem_fields_of_file(write_config(class_of(kind)(), tmp_path / "config.json"))
    assert family.unsupported_reason in str(caught.value)


def test_multimodal_models_are_read_as_their_language_models(tmp_path: Path) -> None:
    read = set()
    for name, cls in classes_with_experts().items():
        if cls.model_type in FAMILIES or name in WITHOUT_TYPE - {"Qwen3OmniMoeTalkerConfig"}:
            continue
        if cls.model_type == "vitpose":
            continue  # its experts are not in a language model; see the next test
        config = make_config(cls)
        inner = language_config_of(config)
        if FAMILIES[inner.model_type].unsupported_reason:
            with pytest.raises(ConfigurationError, match=inner.model_type):
                problem_fields_of_file(write_config(config, tmp_path / "outer.json"))
            continue
        outer = problem_fields_of_file(write_config(config, tmp_path / "outer.json"))
        assert outer == problem_fields_of_file(write_config(inner, tmp_path / "inner.json")), name
        read.add(cls.model_type)
    assert {"llama4", "kimi_k25", "qwen3_omni_moe", "qwen3_vl_moe", "gemma4"} <= read


def test_experts_of_a_backbone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="vitpose"):
        problem_fields_of_file(write_config(class_of("vitpose")(), tmp_path / "config.json"))


@pytest.mark.parametrize("kind", PUBLISHED_SIZES)
def test_published_defaults(kind: str, tmp_path: Path) -> None:
    facts = problem_fields_of_file(write_config(class_of(kind)(), tmp_path / "config.json"))
    problem = Problem(tokens=1, **facts)  # type: ignore[arg-type]
    sizes = (problem.experts, problem.top_k, problem.hidden, problem.intermediate)
    assert (*sizes, problem.routed_scaling_factor) == PUBLISHED_SIZES[kind]


def test_latent_size_is_the_hidden_size_of_the_experts(tmp_path: Path) -> None:
    config = class_of("nemotron_h")(moe_latent_size=1024, hidden_size=4096)
    facts = problem_fields_of_file(write_config(config, tmp_path / "config.json"))
    assert facts["hidden"] == 1024
    assert ActivationSpec.parse(str(facts["activation"])).gated is False
    problem = Problem(tokens=1, **facts)  # type: ignore[arg-type]
    shape = (problem.experts, problem.hidden, problem.intermediate, problem.w1_rows)
    assert shape == expert_sizes(config, experts_of(config))


def test_limits_per_layer(tmp_path: Path) -> None:
    """step3p5 has a limit per layer. The limits may all be absent or all equal. Otherwise the
    config is refused.
    """
    cls = class_of("step3p5")
    config = json.loads(cls().to_json_string())
    path = tmp_path / "config.json"
    for limits, kind in (([0, None], "silu"), ([7.0, 7.0], "swiglu_clamp_after:limit=7.0")):
        path.write_text(json.dumps(config | {"swiglu_limits": limits}))
        assert problem_fields_of_file(str(path))["activation"] == kind
    for limits in ([7.0, 0.0], [7.0, 5.0], 7.0, ["seven"]):
        path.write_text(json.dumps(config | {"swiglu_limits": limits}))
        with pytest.raises(ConfigurationError, match="swiglu_limits"):
            problem_fields_of_file(str(path))
