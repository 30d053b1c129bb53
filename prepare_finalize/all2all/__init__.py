"""All2all managers: what belongs to a process group, made, kept and destroyed in one place."""

from prepare_finalize.all2all.deepep import DeepEPGroup
from prepare_finalize.all2all.symmetric import SymmetricGroup
from prepare_finalize.all2all.torch_group import Exchange, TorchGroup

__all__ = ["DeepEPGroup", "Exchange", "SymmetricGroup", "TorchGroup"]
