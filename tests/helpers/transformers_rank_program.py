"""One rank of two: small models, shared among ranks as transformers does, on our experts.

Arguments: a folder of models. Prints one JSON line: what differs from the model in one process.
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

SHARED = {
    "tp": {"tp_size": 2},
    "ep all_reduce": {"tp_size": 2, "ep_size": 2},
    "ep all_to_all": {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_to_all"},
}


def loaded(folder: Path, name: str, **options: object) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation=name, **options
    )


def run(folder: Path, kind: str, ids: torch.Tensor) -> dict[str, object]:
    """One model shared one way. kernels: the experts, top-k and I that ours were built for."""
    name = register("MoEPrepareAndFinalizeNoEP", "TorchExperts")
    alone, found = loaded(folder, name), {"model": folder.name, "kind": kind}
    shared = loaded(folder, name, distributed_config=DistributedConfig(**SHARED[kind]))
    registration(name).kernels.clear()
    with torch.no_grad():
        got = shared(input_ids=ids, use_cache=False).logits
        kernels = [kernel.problem for kernel in registration(name).kernels.values()]
        tokens = shared.generate(ids, max_new_tokens=6, do_sample=False)
        want = alone(input_ids=ids, use_cache=False).logits
        same = alone.generate(ids, max_new_tokens=6, do_sample=False)
        if kind == "tp" and folder.name == "mixtral":
            compiled = torch.compile(shared, fullgraph=True, backend="eager")
            again = compiled(input_ids=ids, use_cache=False).logits
            found["compiled"] = float((again - got).abs().max())
    found["difference"] = float((got - want).abs().max())
    found["tokens"] = torch.equal(tokens, same)
    found["kernels"] = sorted({(p.experts, p.top_k, p.intermediate) for p in kernels})
    return found


def main() -> None:
    transformers.logging.set_verbosity_error()
    # It is asked for whenever a device map is, and does nothing for a model on one device.
    transformers.integrations.accelerate.is_accelerate_available = lambda *_: True
    dist.init_process_group("gloo")
    folders, ids = sorted(Path(sys.argv[1]).iterdir()), torch.arange(9)[None]
    found = [run(folder, kind, ids) for folder in folders for kind in SHARED]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        sys.stdout.write(f"found {json.dumps(everyone)}\n")
    dist.destroy_process_group()


main()
