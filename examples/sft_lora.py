"""Supervised fine-tuning by LoRA with TRL's SFTTrainer: the losses of completions, adapters saved, resumed and merged.

    autoparallel launch --ranks 4 -- python sft_lora.py --output_dir out --max_steps 8 --per_device_train_batch_size 2
"""

from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig

from autoparallel.integrations import AutoparallelSFTTrainer as SFTTrainer  # was: from trl import SFTTrainer

WORDS = ["<pad>", "<eos>", *map(str, range(60)), "times", "is"]


def pretrained() -> LlamaForCausalLM:
    """In a job: AutoModelForCausalLM.from_pretrained("meta-llama/...")."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, eos_token_id=1,
                                        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))


def tokens() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def main() -> None:
    (args,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses()
    rows = Dataset.from_list([{"prompt": f"{a} times {b}", "completion": f" is {a * b}"}
                              for a in range(1, 9) for b in range(1, 8)])
    trainer = SFTTrainer(model=pretrained(), args=args, train_dataset=rows, eval_dataset=rows.select(range(8)),
                         processing_class=tokens(),
                         peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    last_checkpoint = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    trainer.train(resume_from_checkpoint=last_checkpoint)
    trainer.save_model(f"{args.output_dir}/adapters")
    evaluated = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        merged = PeftModel.from_pretrained(pretrained(), f"{args.output_dir}/adapters").merge_and_unload()
        merged.save_pretrained(f"{args.output_dir}/merged")
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']} {float(entry['loss']):.7f}")
        print(f"final {evaluated:.7f}")


if __name__ == "__main__":
    main()
