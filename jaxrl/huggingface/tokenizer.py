"""Tokenizers of Hugging Face checkpoint directories, and the tokens that end a completion."""

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.huggingface.config.keys import token_ids
from jaxrl.huggingface.files import check_file, excerpt, named, read_object, write_json
from jaxrl.models.families import DecoderConfig

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
# Of a model of images and text, beside its tokenizer.
_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
# What transformers says of files as their authors published them; it reads them right.
_OF_PUBLISHED_FILES = {
    "transformers.models.auto.tokenization_auto": "`tokenizer_class` is",
    "transformers.tokenization_utils_tokenizers": "Ignoring clean_up_tokenization_spaces=True",
}
_OBJECTS = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"}


def load_tokenizer(directory: Path, *, vocab_size: int) -> Any:
    """Loads the tokenizer of a checkpoint directory, a `transformers.PreTrainedTokenizerBase`. Read
    config.json first: transformers reads it, too, with worse errors.

    Raises:
      ValueError: if transformers cannot load the tokenizer, or tokens lie outside of the model's
        vocabulary; the message names the file or directory.
    """
    for path in (directory / name for name in _TOKENIZER_FILES):
        if path.exists():
            check_file(path)
            if path.name in _OBJECTS:
                content = read_object(path)
                if path.name == "tokenizer_config.json":
                    _check_template(path, content.get("chat_template"))
    # It reads tokenizers here, and would warn at its import that it lacks torch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer  # takes seconds to import, and only text needs it

    for name in _OF_PUBLISHED_FILES:
        logging.getLogger(name).addFilter(_concerns_the_user)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))
        vocabulary = tokenizer.get_vocab()
        # Some settings fail only in use: encodes a character that no text has, decodes all tokens.
        tokenizer.encode("a \ue000", add_special_tokens=False)
        tokenizer.decode(list(vocabulary.values()))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # its readers raise anything; a panic is not an Exception
        raise ValueError(
            f"{_unreadable(directory)}: transformers cannot load the tokenizer: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        ) from error
    template = tokenizer.chat_template or ""
    try:
        "".join(template.values() if isinstance(template, dict) else [template]).encode()
    except (TypeError, UnicodeEncodeError):
        raise ValueError(
            f"{directory}: chat_template={excerpt(template)} is not a valid text; see "
            "tokenizer_config.json"
        ) from None
    if len(vocabulary) == len(tokenizer.get_added_vocab()):
        raise ValueError(f"{directory} has no tokenizer: no file holds a vocabulary")
    last = max(vocabulary, key=vocabulary.__getitem__)
    if vocabulary[last] >= vocab_size:
        raise ValueError(
            f"{directory}: the tokenizer's token {excerpt(last)} has the id {vocabulary[last]} but "
            f"vocab_size={vocab_size} in config.json; remove the token or resize the embeddings"
        )
    return tokenizer


def _concerns_the_user(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_OF_PUBLISHED_FILES[record.name])


def _check_template(path: Path, template: Any) -> None:
    """Raises ValueError unless a tokenizer_config.json has a text, named texts, or no template."""
    parts = template if isinstance(template, list) else [{"name": "", "template": template}]
    if isinstance(template, dict):
        parts = [{"name": name, "template": text} for name, text in template.items()]
    valid = all(
        isinstance(part, dict) and all(isinstance(part.get(k), str) for k in ("name", "template"))
        for part in parts
    )
    if template is not None and not valid:
        raise ValueError(
            f"{path}: chat_template={excerpt(template)} is not a valid text, nor a list of "
            "objects with the texts 'name' and 'template'"
        )


def _unreadable(directory: Path) -> str:
    """Names the file that keeps transformers from loading a tokenizer, or the candidates."""
    from tokenizers import Tokenizer
    from transformers import AutoConfig

    readers = {"config.json": AutoConfig.from_pretrained, "tokenizer.json": Tokenizer.from_file}
    present = [name for name in ("config.json", *_TOKENIZER_FILES) if (directory / name).exists()]
    for name, read in readers.items():
        try:
            if name in present:
                read(str(directory / name))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            return str(directory / name)
    others = [name for name in present if name not in ("config.json", "generation_config.json")]
    return f"{directory} ({', '.join(others) or 'no tokenizer.json'})"


def read_end_ids(directory: Path, config: DecoderConfig) -> tuple[int, ...]:
    """Reads the token ids that end a completion from config.json and generation_config.json. Chat
    models often list them only in the latter.

    Raises:
      ValueError: if they are not ids of the vocabulary; the message names the file.
    """
    path = directory / "generation_config.json"
    if not path.exists():
        return config.eos_ids
    raw = read_object(path)
    with named(path):
        more = token_ids(raw.get("eos_token_id"), vocab_size=config.vocab_size)
    return tuple(dict.fromkeys((*config.eos_ids, *more)))


def write_end_ids(directory: Path, ends: Sequence[int], *, content: Mapping[str, Any]) -> None:
    """Adds token ids that end a completion to generation_config.json, where servers look for them,
    behind those that it lists. Without the file, they read those in `content`, the source's
    config.json: it is written if they are not all there."""
    path = directory / "generation_config.json"
    raw = read_object(path) if path.exists() else dict(content)
    listed = raw.get("eos_token_id")
    known = listed if isinstance(listed, list) else [] if listed is None else [listed]
    if set(ends) <= set(known):
        return
    if not path.exists():
        named_ids = ("bos_token_id", "pad_token_id")
        raw = {key: content[key] for key in named_ids if content.get(key) is not None}
    write_json(path, raw | {"eos_token_id": list(dict.fromkeys((*known, *ends)))})


def copy_tokenizer(source_dir: str | Path, directory: str | Path) -> None:
    """Copies tokenizer and generation files from one checkpoint to another, if they exist."""
    _copy(_TOKENIZER_FILES, Path(source_dir), Path(directory))


def copy_processor(source_dir: str | Path, directory: str | Path) -> None:
    """Copies the files by which a model of images and text reads images, if they exist."""
    _copy(_PROCESSOR_FILES, Path(source_dir), Path(directory))


def _copy(names: Sequence[str], source_dir: Path, directory: Path) -> None:
    for name in names:
        source, target = source_dir / name, directory / name
        if source.is_file() and not (target.exists() and target.samefile(source)):
            shutil.copyfile(source, target)
