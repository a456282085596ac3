"""The trained language model: hidden states, vocabulary projection, log-probs of the trained
tokens.
"""

from __future__ import annotations

import os.path
import re
import shutil
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_session
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as hf_logging

from rsipo_lightning.adapter import adapted, write_adapter
from rsipo_lightning.config import SHIPPED
from rsipo_lightning.errors import CheckpointError, ConfigError, DataError
from rsipo_lightning.head import log_probs
from rsipo_lightning.packing import Packed, can_pack, pack
from rsipo_lightning.sharding import sharded

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")

MODELS = Path(__file__).parent / "models"
TINY = MODELS / "tiny"
SMOLLM2 = "./models/SmolLM2-135M-Instruct"  # as configs/model/smollm2.yaml has it


class Policy(nn.Module):
    """A Hugging Face causal LM, called in two steps so that only trained tokens meet the
    vocabulary.
    """

    def __init__(self, model: PreTrainedModel, recompute: bool = False) -> None:
        """``recompute``: the layers' activations are not kept for the backward pass."""
        super().__init__()
        self.model = model
        self.recomputed = self._recomputed_layers() if recompute else []
        # For good, in training too (Lightning leaves the mode as it is): dropout would make the
        # policy that is trained another one than the policy that sampled.
        self.eval()
        self.packs = can_pack(model)
        self.forwards = self.tokens = 0  # calls, and tokens that went through the layers
        if not sharded(model):
            self.check_head()

    @property
    def body(self) -> nn.Module:
        body: nn.Module = self.model.get_decoder()
        return body

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def adapted(self) -> bool:
        """Whether an adapter is trained in place of the weights."""
        return adapted(self.model)

    def trained(self) -> list[nn.Parameter]:
        """The weights that an optimizer changes."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def kept_state(self) -> dict[str, Tensor]:
        """What a checkpoint needs of the state dict: all of it, or the adapter alone."""
        if not self.adapted:
            return self.state_dict()
        return {name: p.detach() for name, p in self.named_parameters() if p.requires_grad}

    def hidden(self, ids: Tensor, **kwargs: Any) -> Tensor:
        """[B, L] ids -> [B, L, D]. Right padding needs no mask: attention is causal."""
        return self.body(input_ids=ids, **kwargs).last_hidden_state  # type: ignore[no-any-return]

    def packed_hidden(self, packed: Packed) -> Tensor:
        """Hidden states [N, D] before each trained token."""
        hidden = self.hidden(
            packed.ids[None],
            position_ids=packed.positions[None],
            # never read; without one a mask of all pairs of tokens would be made
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=packed.ids.device),
            packed=packed,
            use_cache=False,
        )
        return hidden[0].index_select(0, packed.trained)

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
        with self._recomputing():
            if self.packs:
                packed = pack(ids, mask)
                hidden, run = self.packed_hidden(packed), len(packed.ids)
            else:
                hidden = self.hidden(ids, use_cache=False)[:, :-1][mask[:, 1:]]
                run = ids.numel()
        self.forwards, self.tokens = self.forwards + 1, self.tokens + run
        target = ids[:, 1:][mask[:, 1:]]
        return log_probs(
            self.model.get_output_embeddings(), hidden, target, temperature, train_entropy
        )

    def _recomputed_layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = [
            m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)
        ]
        if not layers or any(getattr(layer, "dropout", 0) for layer in layers):
            raise ConfigError(
                f"model.gradient_checkpointing=true: not supported by {type(self.model).__name__}"
            )
        # Shares are gone when the backward pass begins, which the newer kind takes for a mistake.
        kind = {"use_reentrant": sharded(self.model)}
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kind)
        return layers

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Layers recompute in train mode only, which nothing else of the policy may enter; and not
        while the policy generates, since they then forget its cache.
        """
        for layer in self.recomputed:
            layer.training = torch.is_grad_enabled()  # of this module alone, not of its parts
        try:
            yield
        finally:
            for layer in self.recomputed:
                layer.training = False

    @torch.no_grad()
    def check_head(self) -> None:
        """body + output embeddings must be the whole model; some architectures scale or cap their
        logits. Rows are packed only where that changes nothing. Collective under ZeRO-3, once the
        trainer has set it up.
        """
        kind = type(self.model).__name__
        if not isinstance(self.model.get_output_embeddings(), nn.Linear):
            raise ConfigError(f"model.path: the head of {kind} is no linear layer; not supported")
        ids = torch.arange(min(4, self.model.config.vocab_size), device=self.device)[None]
        whole = self.model(input_ids=ids).logits.float()
        if not whole.isfinite().all():
            raise DataError(f"model.path: the logits of this {kind} are no numbers; broken weights")
        if not torch.allclose(whole, self.logits(self.hidden(ids)), atol=1e-4, rtol=1e-3):
            raise ConfigError(
                f"model.path: {kind} changes its logits after the output embeddings; not supported"
            )
        self.packs = self.packs and self._packs_as_alone()

    def _packs_as_alone(self) -> bool:
        """Whether the layers hand on what packed rows need, as those of most architectures do."""
        a, b, c, d = (i % self.model.config.vocab_size for i in range(4))
        ids = torch.tensor([[a, b, c, d], [a, b, d, c]], device=self.device)
        mask = torch.tensor([False, True, True, True], device=self.device).expand(2, 4)
        alone = self.hidden(ids, use_cache=False)[:, :-1][mask[:, 1:]]
        try:
            packed = self.packed_hidden(pack(ids, mask))
        except (TypeError, NotImplementedError):
            return False
        return bool((packed - alone).norm() <= 0.05 * alone.norm())  # bfloat16 has three digits


