from .ends import completion_encoder as completion_encoder, end_note as end_note
from .look import length_line as length_line, marked_text as marked_text, one_line as one_line
from .messages import (
    Message as Message,
    RawPrompt as RawPrompt,
    read_prompt as read_prompt,
    read_tools as read_tools,
)
from .pairs import (
    Pair as Pair,
    PairColumns as PairColumns,
    Pairs as Pairs,
    read_pairs as read_pairs,
)
from .prompts import (
    Example as Example,
    Prompts as Prompts,
    load_prompts as load_prompts,
    most_characters as most_characters,
    next_indices as next_indices,
    prompt_encoder as prompt_encoder,
    start_tokens as start_tokens,
)
from .reasoning_gym import REASONING_GYM as REASONING_GYM
from .rows import (
    Row as Row,
    check_characters as check_characters,
    is_pattern as is_pattern,
    named_files as named_files,
    read_column as read_column,
    read_rows as read_rows,
    read_text as read_text,
)
from .spool import Spool as Spool
from .templates import (
    Renderer as Renderer,
    Rendering as Rendering,
    Turn as Turn,
    make_renderer as make_renderer,
)
from .tokenizer import Tokenizer as Tokenizer
