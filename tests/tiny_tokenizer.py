"""Small real tokenizers for tests, built in milliseconds."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Writes the first token itself, and refuses system messages and messages out of turn.
LLAMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
_TEXT = [
    "the quick brown fox jumps over the lazy dog and the other animals of the forest",
    "user assistant system summarise the following message in one short sentence",
    "Numbers 0 1 2 3 4 5 6 7 8 9 and signs . , ; : ! ? - _ ( ) [ ] < > | / { } = + # are text too",
]


def byte_level_tokenizer(*, chat_template: str | None = None, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE as of GPT-2, Llama 3 and Qwen; its role marks are special, `<think>` is an added word."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        _TEXT, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(["<|begin|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens(["<think>", "<\uff5cUser\uff5c>"])
    if adds_bos:
        backend.post_processor = _begin_with("<|begin|>", backend)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|im_end|>", chat_template=chat_template
    )


def metaspace_tokenizer(*, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A BPE over words that begin with a blank, as of Llama 2 and Mistral; raw text begins with `<s>`."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<s>", "</s>"]
    backend.train_from_iterator(
        _TEXT,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=list("\n'<>/[]"), show_progress=False
        ),
    )
    backend.post_processor = _begin_with("<s>", backend)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=chat_template
    )


def _begin_with(token: str, backend: Tokenizer) -> processors.TemplateProcessing:
    number = backend.token_to_id(token)
    return processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, number)])
