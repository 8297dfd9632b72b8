"""One program -> programs of micro-batches and pipeline stages; ZeRO storage. See README.md."""

from autoparallel.partition.microbatch import MicroBatches, Splits, split_batch
from autoparallel.partition.stages import Stages, bytes_at_cuts, cuts_by_blocks, place_cuts, stages_of
from autoparallel.partition.zero import Ungathered, stored_sharded

__all__ = ["MicroBatches", "Splits", "Stages", "Ungathered", "bytes_at_cuts", "cuts_by_blocks", "place_cuts",
           "split_batch", "stages_of", "stored_sharded"]
