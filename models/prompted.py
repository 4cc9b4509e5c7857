"""The command that continues a prompt."""

import jax

from jaxpp import mesh, partition, tokenizer
from jaxpp.commands import GenerateConfig
from jaxpp.options import check_letters, check_ranges
from models.generate import Sampling, generate
from models.opened import open_model, spec_of


def run(config: GenerateConfig) -> None:
    """Print a prompt and its continuation as it comes. Raises ValueError for what does not fit the model."""
    check_ranges(config)
    if config.load is None or not config.prompt:
        raise ValueError("generate needs --load FOLDER and --prompt TEXT, for example --load model --prompt 'Once'")
    check_letters("prompt", config.prompt)
    model, weight, where, *_ = open_model(config.load, config.lora_load_path)
    text_of = tokenizer.load(config.tokenizer or where)
    prompt = text_of.encode(config.prompt)
    if not 0 < len(prompt) < model.positions:
        raise ValueError(
            f"prompt has {len(prompt)} tokens ({text_of.name}), and the model {model.positions} positions, of which at"
            f" least 1 is for what follows: give a prompt of 1 to {model.positions - 1} tokens"
        )
    if len(prompt) + config.max_new_tokens > model.positions:
        raise ValueError(
            f"max_new_tokens={config.max_new_tokens} after a prompt of {len(prompt)} tokens is more than the"
            f" {model.positions} positions of the model: use at most {max(0, model.positions - len(prompt))}"
        )
    tokenizer.check_vocabulary(text_of, model.vocab_size)
    spec = spec_of(model)
    params = partition.assemble(
        spec, partition.shardings(spec, mesh.make_mesh(devices=jax.local_devices()[:1])), weight
    )
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    key = jax.random.key(config.seed)
    options = (key, sampling, partition.unstack, config.dtype, text_of.end)
    print(config.prompt, end="", flush=True)
    for piece in tokenizer.stream(text_of, generate(params, prompt, config.max_new_tokens, *options)):
        print(piece, end="", flush=True)
    print()
