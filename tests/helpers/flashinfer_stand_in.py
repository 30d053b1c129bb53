"""FlashInferCutlassMoEPrepareAndFinalize on gloo ranks, with stand-ins for the library.

`library` has the class of releases until 0.7.2, and `library_moe_ep` the class of 0.7.4.
"""

import sys
from dataclasses import replace
from pathlib import Path

from prepare_finalize import FlashInferCutlassMoEPrepareAndFinalize, FlashInferGroup

FOLDER = Path(__file__).parent / "stand_ins"
if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))

import flashinfer_comm as library  # noqa: E402
import flashinfer_moe_ep as library_moe_ep  # noqa: E402


class GlooGroup(FlashInferGroup):
    """A FlashInferGroup on a CPU that uses a stand-in."""

    device = "cpu"
    stand_in = library

    def __init__(self, group=None, **options):
        super().__init__(group, library=self.stand_in, **options)


class GlooGroupMoeEp(GlooGroup):
    stand_in = library_moe_ep


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


class FlashInferMoeEpOverGloo(FlashInferOverGloo):
    """The part, with the stand-in for 0.7.4."""

    manager_class = GlooGroupMoeEp
