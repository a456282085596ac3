"""The tiny policy's tokenizer and architecture: small enough to learn on two CPU cores.

The tokenizer is Qwen2's (byte-level BPE, so it reads any text) with a vocabulary of its own, in
which a word of the built-in world, of ALFWorld's commands or of the scripted skills is one token.
It is
built as ``Qwen2Tokenizer``, so that ``AutoTokenizer`` gives the same ids back: for a model of type
qwen2 it would not take any other class.

    tokenizer = build_tokenizer()
    model = new_model(tokenizer, seed=0)      # random weights of the Qwen2 architecture
"""

from __future__ import annotations

import json
import pydoc_data.topics
import re
from collections.abc import Iterator, Sequence

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from rsipo_lightning.codec import Codec
from rsipo_lightning.environments import experts, world

END, PAD = "<|end|>", "<|pad|>"
ROLES = ("<|user|>", "<|assistant|>", "<|system|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TAGS = tuple(
    form.format(name)
    for name in ("search", "answer", "information", "think", "action")
    for form in ("<{}>", "</{}>")
)
# A skill costs few tokens to write, and one to show.
JSON = ('{"episode_summary": "', '", "episode_skill": "', '"}')
SECTION = Codec.section("\0").split("\0")[0]
YEARS = tuple(f" {year}" for year in world.YEARS)  # Qwen2 takes numbers apart into digits
NUMBERS = tuple(f" {number}" for number in range(1, 51))  # of the things of ALFWorld's rooms
MORE = {"untrained_alfworld": NUMBERS}  # tokens of one of config.UNTRAINED beside the vocabulary
SIZE = 2100  # entries of the BPE: bytes, all wanted words, and some 400 merges of English
HEAD = 32  # width of an attention head: vLLM serves it
THETA = 1e5  # base of the rotary frequencies

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


def vocabulary() -> list[str]:
    """Pieces of text that are one token: all words behind a space, some at the start of a line.

    >>> [word in vocabulary() for word in (" Amber", "Amber", " Search", "Search", " mug", "mug")]
    [True, False, True, True, True, True]
    """
    known, names = set(experts.vocabulary()), set(world.vocabulary())
    first = (known - names).union(ALFWORLD.split())
    return sorted(w for w in first | {f" {w}" for w in first | names} if w.strip().isalpha())


def build_tokenizer(more: Sequence[str] = ()) -> Qwen2Tokenizer:
    """The tokenizer, with ``more`` tokens; the same in every process of one Python version (its
    help texts teach English).
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    wanted = [
        word for word in vocabulary() for _ in range(3000)
    ]  # so that all merge before English
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([*wanted, *_english()], trainer)
    model = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],  # type: ignore[misc]
        unk_token=END,  # never used: bytes are all there
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=list(ROLES),
        chat_template=TEMPLATE,
    )
    plain = (*TAGS, *JSON, SECTION, *YEARS, *more)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    return tokenizer


def new_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen2ForCausalLM:
    """Random weights that start near what all tasks need: looking up equal tokens and copying.

    Each attention begins with a bit of the identity, and three heads of the first layer look one,
    two and three tokens back. Copying names is then learned in a few steps instead of hundreds.
    """
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=4 * HEAD,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    identity = torch.eye(config.hidden_size)
    with torch.no_grad():
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.1)
        for layer in model.model.layers:
            attention = layer.self_attn
            for matrix, share in (
                (attention.q_proj, 0.3),
                (attention.k_proj, 0.3),
                (attention.v_proj, 0.5),
                (attention.o_proj, 0.5),
            ):
                matrix.weight.add_(share * identity)
        for head, back in enumerate((1, 2, 3)):
            _look_back(model.model.layers[0].self_attn, head, back)
    return model


def _look_back(attention: Qwen2Attention, head: int, back: int) -> None:
    """Let a head attend to the token ``back`` places before.

    Query and key are biases alone. Rotated to positions m and n, their product is the sum over the
    frequencies f of strength^2 cos((m - n - back) f), which is largest at m - n = back. Only fast
    frequencies tell neighbours apart; the slow ones stay free.
    """
    frequency = THETA ** (-torch.arange(HEAD // 2) / (HEAD / 2))
    strength = 5.0 * (frequency > 0.05)
    start, middle, end = HEAD * head, HEAD * head + HEAD // 2, HEAD * (head + 1)
    for projection, turned in ((attention.q_proj, 0), (attention.k_proj, back)):
        projection.weight[start:end] = 0
        projection.bias[start:middle] = strength * torch.cos(turned * frequency)
        projection.bias[middle:end] = strength * torch.sin(turned * frequency)


def _english() -> Iterator[str]:
    """English words of the help texts that every Python has, without those that are tokens."""
    known = {word.strip() for word in vocabulary()}
    for text in pydoc_data.topics.topics.values():
        for word in re.findall(r"(?<=\s)[A-Za-z]+(?=[\s.,])", text):
            if word not in known:
                yield f" {word}"
