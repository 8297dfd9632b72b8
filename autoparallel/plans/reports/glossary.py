"""The field's words, for readers who are new to them."""

from autoparallel.plans.reports.report import LAUNCHED

GLOSSARY = {
    "data parallel": "Each rank has its own rows of the batch and all layers; gradients are summed over the ranks.",
    "tensor parallel": "Each rank has some columns, rows or heads of every weight; activations are exchanged in each "
                       "layer.",
    "sequence parallel": "On a tensor-parallel axis, norms and residuals are cut along the sequence between the "
                         "products.",
    "context parallel": "Each rank has a part of every sequence; attention exchanges keys and values in a ring, or "
                        "has all of a sequence for some of the heads (all-to-all, as DeepSpeed-Ulysses).",
    "expert parallel": "Each rank has some of the experts; tokens travel to them and back.",
    "pipeline parallel": "Each rank has some of the layers; micro-batches pass from stage to stage.",
    "ZeRO": "Parameters, gradients and optimizer state are stored in shards over data-parallel ranks. Stage 1 gathers "
            "parameters and sums gradients once a step, stage 2 sums gradients for each micro-batch, stage 3 (FSDP) "
            "gathers for each use.",
    "micro-batch": "A part of the batch. Micro-batches run one after the other, or several at a time (multi-copy), and "
                   "their gradients add up.",
    "recompute": "Backward runs a block's forward again instead of keeping its results.",
    "exposed communication": "Seconds in which ranks exchange data and compute nothing.",
    "hidden communication": "Seconds saved because ranks exchange data while they compute.",
    LAUNCHED: "Compute counts each kernel with its launch; hosts launch kernels while earlier ones run, which takes no "
              "time.",
    "memory limit": "What a plan's tensors may take on a device: the limit that was given, or the device's memory less "
                    "the process's own, communicators, the allocator's fragments, and room for predictions that are "
                    "too low (memory_confidence: 95 % of runs fit).",
    "framework": "Seconds that the training software takes for each step and each micro-batch, beside ops and "
                 "communication (fitted to published runs).",
    "multi-copy": "A rank runs several micro-batches at a time: one's activations are sent while another computes, or "
                  "all run a block before the next one, so that its parameters are gathered once.",
    "zero bubble": "A pipeline schedule that computes gradients of weights later, in place of most of the bubble.",
    "HSDP": "Hybrid sharded data parallel: shards within groups of ranks, copies between groups.",
    "combination": "Pipeline, mesh, micro-batches, ZeRO and recompute together. For each the search finds the "
                   "sharding, the best of this configuration.",
    "by hand": "A plan as people write it for Megatron-LM or FSDP, given as --by-hand takes it, and priced by the same "
               "functions.",
    "launched ahead": "Hosts launch kernels while devices still compute: seconds of launches that would be exposed "
                      "otherwise.",
    "bubble": "Seconds in which a pipeline's rank waits for its first, or after its last, micro-batch.",
    "software": "The training software whose kernels, launches and overlap the times are of, fitted to published runs "
                "of it. Another: --software, or Cluster.load(name, software=...).",
    "token": "What a step counts where the model has attention and a table of tokens: each lookup in that table, of an "
             "encoder and of a decoder. A token passes only one of the two, so FLOPs (and MFU) are not 6 x "
             "parameters x tokens there.",
    "MFU": "Model FLOPs utilisation: FLOPs that the model needs in a step / (step seconds x devices x a device's "
           "peak). Products, convolutions and attention count, forward once, backward at twice that; causal attention "
           "at the half that it computes.",
    "HFU": "Hardware FLOPs utilisation: as MFU, of the FLOPs that devices run, with recompute and repeated work.",
    "p50, p90": "Half, and nine in ten, of the predictions of this kind were off by no more than this share of the "
                "measured step, above or below it (two-sided: of ten steps one is outside, too slow or too fast). The "
                "seconds given are the ends: prediction / (1 + p90) and prediction / (1 - p90).",
    "bound": "Seconds that no plan can be below; what lies between it and the best plan is not proven either way.",
    "S(d), R, I, P": "Layouts, one for each mesh axis: a shard of dim d, S(d;k) a shard of each of its k parts (fused "
                     "projections); replicated (R: ranks change it differently in backward, I: they do not); a "
                     "partial sum.",
}
