"""Tiny random models with a tokenizer and a chat template.

`python tiny_model.py FOLDER` makes FOLDER/0 and FOLDER/1, two Llamas of 140,000 parameters that differ in their weights
alone; `python tiny_model.py FOLDER experts` makes FOLDER/experts, a Qwen3 with 3 layers of 8 experts, 2 of which see
each token.
"""

import json
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **COMMON))


def experts() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(num_hidden_layers=3, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, **COMMON)
    )


def make(folder: Path, model: Any, seed: int) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 4,
        special_tokens=["<pad>", "<s>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog. " * 5], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | special))
    torch.manual_seed(seed)
    model().save_pretrained(folder)


if __name__ == "__main__":
    parent = Path(sys.argv[1])
    if sys.argv[2:] == ["experts"]:
        make(parent / "experts", experts, 0)
    else:
        make(parent / "0", llama, 0)
        make(parent / "1", llama, 1)
