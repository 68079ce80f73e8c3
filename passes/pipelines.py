"""The default orders of passes, on one screen."""

from __future__ import annotations

from autoshard.compiler.pipeline import Pipeline
from autoshard.passes.apply_precision import ApplyPrecision
from autoshard.passes.bucket_collectives import BucketCollectives
from autoshard.passes.canonicalize import Canonicalize
from autoshard.passes.cut_stages import CutStages
from autoshard.passes.fuse_add_layer_norm import FuseAddLayerNorm
from autoshard.passes.globalize_loss import GlobalizeLoss
from autoshard.passes.insert_collectives import InsertCollectives
from autoshard.passes.join_gradient_sums import JoinGradientSums
from autoshard.passes.keep_gathers import KeepGathers
from autoshard.passes.localize_shapes import LocalizeShapes
from autoshard.passes.lower_joint import LowerJoint
from autoshard.passes.lower_schedule import LowerSchedule
from autoshard.passes.mark_recompute import MarkRecompute
from autoshard.passes.overlap_collectives import OverlapCollectives
from autoshard.passes.prefetch_gathers import PrefetchGathers
from autoshard.passes.propagate_placements import PropagatePlacements
from autoshard.passes.release_gathers import ReleaseGathers
from autoshard.passes.shard_params import ShardParams
from autoshard.passes.shard_storage import ShardStorage
from autoshard.passes.split_collectives import SplitCollectives
from autoshard.passes.split_phases import SplitPhases


def default_pipeline() -> Pipeline:
    """Return the order in which every plan is compiled; a pass with nothing to do does nothing."""
    return Pipeline(
        (
            # L1: one forward graph
            Canonicalize(),
            GlobalizeLoss(),
            FuseAddLayerNorm(),
            ShardParams(),
            PropagatePlacements(),
            InsertCollectives(),
            LocalizeShapes(),
            ApplyPrecision(),
            CutStages(),
            # L2: per stage, forward and backward
            LowerJoint(),
            JoinGradientSums(),
            MarkRecompute(),
            SplitPhases(),
            OverlapCollectives(),
            ShardStorage(),
            BucketCollectives(),
            SplitCollectives(),
            PrefetchGathers(),
            ReleaseGathers(),
            # L3: per rank, a list of actions
            LowerSchedule(),
            KeepGathers(),
        )
    )
