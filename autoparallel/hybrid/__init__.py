"""Steps in turns and in stages. See README.md."""

from autoparallel.hybrid.microbatch import MicroBatches, split_batch
from autoparallel.hybrid.recompute import blocks_by_stage, fewest_recomputed
from autoparallel.hybrid.replicas import is_uneven, on_several_ranks
from autoparallel.hybrid.stages import Stages, place_cuts, stages_of
from autoparallel.hybrid.zero import Ungathered, stored_in_pieces

__all__ = ["MicroBatches", "Stages", "Ungathered", "blocks_by_stage", "fewest_recomputed", "is_uneven",
           "on_several_ranks", "place_cuts", "split_batch", "stages_of", "stored_in_pieces"]
