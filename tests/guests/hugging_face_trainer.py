"""transformers' Trainer with a tiny random model and random tokens; rank 0 prints the loss of each step."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed


class PrintLosses(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in (logs or {}):
            print(f"step {state.global_step} loss {float(logs['loss']):.9f}", flush=True)


def main() -> None:
    set_seed(7)
    tokens = torch.randint(0, 64, (32, 16))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=5,
            per_device_train_batch_size=4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[PrintLosses()])
        trainer.train()


if __name__ == "__main__":
    sys.exit(main())
