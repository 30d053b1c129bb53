"""Program of one of two ranks: runs small models that transformers splits over the ranks.

The models use the experts of this package. The argument is a folder of models. Rank 0 prints a line
of JSON with the results of `run` on each rank.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from modular_kernel.integrations.transformers import register, registration

DISTRIBUTED = {
    "tp": {"tp_size": 2},
    "ep all_reduce": {"tp_size": 2, "ep_size": 2},
    "ep all_to_all": {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_to_all"},
}


def load_model(folder: Path, name: str, **options: object) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation=name, **options
    )


def run(folder: Path, kind: str, ids: torch.Tensor) -> dict[str, object]:
    """Run a model over the ranks and in one process; return the differences of the results.

    kind: key of DISTRIBUTED. The entry `kernels` of the result has the experts, top-k and
    intermediate size of each kernel.
    """
    name = register("MoEPrepareAndFinalizeNoEP", "TorchExperts")
    reference = load_model(folder, name)
    results: dict[str, object] = {"model": folder.name, "kind": kind}
    model = load_model(folder, name, distributed_config=DistributedConfig(**DISTRIBUTED[kind]))
    registration(name).kernels.clear()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        kernels = [kernel.problem for kernel in registration(name).kernels.values()]
        tokens = model.generate(ids, max_new_tokens=6, do_sample=False)
        expected_logits = reference(input_ids=ids, use_cache=False).logits
        expected_tokens = reference.generate(ids, max_new_tokens=6, do_sample=False)
        if kind == "tp" and folder.name == "mixtral":
            compiled = torch.compile(model, fullgraph=True, backend="eager")
            compiled_logits = compiled(input_ids=ids, use_cache=False).logits
            results["compiled"] = float((compiled_logits - logits).abs().max())
    results["difference"] = float((logits - expected_logits).abs().max())
    results["tokens"] = torch.equal(tokens, expected_tokens)
    results["kernels"] = sorted({(p.experts, p.top_k, p.intermediate) for p in kernels})
    return results


def main() -> None:
    transformers.logging.set_verbosity_error()
    # transformers requires accelerate for a device map, but does not use it with one device.
    transformers.integrations.accelerate.is_accelerate_available = lambda *_: True
    dist.init_process_group("gloo")
    folders, ids = sorted(Path(sys.argv[1]).iterdir()), torch.arange(9)[None]
    results = [run(folder, kind, ids) for folder in folders for kind in DISTRIBUTED]
    results_of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(results_of_ranks, results)
    if dist.get_rank() == 0:
        sys.stdout.write(f"found {json.dumps(results_of_ranks)}\n")
    dist.destroy_process_group()


main()
