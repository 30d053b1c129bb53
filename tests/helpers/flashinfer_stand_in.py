"""FlashInferCutlassMoEPrepareAndFinalize on gloo ranks, with a stand-in for the library."""

import sys
from dataclasses import replace
from pathlib import Path

from prepare_finalize import FlashInferCutlassMoEPrepareAndFinalize, FlashInferGroup

FOLDER = Path(__file__).parent / "stand_ins"
if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))

import flashinfer_comm as library  # noqa: E402


class GlooGroup(FlashInferGroup):
    """A FlashInferGroup on a CPU that uses the stand-in."""

    device = "cpu"

    def __init__(self, group=None, **options):
        super().__init__(group, library=library, **options)


class FlashInferOverGloo(FlashInferCutlassMoEPrepareAndFinalize):
    """The part, on a CPU and with the stand-in."""

    requires = replace(
        FlashInferCutlassMoEPrepareAndFinalize.requires,
        devices=frozenset({"cpu"}),
        min_arch=None,
        packages=(),
        providers=(),
    )
    manager_class = GlooGroup
