"""The registry of published models: its names and layers, and `mk models`."""

import json
import re
from pathlib import Path

import pytest
from run_mk import run_mk

from modular_kernel.catalog import check_all
from modular_kernel.cli.presets import MODEL_OF_SHAPE, SHAPES, is_known_model, load_problem_fields
from modular_kernel.errors import ConfigurationError
from modular_kernel.models.families import FAMILIES
from modular_kernel.models.registry import ALIASES, MODELS
from modular_kernel.spec.problem import Machine, Problem

INT4 = "int4_w4a16_group:group=32"


def test_each_name_is_one_layer() -> None:
    assert len(MODELS) >= 30
    sources = [model.source for model in MODELS.values()]
    assert len(set(sources)) == len(sources)
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", source) for source in sources)
    assert not [source for source in sources if re.search(r"NVFP4|AWQ|GPTQ|FP8|INT4", source)]
    assert not set(MODELS) & set(ALIASES) | set(SHAPES) & (set(MODELS) | set(ALIASES))
    for name, model in MODELS.items():
        problem = Problem(tokens=1, **load_problem_fields(name))  # type: ignore[arg-type]
        assert problem.top_k <= problem.experts
        assert (
            load_problem_fields(model.source)
            == load_problem_fields(name.upper())
            == load_problem_fields(name)
        )
    for alias, name in ALIASES.items():
        assert load_problem_fields(alias) == load_problem_fields(name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "kimi-k2",
            "T1-H7168-I2048-E384-K8-bfloat16-quant=fp8_w8a8_block-routed_scaling_factor=2.827",
        ),
        (
            "kimi-k2.6",
            f"T1-H7168-I2048-E384-K8-bfloat16-quant={INT4}-routed_scaling_factor=2.827",
        ),
        ("glm-5", "T1-H6144-I2048-E256-K8-bfloat16-routed_scaling_factor=2.5"),
        ("llama-4-scout", "T1-H5120-I8192-E16-K1-bfloat16-apply_router_weight_on_input"),
        (
            "nemotron-3-super",
            "T1-H1024-I2688-E512-K22-bfloat16-activation=relu2-routed_scaling_factor=5.0",
        ),
        ("qwen3-next-80b-a3b", "T1-H2048-I512-E512-K10-bfloat16"),
        ("gemma-4-26b-a4b", "T1-H2816-I704-E128-K8-bfloat16-activation=gelu_tanh"),
        ("qwen3_30b", "T1-H2048-I768-E128-K8-bfloat16"),
        ("gptoss", "T1-H2880-I2880-E128-K4-bfloat16"),
    ],
)
def test_layer_of_a_name(name: str, expected: str) -> None:
    assert str(Problem(tokens=1, **load_problem_fields(name))) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_has_a_compatible_pairing(name: str) -> None:
    problem = Problem(tokens=1, **load_problem_fields(name))  # type: ignore[arg-type]
    for machine in (Machine(), Machine("cuda", (9, 0), frozenset({"triton"}))):
        assert any(check_all(problem, machine)), problem


def test_shapes_have_the_sizes_of_their_models() -> None:
    published_sizes = {(m.experts, m.top_k, m.hidden, m.intermediate) for m in MODELS.values()}
    published = {name for name, sizes in SHAPES.items() if tuple(sizes.values()) in published_sizes}
    assert published <= set(MODEL_OF_SHAPE) <= set(SHAPES)
    for name, description in MODEL_OF_SHAPE.items():
        model, _, split = description.partition(", ")
        published_model, (kind, ranks) = MODELS[model], (split or "TP 1").split()
        experts = published_model.experts // (int(ranks) if kind == "EP" else 1)
        intermediate = published_model.intermediate // (int(ranks) if kind == "TP" else 1)
        assert tuple(SHAPES[name].values()) == (
            experts,
            published_model.top_k,
            published_model.hidden,
            intermediate,
        )


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("glm-4.5-air", "glm_4_5_air"),
        ("gptoss-20b", "gpt-oss-20b"),
        ("Mixtral_8x7B", "mixtral-8x7b"),
        ("qwen3_30b", "qwen3_30b"),
    ],
)
def test_names_are_found_with_any_separator(spelling: str, name: str) -> None:
    assert load_problem_fields(spelling) == load_problem_fields(name)
    assert is_known_model(spelling)


@pytest.mark.parametrize(
    ("name", "need"),
    [
        ("mixtral-8x7", "need mixtral-8x7b or"),
        ("olmoe", "need olmoe-1b-7b or"),
        ("granite", "need granite-3.1-1b-a400m or granite-3.1-3b-a800m or"),
        ("zzz", "need a name of `mk models`, or the path of a config.json"),
        ("Qwen/Qwen9-1T", "need its config.json (hf download Qwen/Qwen9-1T config.json)"),
    ],
)
def test_errors_about_unknown_names_suggest_similar_names(name: str, need: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(need)):
        load_problem_fields(name)


def test_folders_must_be_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigurationError, match=r"need \./mine for the folder"):
        load_problem_fields("mine")


def test_models_are_listed_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_mk(capsys, "models")
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 80
    assert re.search(
        r"^ llama-4-scout +16 +1 +5120 +8192  none +weighted input *$", result.out, re.M
    )
    assert re.search(r"^ kimi-k2.5 +384 +8 +7168 +2048  int4 +output x 2.827 *$", result.out, re.M)
    assert "fp8 is fp8_w8a8_block, mxfp4 is mxfp4_w4a16, int4 is int4_w4a16_group:group=32." in (
        result.out
    )
    names = {line.split()[0] for line in result.out.splitlines() if line.strip()}
    assert names >= set(MODELS) | set(ALIASES) | set(SHAPES)
    for explanation in (
        "E: number of experts. K: experts per token (top-k). H: hidden size",
        "I: intermediate size",
    ):
        assert explanation in result.out
    assert re.search(r"^ mixtral +8 +2 +4096 +14336  mixtral-8x7b *$", result.out, re.M)
    assert re.search(r"^ qwen3-30b +qwen3-30b-a3b *$", result.out, re.M)
    models = json.loads(run_mk(capsys, "models", "--json").out)["models"]
    assert models["kimi-k2"]["source"] == "moonshotai/Kimi-K2-Instruct"
    assert models["kimi-k2"]["quant"] == "fp8_w8a8_block"
    assert models["mixtral-8x7b"]["quant"] == "none"
    assert set(models) == set(MODELS)
    assert json.loads(run_mk(capsys, "models", "--types", "--json").out).keys() == FAMILIES.keys()
    assert "refused" in run_mk(capsys, "models", "--types").out
