"""Small tokenizers for the router's tests, made on the spot: a byte-level one and a sentencepiece-like one."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pdserve.router.detokenizer import BYTE_OF_CHAR, Vocabulary

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (
    ("Ġ", "t"),
    ("h", "e"),
    ("Ġt", "he"),
    ("Ã", "©"),
    ("ð", "Ł"),
    ("ðŁ", "ĺ"),
    ("Ċ", "Ċ"),
    ("S", "T"),
    ("ST", "O"),
)

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' ~ m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer: three special tokens, 256 bytes, a few merges that cut characters."""
    symbols = [*SPECIALS, *BYTE_OF_CHAR, *(a + b for a, b in MERGES)]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.add_tokens(["héllo wörld"])
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """Return a tokenizer like Llama 2's: metaspace pieces, byte fallback, the first space stripped."""
    pieces = ["<unk>", "<s>", "</s>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", "▁the", "▁a", "a", "b", "é", "日", "▁▁", ".", "STO", "P"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Return what decoding needs, with the decoder's type as the model file states it."""
    return Vocabulary(tokenizer, str(json.loads(tokenizer.to_str())["decoder"]["type"]))


def write_model_folder(folder: Path, *, template: str | None = CHAT_TEMPLATE) -> Path:
    """Write the text side of a model into `folder` and return it."""
    tokenizer = byte_level_tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": size}), encoding="utf-8")
    config: dict[str, object] = {"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
