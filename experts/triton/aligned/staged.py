"""The backend "triton" of the staged runner: the aligned path as three separate stages.

`modular_kernel.runner` composes a layer from a pre-permute stage, a core stage and a post-permute
stage, as SGLang's MoE runner does. In this backend, pre-permute sorts the pairs into blocks of one
expert, the core runs both GEMMs, and post-permute computes the weighted sum. `TritonExperts` is the
fused function that replaces all three stages. It may use other paths.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from experts.staged import make_experts
from experts.triton.aligned.aligned_path import AlignedPath
from experts.triton.configs.select import buffer_kinds_up_to, choose_config
from experts.triton.path import PathCall, merge_workspaces
from experts.triton.standard import TritonExperts, config_for_strides
from modular_kernel.ops.align import AlignedPairs
from modular_kernel.runner import (
    MoeRunnerCore,
    NoState,
    RunnerCall,
    RunnerInput,
    RunnerOutput,
    register_core,
    register_fused_func,
    register_post_permute,
    register_pre_permute,
)
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import DispatchShape, StandardShape, StandardTokens
from modular_kernel.workspace import BufferSpec

BACKEND = "triton"
_PATHS = (AlignedPath.name,)


@dataclass(frozen=True)
class TritonRunnerInput(RunnerInput):
    """Tokens, their routing, and their pairs sorted into blocks of one expert each.

    hidden_states: (T, H).
    topk_weights: (T, K) float32; None if they have been applied to the input.
    topk_ids: (T, K).
    sorted_token_ids, expert_ids, num_tokens_post_padded: int32, see `ops.align.AlignedPairs`.
    """

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor | None
    topk_ids: torch.Tensor
    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_tokens_post_padded: torch.Tensor

    @property
    def runner_backend(self) -> str:
        """The name of this backend."""
        return BACKEND


@dataclass(frozen=True)
class TritonRunnerOutput(RunnerOutput):
    """The output of the core stage.

    hidden_states is (T * K, H), with one row per pair. Router weights are not applied yet, unless
    the problem applies them to the input.
    """

    hidden_states: torch.Tensor

    @property
    def runner_backend(self) -> str:
        """The name of this backend."""
        return BACKEND


@register_core(BACKEND)
class TritonRunnerCore(MoeRunnerCore[NoState]):
    """The core stage: GEMM 1, the activation, quantization for some schemes, and GEMM 2."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._path = AlignedPath(problem)

    def workspace_shapes(self, shape: DispatchShape) -> Mapping[str, BufferSpec]:
        assert isinstance(shape, StandardShape)
        kinds = buffer_kinds_up_to(self.problem, shape.tokens, _PATHS)
        specs = (self._path.specs(max_tokens, block_m) for max_tokens, _, block_m in kinds)
        return merge_workspaces(self.problem, shape, specs).buffers()

    def run(self, runner_input: TritonRunnerInput, call: RunnerCall[NoState]) -> TritonRunnerOutput:
        aligned = AlignedPairs(
            runner_input.sorted_token_ids,
            runner_input.expert_ids,
            runner_input.num_tokens_post_padded,
        )
        return TritonRunnerOutput(self._path.run_gemms(aligned, make_path_call(call)))


@register_pre_permute("standard", BACKEND)
def standard_to_triton(call: RunnerCall[NoState]) -> TritonRunnerInput:
    """Run the pre-permute stage: sort the pairs into blocks of one expert each."""
    path_call = make_path_call(call)
    aligned, routing = AlignedPath(call.problem).align(path_call), path_call.tokens.routing
    return TritonRunnerInput(
        path_call.tokens.x_TH, routing.topk_weights_TK, routing.topk_ids_TK, **vars(aligned)
    )


@register_post_permute(BACKEND, "standard")
def triton_to_standard(result: TritonRunnerOutput, call: RunnerCall[NoState]) -> None:
    """Run the post-permute stage: apply router weights and sum over top-k."""
    AlignedPath(call.problem).write_output(result.hidden_states, make_path_call(call))


def make_path_call(call: RunnerCall[NoState]) -> PathCall:
    """Convert a runner call to a PathCall with its launch configuration."""
    assert isinstance(call.tokens, StandardTokens)
    config = choose_config(call.problem, len(call.tokens.x_TH), _PATHS)
    config = config_for_strides(AlignedPath(call.problem), config, call.weights)
    return PathCall(call.tokens, call.weights, call.workspace, call.output, config)


StagedTritonExperts = make_experts(
    "StagedTritonExperts", BACKEND, "standard",
    **{
        name: value
        for name, value in vars(TritonExperts.requires).items()
        if name != "activation_format"
    },
)  # fmt: skip
register_fused_func("none", BACKEND, unfused=StagedTritonExperts)(TritonExperts)
