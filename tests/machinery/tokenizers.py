# SPDX-License-Identifier: Apache-2.0
"""Tokenizers with the forms of published ones, built without files."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message.role + '\n' + message.content + '</s>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


def chat_tokenizer(words: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the special tokens <s> and </s>, and one token per byte.

    `words`: more tokens, in the characters that stand for bytes. Texts are not encoded with them.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<pad>", "<s>", "</s>", *alphabet, *words]
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=_TEMPLATE,
    )


def sentencepiece_tokenizer(words: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama 2's: byte fallback, U+2581 for spaces, and a decoder that strips one
    space from the beginning.
    """
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    ids = {name: i for i, name in enumerate(names)}
    backend = Tokenizer(models.BPE(ids, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
