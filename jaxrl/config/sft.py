"""Every key of a supervised fine-tuning run."""

from jaxrl.config.supervised import SupervisedConfig
from jaxrl.config.tables import TextsConfig


class SFTDataConfig(TextsConfig):
    """Texts to train on."""

    prompt_key: str = "prompt"
    """Column with the prompt: a text, or a list of {role, content} messages. It is not trained
    on."""

    completion_key: str = "completion"
    """Column with the completion to train on; the end of the text is trained on, too."""

    text_key: str | None = None
    """Column with a whole text to train on, from its second token; replaces prompt_key and
    completion_key."""


class SFTConfig(SupervisedConfig):
    """A supervised fine-tuning run."""

    run_dir: str = "runs/sft"
    """Directory of the tuned model (in `model`), checkpoints and metrics; a run found there is
    resumed."""

    data: SFTDataConfig
