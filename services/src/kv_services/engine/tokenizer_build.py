"""Makes a `tokenizers` tokeniser of a GGUF's vocabulary: byte-level BPE with the cut rules that we know.

B1: a vocabulary or cut rule that is not known is refused, since text cut another way gives other tokens than the
model was trained on. Special tokens are not in it as such: `tokenizer` finds their names in text itself.
"""

from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from kv_services.engine import limits
from kv_services.engine.errors import UnsupportedModelError, WeightsFormatError
from kv_services.engine.gguf_file import TextMetadata
from kv_services.engine.weights_cache import TextInfo

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
"""Token types of GGUF. A control token has no text, a user-defined one is text that is never cut."""

_END_NAMES: Final = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>")

_LLAMA3_CUTS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def text_info(text: TextMetadata) -> TextInfo:
    """Special tokens and template. Beside the end tokens that the file names, control tokens with an end's usual name
    end a sequence too, since files often name one of several."""
    by_type = list(enumerate(text.token_types))
    control = tuple(token for token, kind in by_type if kind in (_UNKNOWN, _CONTROL, _UNUSED))
    ends = (*text.eos_ids, *(token for token in control if text.tokens[token] in _END_NAMES))
    return TextInfo(
        control_ids=control,
        literal_ids=tuple(token for token, kind in by_type if kind == _USER_DEFINED),
        bos_id=text.bos_id,
        eos_ids=tuple(dict.fromkeys(ends))[: limits.STOP_TOKENS_MAX],
        adds_bos=text.adds_bos,
        chat_template=text.chat_template,
    )


def build_tokenizer_json(path: Path, text: TextMetadata) -> bytes:
    """The tokeniser in the `tokenizers` package's own form.

    Args:
        path: of the weights file, for messages.
        text: its vocabulary.

    Raises:
        UnsupportedModelError: a tokeniser that we cannot build exactly.
        WeightsFormatError: a vocabulary that contradicts itself.
    """
    if text.kind != "gpt2":
        raise UnsupportedModelError(path=str(path), detail=f"tokeniser {text.kind!r}; known is 'gpt2'")
    if len(text.tokens) > limits.VOCAB_MAX:
        raise UnsupportedModelError(path=str(path), detail=f"{len(text.tokens)} tokens, over {limits.VOCAB_MAX}")
    vocab = {token: index for index, token in enumerate(text.tokens)}
    if len(vocab) != len(text.tokens):
        raise WeightsFormatError(path=str(path), detail="the vocabulary names a token twice")
    merges = [_pair(path, merge) for merge in text.merges]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=text.pre != "llama-bpe")
    cuts: pre_tokenizers.PreTokenizer
    match text.pre:
        case "gpt-2":
            cuts = level
        case "smollm":
            cuts = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
        case "llama-bpe":
            cuts = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_LLAMA3_CUTS), "isolated"), level])
        case other:
            known = "gpt-2, smollm, llama-bpe"
            raise UnsupportedModelError(path=str(path), detail=f"tokeniser cuts {other!r}; known are {known}")
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=text.pre == "llama-bpe"))
    except Exception as error:  # the package raises plain Exception for a merge of unknown tokens
        raise WeightsFormatError(path=str(path), detail=f"vocabulary: {error}") from error
    tokenizer.pre_tokenizer = cuts
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str()).encode()


def _pair(path: Path, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise WeightsFormatError(path=str(path), detail=f"merge {merge!r} is not two tokens")
    return left, right
