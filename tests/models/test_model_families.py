"""Every configuration class with experts in the installed transformers is read or refused.

The tests read the files that these classes write. They compare the result with transformers' module
of the experts: with the shapes of its parameters on the meta device, and with its activation of
random values.
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

# Values of the fields without which classes do not describe a layer.
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
# Types that apply router weights to the input, which the parameters do not show.
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
# Classes without a model_type, whose configs are sections of the files of DBRX and Qwen3-Omni.
WITHOUT_TYPE = {"DbrxFFNConfig", "Qwen3OmniMoeTalkerConfig"}
# The experts, top_k, hidden size, intermediate size and scaling factor of published models, which
# are the defaults of their classes.
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


# Classes that cannot be created without arguments.
WITHOUT_DEFAULTS = {"Gemma4AssistantConfig", "NougatConfig"}


@cache
def find_config_classes() -> dict[str, type]:
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
    return any(EXPERT_FIELD.search(str(key)) or mentions_experts(v) for key, v in value.items())


@cache
def find_classes_with_experts() -> dict[str, type]:
    """Return the classes, by name, whose config or nested config has fields about experts."""
    classes = {}
    for name, cls in find_config_classes().items():
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


def find_language_config(config: Any) -> Any:
    """Return the config or the nested config that describes the layers with experts."""
    for _ in range(3):
        if config.model_type in FAMILIES:
            return config
        config = getattr(config, "thinker_config", None) or config.text_config
    raise AssertionError("no part of a known type")


def make_config(cls: type) -> Any:
    """Return an instance with all sizes of a layer, also in its nested language model."""
    config = cls(**MISSING_VALUES.get(cls.model_type, {}))
    text_config = getattr(config, "text_config", None)
    missing_values = MISSING_VALUES.get(getattr(text_config, "model_type", ""), {})
    return (
        cls(text_config={"model_type": text_config.model_type, **missing_values})
        if missing_values
        else config
    )


def make_experts(config: Any) -> Any:
    """Create the module of the experts on the meta device."""
    folder, name, *_ = FAMILIES[config.model_type].source.split()
    module = import_module(f"transformers.models.{folder}.modeling_{folder}")
    with torch.device("meta"):
        return getattr(module, name)(getattr(config, "ffn_config", config))


def read_expert_sizes(config: Any, module: Any) -> tuple[int, int, int, int]:
    """Return the sizes of the parameters: experts, hidden size, intermediate size, rows of w1."""
    shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
    if config.model_type == "dbrx":
        width = config.ffn_config.ffn_hidden_size
        rows, hidden = shapes["w2"]
        assert shapes["w1"] == shapes["v1"] == shapes["w2"]
        return rows // width, hidden, width, 2 * width
    if config.model_type == "jetmoe":
        experts, hidden, width = shapes["output_linear.weight"]
        return experts, hidden, width, shapes["input_linear.weight"][1]
    w1_shape = shapes.get("gate_up_proj", shapes.get("up_proj"))
    transposed = getattr(module, "is_transposed", config.model_type == "llama4_text")
    experts, *w2_shape = shapes["down_proj"]
    hidden, width = reversed(w2_shape) if transposed else w2_shape
    rows, columns = reversed(w1_shape[1:]) if transposed else w1_shape[1:]
    assert (w1_shape[0], columns) == (experts, hidden)
    return experts, hidden, width, rows


def apply_activation(config: Any, module: Any, values: torch.Tensor) -> torch.Tensor:
    """Apply the activation of the experts to (rows, 2I), or to (rows, I) if it is ungated."""
    apply = getattr(module, "_apply_gate", None)
    if config.model_type == "nemotron_h":
        return module.act_fn(values)
    if apply is not None:
        return apply(values)
    attribute = {"dbrx": "activation_fn", "jetmoe": "activation"}.get(config.model_type, "act_fn")
    gate, up = values.chunk(2, dim=-1)
    return getattr(module, attribute)(gate) * up


# Types without a class in transformers: a wrapper's config renames them, or their code is
# published with the model.
WITHOUT_CLASS = {"kimi_k2", "bailing_moe", "bailing_moe_v2", "deepseek", "step3_text"}


def list_readable_types() -> list[str]:
    return [name for name in INSTALLED if name not in REFUSED | WITHOUT_CLASS]


def find_class(kind: str) -> type:
    return next(cls for cls in find_classes_with_experts().values() if cls.model_type == kind)


def test_every_class_with_experts_is_known() -> None:
    """FAMILIES has an entry for each class with experts, and others only for WITHOUT_CLASS."""
    types = {cls.model_type for cls in find_classes_with_experts().values()}
    assert {
        name for name, cls in find_classes_with_experts().items() if not cls.model_type
    } == WITHOUT_TYPE
    types_of_layers = {
        kind for kind in types if kind and mentions_experts(list_expert_fields(kind))
    }
    assert types_of_layers == set(INSTALLED) - WITHOUT_CLASS
    assert {kind for kind, family in FAMILIES.items() if family.unsupported_reason} == REFUSED


def list_expert_fields(kind: str) -> dict[str, None]:
    config = find_class(kind)
    inner_fields = {"ffn_config": None} if kind == "dbrx" else {}
    names = [field.name for field in fields(config) if EXPERT_FIELD.search(field.name)]
    return dict.fromkeys(["moe"] if inner_fields else names)


@pytest.mark.parametrize("kind", list_readable_types())
def test_configs_are_read_as_their_experts_compute(kind: str, tmp_path: Path) -> None:
    config = make_config(find_class(kind))
    problem_fields = problem_fields_of_file(write_config(config, tmp_path / "config.json"))
    problem = Problem(tokens=1, **problem_fields)  # type: ignore[arg-type]
    module = make_experts(config)
    shape = (problem.experts, problem.hidden, problem.intermediate, problem.w1_rows)
    assert shape == read_expert_sizes(config, module)
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
    """The named classes exist, and an entry has a scaling factor if and only if the code does."""
    family = FAMILIES[kind]
    folder, *names = family.source.split()
    code = (MODELS / folder / f"modeling_{folder}.py").read_text()
    assert [name for name in names if f"class {name}(" not in code] == []
    relevant_code = code
    if folder == "dots3_note":  # The experts of its image encoder have a factor of another name.
        relevant_code = code.replace("router_scaling_factor", "")
    used_fields = {
        name for name in SCALING_FIELD.findall(relevant_code) if f"config.{name}" in relevant_code
    }
    assert used_fields <= {family.scaling.removesuffix("?")}
    assert not family.scaling or f"config.{family.scaling.removesuffix('?')}" in code


@pytest.mark.parametrize("kind", sorted(REFUSED & set(INSTALLED)))
def test_unsupported_layers_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    family = FAMILIES[kind]
    folder, name = family.source.split()
    code = (MODELS / folder / f"modeling_{folder}.py").read_text()
    assert f"class {name}(" in code
    with pytest.raises(ConfigurationError, match=re.escape(kind)) as caught:
        problem_fields_of_file(write_config(find_class(kind)(), tmp_path / "config.json"))
    assert family.unsupported_reason in str(caught.value)


def test_multimodal_models_are_read_as_their_language_models(tmp_path: Path) -> None:
    types_read = set()
    for name, cls in find_classes_with_experts().items():
        if cls.model_type in FAMILIES or name in WITHOUT_TYPE - {"Qwen3OmniMoeTalkerConfig"}:
            continue
        if cls.model_type == "vitpose":
            continue  # Its experts are in a backbone, which the next test covers.
        config = make_config(cls)
        inner = find_language_config(config)
        if FAMILIES[inner.model_type].unsupported_reason:
            with pytest.raises(ConfigurationError, match=inner.model_type):
                problem_fields_of_file(write_config(config, tmp_path / "outer.json"))
            continue
        outer = problem_fields_of_file(write_config(config, tmp_path / "outer.json"))
        assert outer == problem_fields_of_file(write_config(inner, tmp_path / "inner.json")), name
        types_read.add(cls.model_type)
    assert {"llama4", "kimi_k25", "qwen3_omni_moe", "qwen3_vl_moe", "gemma4"} <= types_read


def test_experts_of_a_backbone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="vitpose"):
        problem_fields_of_file(write_config(find_class("vitpose")(), tmp_path / "config.json"))


@pytest.mark.parametrize("kind", PUBLISHED_SIZES)
def test_published_defaults(kind: str, tmp_path: Path) -> None:
    problem_fields = problem_fields_of_file(
        write_config(find_class(kind)(), tmp_path / "config.json")
    )
    problem = Problem(tokens=1, **problem_fields)  # type: ignore[arg-type]
    sizes = (problem.experts, problem.top_k, problem.hidden, problem.intermediate)
    assert (*sizes, problem.routed_scaling_factor) == PUBLISHED_SIZES[kind]


def test_latent_size_is_the_hidden_size_of_the_experts(tmp_path: Path) -> None:
    config = find_class("nemotron_h")(moe_latent_size=1024, hidden_size=4096)
    problem_fields = problem_fields_of_file(write_config(config, tmp_path / "config.json"))
    assert problem_fields["hidden"] == 1024
    assert ActivationSpec.parse(str(problem_fields["activation"])).gated is False
    problem = Problem(tokens=1, **problem_fields)  # type: ignore[arg-type]
    shape = (problem.experts, problem.hidden, problem.intermediate, problem.w1_rows)
    assert shape == read_expert_sizes(config, make_experts(config))


def test_limits_per_layer(tmp_path: Path) -> None:
    """step3p5 has a limit per layer. The limits must be all absent or all equal."""
    cls = find_class("step3p5")
    config = json.loads(cls().to_json_string())
    path = tmp_path / "config.json"
    for limits, kind in (([0, None], "silu"), ([7.0, 7.0], "swiglu_clamp_after:limit=7.0")):
        path.write_text(json.dumps(config | {"swiglu_limits": limits}))
        assert problem_fields_of_file(str(path))["activation"] == kind
    for limits in ([7.0, 0.0], [7.0, 5.0], 7.0, ["seven"]):
        path.write_text(json.dumps(config | {"swiglu_limits": limits}))
        with pytest.raises(ConfigurationError, match="swiglu_limits"):
            problem_fields_of_file(str(path))
