"""The guests: which program of which clone, with which arguments, on which data that we make.

A line of the table `GUESTS` is all that one more program takes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

Change = tuple[str, str]
"""A regular expression, line by line, and its replacement."""

NO_GPU: tuple[Change, ...] = (
    (r"torch\.cuda\.set_device\(.*\)", "None"),
    (r"torch\.accelerator\.set_device_index\(.*\)", "None"),
    (r"torch\.accelerator\.is_available\(\)", "True"),
    (r"torch\.accelerator\.device_count\(\)", "8"),
    (r"torch\.accelerator\.current_accelerator\(\)", "torch.device('cpu')"),
    (r"""f(["'])(cuda|\{self\.acc\}|\{acc\}):\{[\w.]+\}\1""", "'cpu'"),
    (r"""(["'])nccl\1""", "'gloo'"),
    (r", device_id=device\b", ""),
    (r"device_ids\s*=\s*\[[^\]]*\]", "device_ids=None"),
    (r"\.to\((self\.)?(gpu_id|local_rank|rank)\)", ".to('cpu')"),
)
"""The changes with which a program that asks for a GPU for each rank runs without."""
PRINT_LOSS: Change = (r"^( +)(loss\.backward\(\))", r"\1print(f'loss {loss.item():.9f}', flush=True); \2")
PRINT_SUM: Change = (r"^( +)(loss\.backward\(\))", r"\1print(f'sum {output.sum().item():.9f}', flush=True); \2")
"""For a program whose loss is always 0."""
SEED: Change = (r"^( +)(torch\.distributed\.)?(init_process_group\(.*\))", r"\g<0>; torch.manual_seed(7)")


class Guest(NamedTuple):
    """A program that was written for torchrun."""

    name: str
    repository: str
    """Its owner and name; the clone is in a folder of that name."""
    words: str
    """The program and its arguments, as torchrun and ``%mesh run`` take them."""
    losses: str
    """A regular expression whose groups are the numbers that are compared."""
    folder: str = "."
    """The folder in the clone that it runs in."""
    prepare: Callable[[Path], None] = lambda folder: None
    """Makes data in a copy of that folder."""
    changes: tuple[Change, ...] = ()
    """Beyond `NO_GPU`: to print losses, to make them comparable."""
    changed: str = "**/*.py"
    """The files that changes are made in."""
    note: str = ""
    """How its changes go beyond those that all programs get."""
    needs: tuple[str, ...] = ()
    """The packages that it imports beyond torch, whose versions are told."""


def random_tokens(folder: Path) -> None:
    """Write random tokens as nanoGPT's prepared data."""
    import numpy

    data = folder / "data" / "random"
    data.mkdir(parents=True)
    for name in ("train.bin", "val.bin"):
        numpy.random.default_rng(7).integers(0, 256, 20_000, dtype=numpy.uint16).tofile(data / name)


def sentences(count: int) -> list[str]:
    """Return sentences of random words."""
    chosen = random.Random(7)
    words = ["mesh", "rank", "host", "cell", "loss", "step", "shard", "group"]
    return [" ".join(chosen.choices(words, k=8)) for _ in range(count)]


def pairs_of_sentences(folder: Path) -> None:
    """Write GLUE's MRPC, its metric and BERT, all tiny and random, where the Hugging Face Hub's names lead offline."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    data = folder / "nyu-mll" / "glue"
    data.mkdir(parents=True)
    for split, count in (("train", 96), ("validation", 40)):
        texts = sentences(2 * count)
        rows = [
            {"sentence1": first, "sentence2": second, "label": number % 2, "idx": number}
            for number, (first, second) in enumerate(zip(texts[:count], texts[count:], strict=True))
        ]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "validation"))
    (data / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n")
    (folder / "glue").mkdir()
    (folder / "glue" / "glue.py").write_text(METRIC)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(" ".join(sentences(40)).split()))]
    model = folder / "bert-base-cased"
    model.mkdir()
    (model / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    BertTokenizer(str(model / "vocab.txt")).save_pretrained(model)
    tiny = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    BertForSequenceClassification(tiny).save_pretrained(model)


METRIC = '''"""The share of right answers."""

import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        right = sum(int(a == b) for a, b in zip(predictions, references))
        return {"accuracy": right / len(references)}
'''


def documents(folder: Path) -> None:
    """Write documents of random words in the place of torchtitan's sample of C4."""
    texts = ("\n".join(sentences(40)) for _ in range(200))
    lines = [json.dumps({"text": text, "timestamp": "", "url": ""}) + "\n" for text in texts]
    path = folder / "tests" / "assets" / "c4_test" / "data.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
    (folder / "no_gpu.py").write_text(NO_GPU_MODULE)


NO_GPU_MODULE = '''"""What torchtitan asks of torch.cuda and torch.cpu has not."""

from types import SimpleNamespace

from torch.cpu import *
from torch.nn.attention import flex_attention

flex_attention._validate_device = lambda *tensors: None  # without compilation it has gradients on a CPU, too
flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True


def get_device_name(device=None):
    return "cpu"


def get_device_properties(device=None):
    return SimpleNamespace(total_memory=1 << 30)


def memory_stats(device=None):
    return {}


def reset_peak_memory_stats(device=None):
    pass


def empty_cache():
    pass
'''


