"""The tiny policy's tokenizer and architecture: small enough to learn on two CPU cores, reads any
text.

Byte-level BPE. A word of the built-in world, of ALFWorld's commands or of the scripted skills is
one token, with and without a space before it: such words are entries without merges, which the BPE
takes whole (``ignore_merges``). Everything else falls back to English merges and at last to bytes.

    tokenizer = build_tokenizer()
    model = new_model(tokenizer, seed=0)      # random weights of the Qwen2 architecture
"""

from __future__ import annotations

import json
import pydoc_data.topics
import re
from typing import TYPE_CHECKING

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rsipo_lightning.codec import Codec
from rsipo_lightning.environments import experts

if TYPE_CHECKING:
    from collections.abc import Iterable

SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TAGS = tuple(
    form.format(name)
    for name in ("search", "answer", "information", "think", "action")
    for form in ("<{}>", "</{}>")
)
# a skill costs few tokens to write, and one to show
JSON = ('{"episode_summary": "', '", "episode_skill": "', '"}')
SECTION = Codec.section("\0").split("\0")[0]
MERGES = 600  # of English

ALFWORLD = """
alarmclock apple armchair baseballbat basketball bathtub bathtubbasin bed blinds book boots bowl box
bread butterknife cabinet candle cart cd cellphone chair cloth coffeemachine coffeetable countertop
creditcard cup curtains desk desklamp diningtable dishsponge drawer dresser egg faucet floorlamp
footstool fork fridge garbagecan glassbottle handtowel handtowelholder houseplant kettle keychain
knife ladle laptop laundryhamper laundryhamperlid lettuce lightswitch microwave mirror mug newspaper
ottoman painting pan papertowel papertowelroll pen pencil peppershaker pillow plate plunger poster
pot potato remotecontrol safe saltshaker scrubbrush shelf showerdoor showerglass sidetable sink
sinkbasin soapbar soapbottle sofa spatula spoon spraybottle statue stoveburner stoveburner
tennisracket tissuebox toaster toilet toiletpaper toiletpaperhanger toiletpaperroll tomato towel
towelholder tvstand vase watch wateringcan window winebottle
go to take from move put open close use heat cool clean with examine look inventory help
you arrive at on in the a an and see nothing happens closed is opened pick up turn turned off now
carrying are facing next middle of room looking quickly around your task some two find them it clean
hot cool under into using there loc success failure
You On In Looking Your Nothing The
"""
NUMBERS = tuple(str(i) for i in range(1, 41))


def vocabulary() -> list[str]:
    """Words that are one token each, with and without a space before them."""
    words = {*experts.vocabulary(), *ALFWORLD.split(), *NUMBERS}
    return sorted(word for word in words if len(word) > 1 or word.isalnum())


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer; the same in every process of one Python version (its help texts teach the
    merges).
    """
    space = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = space
    alphabet = sorted(space.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + MERGES,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator(_english(), trainer)

    raw = json.loads(bpe.to_str())
    entries = {token: len(SPECIAL) + i for token, i in raw["model"]["vocab"].items()}
    for word in vocabulary():
        for form in (word, "\u0120" + word):  # the byte-level sign for a space
            entries.setdefault(form, len(SPECIAL) + len(entries))
    raw["model"]["vocab"] = {**{token: i for i, token in enumerate(SPECIAL)}, **entries}
    raw["model"]["ignore_merges"] = True
    bpe = Tokenizer.from_str(json.dumps(raw))
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    whole = (*TAGS, *JSON, SECTION)
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in whole])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Random weights. A word starts with the same vector whether a space is before it or not."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=3,  # 32 wide, so that vLLM can serve it
        num_key_value_heads=3,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    ids = tokenizer.get_vocab()
    with torch.no_grad():
        vectors = model.get_input_embeddings().weight
        for word in vocabulary():
            vectors[ids["\u0120" + word]] = vectors[ids[word]]
    return model


def _english() -> Iterable[str]:
    """English words that every Python has in its help texts, without those that are tokens anyway."""
    known = set(vocabulary())
    for text in pydoc_data.topics.topics.values():
        for word in re.findall(r"(?<=\s)[A-Za-z]+(?=[\s.,])", text):
            if word not in known:
                yield f" {word}"
