"""Every key of a supervised fine-tuning run."""

from jaxrl.config.supervised import SupervisedConfig
from jaxrl.config.tables import PromptConfig


class SFTDataConfig(PromptConfig):
    """Texts to learn."""

    path: str
    """A .jsonl or .parquet file, or the id of a data set on the Hugging Face hub (needs the `hub`
    extra)."""

    subset: str | None = None
    """Name of the data set's configuration on the hub."""

    split: str = "train"
    """Split of a hub data set."""

    prompt_key: str = "prompt"
    """Column with the prompt: a text, or a list of {role, content} messages. It is not learnt."""

    completion_key: str = "completion"
    """Column with the text that answers the prompt; it is learnt, and that the text ends there."""

    text_key: str | None = None
    """Column with a whole text, learnt from its second token on; replaces prompt_key and
    completion_key."""


class SFTConfig(SupervisedConfig):
    """A supervised fine-tuning run."""

    run_dir: str = "runs/sft"
    """Directory of the tuned model (in `model`), checkpoints and metrics; a run found there is
    continued."""

    data: SFTDataConfig
