"""Every configuration class of the installed transformers with experts is read or refused.

The files are those that the classes write. Their meaning is checked against the modules that
compute: shapes of the experts' parameters on the meta device, and their activation on random
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
ABOUT = re.compile("expert|moe")
PROSE = re.compile(r"[a-z_]*rout(?:ed|er|e)_scal(?:ing_factor|e)")

# What a class leaves open: its defaults describe no layer.
FILLED: dict[str, dict[str, object]] = {
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
# By hand: what no parameter shows.
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
# Classes that came after the oldest release that is tested.
SINCE = {
    "hy_v4_vl_text": (5, 24),
    "inkling2_loop_text": (5, 24),
    "lara_mini": (5, 24),
    "sarvam_mla": (5, 24),
    "sarvam_moe": (5, 24),
}
RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])
HERE = {kind: family for kind, family in FAMILIES.items() if SINCE.get(kind, RELEASE) <= RELEASE}
# Made by classes without a model_type: parts of DBRX's and Qwen3-Omni's files.
NAMELESS = {"DbrxFFNConfig", "Qwen3OmniMoeTalkerConfig"}
# The numbers of the published default of some classes, from the papers and files they name.
BY_HAND = {
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


# Made with arguments only.
WITHOUT_DEFAULTS = {"Gemma4AssistantConfig", "NougatConfig"}


@cache
def config_classes() -> dict[str, type]:
    found: dict[str, type] = {}
    for path in sorted(MODELS.glob("*/configuration_*.py")):
        module = import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for name, value in vars(module).items():
            own = isinstance(value, type) and value.__module__ == module.__name__
            if own and issubclass(value, transformers.PreTrainedConfig):
                found[name] = value
    return found


def mentions(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return any(ABOUT.search(str(key)) or mentions(one) for key, one in value.items())


@cache
def with_experts() -> dict[str, type]:
    """Return the classes with fields about experts, in themselves or in a part."""
    found = {}
    for name, cls in config_classes().items():
        try:
            has = mentions(cls().to_dict())
        except (ValueError, StrictDataclassError):
            assert name in WITHOUT_DEFAULTS
            has = any(ABOUT.search(field.name) for field in fields(cls))
        if has:
            found[name] = cls
    return found


def written(config: Any, path: Path) -> str:
    path.write_text(config.to_json_string())
    return str(path)


def language_of(config: Any) -> Any:
    """Return the part of a configuration that the reader should find."""
    for _ in range(3):
        if config.model_type in FAMILIES:
            return config
        config = getattr(config, "thinker_config", None) or config.text_config
    raise AssertionError("no part of a known type")


def made(cls: type) -> Any:
    """Return an instance with all sizes set, in itself or in its language model."""
    config = cls(**FILLED.get(cls.model_type, {}))
    inside = getattr(config, "text_config", None)
    more = FILLED.get(getattr(inside, "model_type", ""), {})
    return cls(text_config={"model_type": inside.model_type, **more}) if more else config


def experts_of(config: Any) -> Any:
    """Return the experts module, on the meta device."""
    folder, name, *_ = FAMILIES[config.model_type].source.split()
    module = import_module(f"transformers.models.{folder}.modeling_{folder}")
    with torch.device("meta"):
        return getattr(module, name)(getattr(config, "ffn_config", config))


def shape_of(config: Any, module: Any) -> tuple[int, int, int, int]:
    """Return the numbers of experts, hidden, intermediate and w1 rows, from the parameters."""
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


def gated(config: Any, module: Any, values: torch.Tensor) -> torch.Tensor:
    """Return the experts' own activation of (rows, 2I), or of (rows, I) if they are ungated."""
    apply = getattr(module, "_apply_gate", None)
    if config.model_type == "nemotron_h":
        return module.act_fn(values)
    if apply is not None:
        return apply(values)
    act = {"dbrx": "activation_fn", "jetmoe": "activation"}.get(config.model_type, "act_fn")
    gate, up = values.chunk(2, dim=-1)
    return getattr(module, act)(gate) * up


# Types that a wrapper renames, or of code that is published beside the model.
WITHOUT_CLASS = {"kimi_k2", "bailing_moe", "bailing_moe_v2", "deepseek", "step3_text"}


def readable() -> list[str]:
    return [name for name in HERE if name not in REFUSED | WITHOUT_CLASS]


def class_of(kind: str) -> type:
    return next(cls for cls in with_experts().values() if cls.model_type == kind)


def test_every_class_with_experts_is_known() -> None:
    """The table has no other entries, except for WITHOUT_CLASS."""
    types = {cls.model_type for cls in with_experts().values()}
    assert {name for name, cls in with_experts().items() if not cls.model_type} == NAMELESS
    leaves = {kind for kind in types if kind and mentions(own_fields(kind))}
    assert leaves == set(HERE) - WITHOUT_CLASS
    assert {kind for kind, family in FAMILIES.items() if family.unsupported} == REFUSED


def own_fields(kind: str) -> dict[str, None]:
    config = class_of(kind)
    inside = {"ffn_config": None} if kind == "dbrx" else {}
    names = [field.name for field in fields(config) if ABOUT.search(field.name)]
    return dict.fromkeys(["moe"] if inside else names)


@pytest.mark.parametrize("kind", readable())
def test_a_class_is_read_as_its_experts_compute(kind: str, tmp_path: Path) -> None:
    config = made(class_of(kind))
    facts = problem_fields_of_file(written(config, tmp_path / "config.json"))
    problem = Problem(tokens=1, **facts)  # type: ignore[arg-type]
    module = experts_of(config)
    shape = (problem.experts, problem.hidden, problem.intermediate, problem.w1_rows)
    assert shape == shape_of(config, module)
    names = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k")
    inner = getattr(config, "ffn_config", config)
    top_k = [getattr(inner, n) for n in (*names, "moe_top_k") if hasattr(inner, n)]
    assert problem.top_k == top_k[0]
    assert problem.bias == bool(getattr(module, "has_bias", False))
    assert problem.apply_router_weight_on_input == (kind in ON_INPUT)
    assert not getattr(module, "has_post_expert_norm", False)
    values = 4 * torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    expected = gated(config, module, values)
    torch.testing.assert_close(activation(values, problem.act), expected)


@pytest.mark.parametrize("kind", readable())
def test_the_table_agrees_with_the_sources(kind: str) -> None:
    """The named classes exist, and a factor is read exactly where the source uses one."""
    family = FAMILIES[kind]
    folder, *names = family.source.split()
    code = (MODELS / folder / f"modeling_{folder}.py").read_text()
    assert [name for name in names if f"class {name}(" not in code] == []
    own = code
    if folder == "dots3_note":  # its other experts, of images, have a factor of another name
        own = code.replace("router_scaling_factor", "")
    used = {found for found in PROSE.findall(own) if f"config.{found}" in own}
    assert used <= {family.scaling.removesuffix("?")}
    assert not family.scaling or f"config.{family.scaling.removesuffix('?')}" in code


@pytest.mark.parametrize("kind", sorted(REFUSED & set(HERE)))
def test_unsupported_layers_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    family = FAMILIES[kind]
    folder, name = family.source.split()
    code = (MODELS / folder / f"modeling_{folder}.py").read_text()
    assert f"class {name}(" in code
    with pytest.raises(ConfigurationError, match=re.escape(kind)) as caught:
        problem_fields_of_file(written(class_of(kind)(), tmp_path / "config.json"))
    assert family.unsupported in str(caught.value)


def test_a_model_of_several_inputs_is_read_as_its_language_model(tmp_path: Path) -> None:
    read = set()
    for name, cls in with_experts().items():
        if cls.model_type in FAMILIES or name in NAMELESS - {"Qwen3OmniMoeTalkerConfig"}:
            continue
        if cls.model_type == "vitpose":
            continue  # below: its experts are no language model's
        config = made(cls)
        inner = language_of(config)
        if FAMILIES[inner.model_type].unsupported:
            with pytest.raises(ConfigurationError, match=inner.model_type):
                problem_fields_of_file(written(config, tmp_path / "outer.json"))
            continue
        outer = problem_fields_of_file(written(config, tmp_path / "outer.json"))
        assert outer == problem_fields_of_file(written(inner, tmp_path / "inner.json")), name
        read.add(cls.model_type)
    assert {"llama4", "kimi_k25", "qwen3_omni_moe", "qwen3_vl_moe", "gemma4"} <= read


def test_experts_of_a_backbone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="vitpose"):
        problem_fields_of_file(written(class_of("vitpose")(), tmp_path / "config.json"))


@pytest.mark.parametrize("kind", BY_HAND)
def test_published_defaults(kind: str, tmp_path: Path) -> None:
    facts = problem_fields_of_file(written(class_of(kind)(), tmp_path / "config.json"))
    problem = Problem(tokens=1, **facts)  # type: ignore[arg-type]
    sizes = (problem.experts, problem.top_k, problem.hidden, problem.intermediate)
    assert (*sizes, problem.routed_scaling_factor) == BY_HAND[kind]


def test_the_latent_size_is_the_hidden_size_of_the_experts(tmp_path: Path) -> None:
    config = class_of("nemotron_h")(moe_latent_size=1024, hidden_size=4096)
    facts = problem_fields_of_file(written(config, tmp_path / "config.json"))
    assert facts["hidden"] == 1024
    assert ActivationSpec.parse(str(facts["activation"])).gated is False
    problem = Problem(tokens=1, **facts)  # type: ignore[arg-type]
    shape = (problem.experts, problem.hidden, problem.intermediate, problem.w1_rows)
    assert shape == shape_of(config, experts_of(config))


def test_limits_of_a_layer(tmp_path: Path) -> None:
    """step3p5 has a limit per layer: none, the same for all, or a refusal."""
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
