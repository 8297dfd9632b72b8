"""TRL's `SFTTrainer` on a parallel module: supervised fine-tuning, with the loss that the model itself computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from trl import SFTTrainer

from autoparallel.errors import InputError, shown
from autoparallel.integrations.trainer import AutoparallelTraining


class AutoparallelSFTTrainer(AutoparallelTraining, SFTTrainer):
    """`trl.SFTTrainer` that plans and trains the model on all ranks; only the name changes.

    The loss is the model's own cross entropy, which equals TRL's "nll". TRL computes it by a fused head that cannot be
    traced, with entropy and token accuracy beside it: these are not logged; the number of tokens is. ``parallel``:
    options of `autoparallel.compile`.

    Raises InputError for another ``loss_type``, padding-free batches (``packing`` with its default strategy too), and
    the auxiliary loss of experts with gradient accumulation.
    """

    inherits_loss = False
    replaces = ("training_step",)    # TRL's offloads activations around it, which is refused here

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        loss, options = self.args.loss_type, self.args
        if loss not in ("nll", "chunked_nll"):
            raise InputError(f"SFTConfig(loss_type={shown(loss)}): the parallel module computes cross entropy: give "
                             "'nll', or a compute_loss_func")
        if self.padding_free:
            raise InputError("SFTConfig(padding_free=True), or packing=True with packing_strategy 'bfd': sequences one "
                             "after the other in a row are for FlashAttention: give packing_strategy='wrapped', or "
                             "leave packing out")
        if options.activation_offloading:
            raise InputError("SFTConfig(activation_offloading=True): leave it out, and give "
                             "parallel={'recompute': 'offload'}")
        if self.aux_loss_enabled and options.gradient_accumulation_steps > 1:
            raise InputError("the auxiliary loss of experts is a mean over a micro-batch: leave out "
                             "gradient_accumulation_steps, or give router_aux_loss_coef=0.0")

    def training_step(self, model: nn.Module, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the Trainer's; counts the tokens of the global batch."""
        loss = super().training_step(model, inputs, *args, **kwargs)
        mask = inputs.get("attention_mask")
        self._total_train_tokens += int(mask.sum()) if mask is not None else inputs["input_ids"].numel()
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return loss

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own: the model gives loss and logits."""
        return super(SFTTrainer, self).prediction_step(*args, **kwargs)


__all__ = ["AutoparallelSFTTrainer"]
