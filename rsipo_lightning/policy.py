"""The trained language model: hidden states, vocabulary projection, log-probs of the trained
tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rsipo_lightning.errors import ConfigError, DataError

TINY = Path(__file__).parent / "models" / "tiny"
SMOLLM2 = "./models/SmolLM2-135M-Instruct"  # as configs/model/smollm2.yaml has it


class Policy(nn.Module):
    """A Hugging Face causal LM, called in two steps so that only trained tokens meet the
    vocabulary.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        # For good, in training too (Lightning leaves the mode as it is): dropout would make the
        # policy that is trained another one than the policy that sampled.
        self.eval()
        self._check_head()

    @property
    def body(self) -> nn.Module:
        body: nn.Module = self.model.get_decoder()
        return body

    @property
    def device(self) -> torch.device:
        return self.model.device

    def hidden(self, ids: Tensor, **kwargs: Any) -> Tensor:
        """[B, L] ids -> [B, L, D]. Right padding needs no mask: attention is causal."""
        return self.body(input_ids=ids, **kwargs).last_hidden_state  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, D] -> [M, V] float32."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits.float()

    def forward(
        self, ids: Tensor, mask: Tensor, temperature: Tensor, train_entropy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of the masked tokens and entropies of their distributions.

        ids [B, L] int64, mask [B, L] bool (never True at 0), temperature [N] -> two float32 tensors
        [N], row-major, nats, of the distribution softmax(logits / temperature). Example: ids [[5,
        6, 7]], mask [[F, F, T]] ->
        log p(7 | 5, 6).
        """
        hidden = self.hidden(ids, use_cache=False)[:, :-1][mask[:, 1:]]
        target = ids[:, 1:][mask[:, 1:]]
        logp = torch.log_softmax(self.logits(hidden) / temperature[:, None], dim=-1)
        chosen = logp.gather(-1, target[:, None]).squeeze(-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and train_entropy):
            entropy = -(logp.exp() * logp).sum(-1)
        return chosen, entropy

    @torch.no_grad()
    def _check_head(self) -> None:
        """body + output embeddings must be the whole model; some architectures scale or cap their
        logits.
        """
        ids = torch.arange(min(4, self.model.config.vocab_size), device=self.device)[None]
        whole = self.model(input_ids=ids).logits.float()
        if not torch.allclose(whole, self.logits(self.hidden(ids)), atol=1e-4, rtol=1e-3):
            kind = type(self.model).__name__
            raise ConfigError(
                f"model.path: {kind} changes its logits after the output embeddings; not supported"
            )


def model_source(path: str) -> str:
    """What ``from_pretrained`` is given for ``model.path``."""
    return str(TINY) if path == "tiny" else path


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Tokenizer of ``model.path``. Missing or without chat template: DataError."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_source(path))
    except Exception as error:  # transformers, tokenizers and safetensors raise their own
        raise DataError(_cannot(path, "tokenizer", error)) from error
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"model.path: the tokenizer of '{path}' has no chat template; use an instruct model"
        )
    return tokenizer


def load_model(path: str, dtype: str = "float32") -> PreTrainedModel:
    """Weights of ``model.path``. Missing or not a causal LM: DataError."""
    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_source(path), dtype=getattr(torch, dtype)
        )
    except Exception as error:  # transformers, tokenizers and safetensors raise their own
        raise DataError(_cannot(path, "model", error)) from error
    return model


def _cannot(path: str, what: str, error: Exception) -> str:
    if path == "tiny":
        return f"the tiny policy is missing from {TINY}; make it with: make tiny-policy"
    if path == SMOLLM2 and not Path(path).exists():
        return f"model.path: there is no folder '{path}' here; make it with: make smollm2"
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"model.path: no {what} could be loaded from '{path}' (a folder or a hub name): {reason}"
