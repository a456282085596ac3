"""Small real parts for tests and for authors of plugins."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rsipo_lightning.policy import Policy
from rsipo_lightning.tiny import TEMPLATE

SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")


def byte_tokenizer(corpus: Iterable[str] = (), size: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a short chat template; reads any text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def random_policy(
    vocab: int, seed: int = 0, *, scale: float = 0.2, layers: int = 2, dim: int = 64
) -> Policy:
    """An untrained Qwen2 with heads of 32; ``scale`` is the spread of its weights (larger: less
    uniform).
    """
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=2 * dim,
        num_hidden_layers=layers,
        num_attention_heads=dim // 32,
        num_key_value_heads=dim // 32,
        max_position_embeddings=4096,
        initializer_range=scale,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    return Policy(Qwen2ForCausalLM(config))
