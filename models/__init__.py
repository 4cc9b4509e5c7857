"""Models by name. Each is any object with an embedding, a list of blocks and a head; the library knows no more."""

from difflib import get_close_matches

from models.gpt2 import GPT2, GPT2Config
from models.gpt2 import PRESETS as GPT2_PRESETS

PRESETS: dict[str, GPT2Config] = {**GPT2_PRESETS}
FAMILIES = {GPT2Config: GPT2}


def config_of(name: str) -> GPT2Config:
    """The preset of a name; ValueError names the nearest and all of them."""
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, n=1, cutoff=0.4)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"model={name!r} is unknown{hint} (one of {', '.join(PRESETS)})")
    return PRESETS[name]