def model_source(path: str) -> str:
    """What ``from_pretrained`` is given for ``model.path``."""
    return str(MODELS / path) if path in SHIPPED else path


def load_config(path: str) -> PretrainedConfig:
    """Config of ``model.path``. Missing or of an unknown kind: DataError."""
    source = model_source(path)
    offline = _check_source(path, source)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            source, local_files_only=offline, trust_remote_code=False
        )
    except Exception as error:  # transformers raises what it likes
        raise DataError(_cannot(path, "config", error)) from error
    return config


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Tokenizer of ``model.path``. Missing, empty or without chat template: DataError."""
    load_config(path)  # where it is broken, transformers would speak of the tokenizer
    source = model_source(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, local_files_only=_check_source(path, source), trust_remote_code=False
        )
    except Exception as error:  # transformers, tokenizers and safetensors raise their own
        raise DataError(_cannot(path, "tokenizer", error)) from error
    if not tokenizer.encode("Who is it?", add_special_tokens=False):
        # transformers makes one of special tokens alone where the files of the vocabulary lack
        raise DataError(
            f"model.path: the tokenizer of '{path}' has no vocabulary; is tokenizer.json missing?"
        )
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"model.path: the tokenizer of '{path}' has no chat template; use an instruct model"
        )
    return tokenizer


def load_model(path: str, dtype: str = "float32") -> PreTrainedModel:
    """Weights of ``model.path``. Missing, incomplete or not a causal LM: DataError."""
    source = model_source(path)
    offline = _check_source(path, source)
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # its report would stand above our line
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=getattr(torch, dtype),
            local_files_only=offline,
            trust_remote_code=False,  # else a folder's own code is offered on the terminal
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
    except Exception as error:  # transformers, tokenizers and safetensors raise their own
        raise DataError(_cannot(path, "model", error)) from error
    finally:
        hf_logging.set_verbosity(verbosity)
    model: PreTrainedModel = loaded[0]
    info: dict[str, Any] = loaded[1]
    if bad := sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}):
        raise DataError(
            f"model.path: {len(bad)} tensors that config.json of '{path}' asks for are not in its "
            f"weights or have another shape, e.g. {bad[0]}; they are not of one model"
        )
    if unused := sorted(info["unexpected_keys"]):
        what = f"{len(unused)} tensors of its files are not used, e.g. {unused[0]}"
        warnings.warn(f"{path}: {what}", stacklevel=2)
    return model


def check_fit(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str, context: int
) -> None:
    """Model, tokenizer and ``rollout.context`` belong together. DataError, ConfigError."""
    embeddings: Any = model.get_input_embeddings()
    rows = embeddings.num_embeddings
    ids = max(tokenizer.get_vocab().values())
    if ids >= rows:
        raise DataError(
            f"model.path: the tokenizer of '{path}' has ids up to {ids}, its model only {rows} "
            "embeddings; they are not of one model"
        )
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit and context > limit:
        raise ConfigError(
            f"rollout.context={context}: the model of '{path}' reads at most {limit} tokens "
            "(max_position_embeddings)"
        )


def save_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    state: dict[str, Tensor] | None = None,
    adapter: dict[str, Tensor] | None = None,
) -> None:
    """Write what ``from_pretrained`` loads, in place of what is there: all or nothing.

    ``state`` are the weights, where the model does not hold them; ``adapter`` are those of its
    adapter, written into the folder ``adapter`` of it.
    What is there becomes ``<folder>.old`` until the new one has its name, so a kill loses neither.
    CheckpointError if it cannot be written.
    """
    part, old = (folder.with_name(folder.name + suffix) for suffix in (".part", ".old"))
    try:
        if part.exists():  # of a kill: its files would mix with the new ones
            shutil.rmtree(part)
        model.save_pretrained(part, state_dict=state)
        tokenizer.save_pretrained(part)
        if adapter:
            write_adapter(model, adapter, part / "adapter")
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        part.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except Exception as error:
        shutil.rmtree(part, ignore_errors=True)
        # tokenizers raises a bare Exception where it cannot write
        if not isinstance(error, OSError | SafetensorError) and type(error) is not Exception:
            raise
        raise CheckpointError(f"cannot write {folder}: {_one_line(error)}; make room") from error


def _check_source(path: str, source: str) -> bool:
    """DataError where ``from_pretrained`` would look long or say little; True if it may look
    here only.
    """
    folder = Path(source)
    if os.path.isdir(folder):  # False for one that is too long to look for
        if not (folder / "config.json").is_file() and path not in SHIPPED:
            raise DataError(f"model.path: {path} is not the folder of a model: no config.json")
        return True
    if os.path.exists(folder):
        raise DataError(f"model.path: {path} is a file; give the folder that it is in")
    if path == SMOLLM2:
        raise DataError(f"model.path: there is no folder '{path}' here; make it with: make smollm2")
    if not _HUB_NAME.fullmatch(path):
        raise DataError(f"model.path: there is no folder {path}")
    return not _hub_answers()


@cache
def _hub_answers() -> bool:
    """Asked once, with a short timeout: its own client tries for a minute, with many words."""
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # offline by HF_HUB_OFFLINE, no route, no name, a proxy that refuses
        return False
    return True


def _cannot(path: str, what: str, error: Exception) -> str:
    if path in SHIPPED:
        made = f"make {path.replace('_', '-')}-policy"
        return f"the {path} policy is missing from {MODELS / path}; make it with: {made}"
    if not os.path.isdir(path) and not _hub_answers():
        return (
            f"model.path: there is no folder '{path}', no such model in the cache of the hub, and "
            f"{constants.ENDPOINT} does not answer or HF_HUB_OFFLINE is set"
        )
    if "trust_remote_code" in str(error):  # it advises what we do not offer
        return f"model.path: '{path}' needs Python code of its own, which is never run"
    return f"model.path: no {what} could be loaded from '{path}': {_one_line(error)}"


def _one_line(error: Exception) -> str:
    return textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