def characters(folder: Path) -> None:
    """Write random text as minGPT's input."""
    (folder / "random.txt").write_text("\n".join(sentences(40)))


DDP_SERIES = "distributed/ddp-tutorial-series"
GUESTS = (
    Guest(
        "nanoGPT, train.py",
        "karpathy/nanoGPT",
        "train.py --dataset=random --compile=False --dtype=float32 --n_layer=2 --n_head=2 --n_embd=32 --block_size=32 "
        "--batch_size=4 --gradient_accumulation_steps=4 --max_iters=20 --eval_interval=10 --eval_iters=4",
        r"(?:iter \d+: loss|train loss|val loss) ([\d.]+)",
        prepare=random_tokens,
        changed="train.py",
    ),
    *(
        Guest(
            f"ddp-tutorial-series, {script}",
            "pytorch/examples",
            f"{script} 3 1",
            r"sum (-?[\d.]+)",
            folder=DDP_SERIES,
            changes=(SEED, PRINT_SUM),
        )
        for script in ("multigpu_torchrun.py", "multinode.py")
    ),
    Guest(
        "accelerate, nlp_example.py",
        "huggingface/accelerate",
        "nlp_example.py --cpu",
        r"(?:'accuracy': |loss )([\d.]+)",
        folder="examples",
        prepare=pairs_of_sentences,
        changes=((r"^( +)(accelerator\.backward\(loss\))", r"\1print(f'loss {loss.item():.9f}', flush=True); \2"),),
        changed="nlp_example.py",
        needs=("accelerate", "transformers", "datasets", "evaluate"),
    ),
    Guest(
        "torchtitan, debug model of Llama 3",
        "pytorch/torchtitan",
        "-m torchtitan.train --module llama3 --config llama3_debugmodel --parallelism.spmd_backend partial_dtensor "
        "--debug.seed 7 --training.steps 3 "
        "--training.disable_cuda_graphs --training.max_context_length 64 "
        "--training.num_tokens_per_microbatch_per_dp_rank 256",
        r"loss: +([\d.]+)",
        prepare=documents,
        changes=(
            (r'or "cuda"$', 'or "cpu"'),
            (r"(\w+)\.set_gradient_divide_factor\(1\.0\)", r"\g<0>; \1.set_force_sum_reduction_for_comms(True)"),
            (r"distributed\.set_timeout\(", "distributed.distributed_c10d._set_pg_timeout("),
            (r"(_compiled_flex_attn: .* = )torch\.compile\(", r"\1(lambda call, **options: call)("),
            (r"_get_device_module\(device_type\)", "__import__('no_gpu')"),
        ),
        changed="torchtitan/**/*.py",
        note="it is for PyTorch's nightly. Here FlexAttention is not compiled, gradients are summed instead of scaled "
        "by NCCL, a module of ours stands for `torch.cuda`, and documents are random words.",
        needs=("spmd_types", "grain", "tyro", "datasets"),
    ),
    *(
        Guest(
            f"FSDP2, example.py{more}",
            "pytorch/examples",
            f"example.py{more}",
            r"loss (-?[\d.]+)",
            folder="distributed/FSDP2",
            note="the weights of its blocks are set; it leaves them as they lie in memory.",
            changes=(
                PRINT_LOSS,
                (r"^( +)model\.reset_parameters\(\)", r"\g<0>; [layer.reset_parameters() for layer in model.layers]"),
            ),
        )
        for more in ("", " --explicit-prefetching --mixed-precision", " --dcp-api")
    ),
    Guest(
        "ddp, example.py",
        "pytorch/examples",
        "example.py",
        r"training completed in rank (\d)",
        folder="distributed/ddp",
    ),
    *(
        Guest(
            f"tensor parallel, {script}",
            "pytorch/examples",
            script,
            r"loss (-?[\d.]+)",
            folder="distributed/tensor_parallelism",
            changes=(
                (
                    r"^logger = get_logger\(\)",
                    r"\g<0>; torch.manual_seed(7)",
                ),
                (
                    r"^( +)(output\.sum\(\)\.backward\(\))",
                    r"\1print(f'loss {output.sum().item():.9f}', flush=True); \2",
                ),
            ),
        )
        for script in ("tensor_parallel_example.py", "sequence_parallel_example.py", "fsdp_tp_example.py")
    ),
    Guest(
        "minGPT-ddp, main.py",
        "pytorch/examples",
        "main.py data_config.path=random.txt data_config.block_size=32 data_config.truncate=1.0 gpt_config.n_layer=2 "
        "gpt_config.n_head=2 gpt_config.n_embd=32 trainer_config.max_epochs=2 trainer_config.batch_size=64 "
        "trainer_config.data_loader_workers=2 trainer_config.use_amp=False",
        r"Loss ([\d.]+)",
        folder="distributed/minGPT-ddp/mingpt",
        prepare=characters,
        changes=(SEED,),
        needs=("hydra-core", "boto3", "fsspec"),
    ),
)
