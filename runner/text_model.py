"""What a job needs of a model beside its weights: folder, config and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine.models.config import ModelConfig, read_model_config
from engine.models.gguf import gguf_to_folder
from runner.config import ConfigError, ModelSection

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model folder with its config and, unless prompts and completions stay token ids, its tokenizer."""

    folder: Path
    config: ModelConfig
    tokenizer: PreTrainedTokenizerBase | None

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a text: of config.json, generation_config.json and the tokenizer."""
        own = getattr(self.tokenizer, "eos_token_id", None)
        return tuple(sorted({*self.config.end_token_ids, *([] if own is None else [own])}))

    @property
    def vocab_limit(self) -> int:
        """Ids from here on are not drawn: a head may be padded beyond what the tokenizer knows."""
        if self.tokenizer is None:
            return self.config.vocab_size
        return min(self.config.vocab_size, 1 + max(self.tokenizer.get_vocab().values()))

    def decode(self, token_ids: list[int]) -> str:
        """The text of output ids, special tokens left out. Raises ValueError without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer to decode with")
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def open_model(config: ModelSection) -> TextModel:
    """Read config and tokenizer; a .gguf file is converted first, once.

    Raises ConfigError for a path that is not there, ModelError for a model that is not supported.
    """
    path = Path(config.path).expanduser()
    if not path.exists():
        raise ConfigError("model.path", config.path, "a model folder or a .gguf file that exists")
    if path.is_file() and path.suffix != ".gguf":
        raise ConfigError("model.path", config.path, "a model folder, or a file that ends in .gguf")
    folder = gguf_to_folder(path) if path.is_file() else path
    model = read_model_config(folder, trust_remote_code=config.trust_remote_code)
    return TextModel(folder, model, _tokenizer(config, folder))


def _tokenizer(config: ModelSection, folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer that the job names, else the model's own, if it has one."""
    if config.tokenizer is None and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    place = config.tokenizer or str(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=config.trust_remote_code)
    # transformers raises errors of many kinds for a tokenizer it cannot read.
    except Exception as error:
        key = "model.path" if config.tokenizer is None else "model.tokenizer"
        raise ConfigError(key, place, f"a folder with a tokenizer that transformers can read: {error}") from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer
