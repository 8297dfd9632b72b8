"""Steps in turns and in stages. See README.md."""

from autoparallel.partition.microbatch import MicroBatches, split_batch
from autoparallel.partition.stages import Stages, place_cuts, stages_of
from autoparallel.partition.zero import Ungathered, stored_in_pieces
from autoparallel.planning.recompute import blocks_by_stage, fewest_recomputed
from autoparallel.planning.stage_replicas import is_uneven, on_several_ranks

__all__ = ["MicroBatches", "Stages", "Ungathered", "blocks_by_stage", "fewest_recomputed", "is_uneven",
           "on_several_ranks", "place_cuts", "split_batch", "stages_of", "stored_in_pieces"]
