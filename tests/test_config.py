"""Options: parsing, checks that need no device, and the sizes that are resolved."""

from dataclasses import MISSING, fields

import pytest

from jaxpp.commands import PlanConfig
from jaxpp.config import MOST_MICROBATCHES, Config, Sizes, check, sizes
from jaxpp.options import parse

COMMANDS = {"train": Config, "plan": PlanConfig}
OTHER = {int: 5, float: 0.25, str: "other"}
OPTIONS = {option.name: option for option in fields(Config)}


@pytest.mark.parametrize("dash", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_read(name, dash):
    """With underscores and with dashes, `--name value` and `--name=value`; nothing else changes."""
    kind, choices = OPTIONS[name].metadata["type"], OPTIONS[name].metadata["choices"]
    word = f"--{name.replace('_', '-') if dash else name}"
    if kind is bool:
        assert parse([word], COMMANDS) == ("train", Config(**{name: True}))
        return
    value = choices[-1] if choices else OTHER[kind]
    want = Config(**{name: (value,) if OPTIONS[name].metadata["many"] else value})
    assert want != Config()
    assert parse([word, str(value)], COMMANDS) == ("train", want)
    assert parse([f"{word}={value}"], COMMANDS) == ("train", want)


def test_defaults_and_commands():
    assert parse([], COMMANDS) == ("train", Config())
    assert parse(["train"], COMMANDS) == ("train", Config())
    assert parse(["plan", "--json", "--seed", "3"], COMMANDS) == ("plan", PlanConfig(json=True, seed=3))
    assert all(option.default is not MISSING for option in OPTIONS.values())


def test_the_defaults_pass():
    check(Config(), layers=8, positions=256)


@pytest.mark.parametrize(
    ("schedule", "chunks", "want"),
    [(None, 1, "1f1b"), (None, 2, "interleaved"), ("gpipe", 1, "gpipe"), ("interleaved", 1, "interleaved")],
)
def test_default_schedule(schedule, chunks, want):
    assert Config(schedule=schedule, virtual_pipeline_parallel=chunks).schedule_name == want


def refusal(**options) -> str:
    with pytest.raises(ValueError) as error:
        check(Config(**options), layers=8, positions=256)
    assert "\n" not in str(error.value)
    return str(error.value)


NUMBERS = {name: option for name, option in OPTIONS.items() if option.metadata["type"] in (int, float)}
for of_several in ("data_weights", "layer_split"):
    NUMBERS.pop(of_several)
LEAST = {name: option.metadata["least"] for name, option in NUMBERS.items() if not name.endswith("dropout")}


@pytest.mark.parametrize("name", LEAST)
def test_least_values(name):
    """The least value passes, one below it is refused with the option, the value, the rule and a value that works."""
    least = OPTIONS[name].metadata["type"](LEAST[name])
    extra = {"save": "x"} if name == "save_interval" else {"lora_rank": 1} if name.startswith("lora_") else {}
    extra = {needed: value for needed, value in extra.items() if needed != name}
    check(Config(**{name: least} | extra), layers=8, positions=256)
    message = refusal(**{name: least - 1})
    assert message.startswith(f"{name}={least - 1} must be at least {LEAST[name]}, for example --{name} ")
    check(Config(**{name: OPTIONS[name].metadata["type"](message.split()[-1])} | extra), layers=8, positions=256)


def test_every_number_has_a_least_value():
    assert set(LEAST.values()) == {0, 1}
    ones = {"pipeline_parallel", "virtual_pipeline_parallel", "data_parallel", "batch_size", "total_batch_size"}
    ones |= {"tensor_parallel", "context_parallel", "expert_parallel", "num_processes", "max_skipped_steps"}
    ones |= {"sequence_length", "num_iteration", "emulate_devices", "max_checkpoint_keep"}
    assert {name for name, least in LEAST.items() if least == 1} == ones


FLOATS = [name for name, option in NUMBERS.items() if option.metadata["type"] is float]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("name", FLOATS)
def test_no_number_is_nan(name, value):
    assert refusal(**{name: value}).startswith(f"{name}={value} must be")


@pytest.mark.parametrize("name", ["learning_rate", "min_learning_rate", "weight_decay"])
def test_no_rate_is_infinite(name):
    assert refusal(**{name: float("inf")}).startswith(f"{name}=inf must be")


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ((0.5, -1.0), "data_weights=-1.0 must be at least 0"),
        ((0.5, float("nan")), "data_weights=nan must be finite"),
        ((0.0, 1.0), "data_weights=0.0 must be above 0"),
        ((1.0,), "data_weights=1.0 has 1 weights for 2 files of input_bin: give one for each file"),
    ],
)
def test_weights(weights, said):
    assert refusal(data_weights=weights, input_bin=("a", "b")).startswith(said)
    check(Config(data_weights=(0.25, 3.0), input_bin=("a", "b")), layers=8, positions=256)
    assert "has 2 weights for 0 files" in refusal(data_weights=(1.0, 2.0))


@pytest.mark.parametrize("value", [-0.1, 1.0])
def test_dropout_range(value):
    assert f"dropout={value} must be in [0, 1)" in refusal(dropout=value)
    check(Config(dropout=0.999), layers=8, positions=256)
    check(Config(lora_dropout=0.999, lora_rank=2), layers=8, positions=256)
    assert refusal(lora_dropout=1.0).startswith("lora_dropout=1.0 must be in [0, 1), for example --lora_dropout 0.1")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("alpha", 2.0, "2.0"), ("dropout", 0.1, "0.1"), ("target_modules", ("a", "b"), "a b"), ("save_path", "x", "x")],
)
def test_options_of_adapters_need_adapters(name, value, said):
    message = refusal(**{f"lora_{name}": value})
    assert message == f"lora_{name}={said} is of adapters, and lora_rank=0 makes none: use --lora_rank 8"
    for more in ({"lora_rank": 8}, {"lora_load_path": "x"}):
        check(Config(**{f"lora_{name}": value}, **more), layers=8, positions=256)


@pytest.mark.parametrize("name", ["dtype", "pipeline_dtype", "grad_pipeline_dtype"])
def test_dtypes(name):
    message = refusal(**{name: "float8"})
    assert message == f"{name}='float8' is not a dtype we know: use one of float32, bfloat16, float16"
    for known in ("float16", "bfloat16"):
        check(config := Config(**{name: known}), layers=8, positions=256)
        assert config.scales_loss == (known == "float16")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_chunks_need_interleaved(schedule):
    message = refusal(schedule=schedule, virtual_pipeline_parallel=2)
    assert f"schedule={schedule!r}" in message and "virtual_pipeline_parallel=2" in message
    assert "--schedule interleaved" in message
    check(Config(schedule="interleaved", virtual_pipeline_parallel=2), layers=8, positions=256)


@pytest.mark.parametrize(("remat", "near"), [("dotz", "dots"), ("ful", "full"), ("save_only_these_names", None)])
def test_remat_is_checked(remat, near):
    """A function that makes a policy from arguments is no policy."""
    message = refusal(remat=remat)
    assert f"remat={remat!r}" in message
    assert near is None or f"did you mean {near!r}" in message
    for known in ("full", "none", "dots", "everything_saveable"):
        check(Config(remat=known), layers=8, positions=256)


def test_what_the_model_can_take():
    message = refusal(pipeline_parallel=9)
    assert "pipeline_parallel=9 x virtual_pipeline_parallel=1 is more than the 8 layers" in message
    message = refusal(pipeline_parallel=3, virtual_pipeline_parallel=3)
    assert "3 x virtual_pipeline_parallel=3 is more" in message and message.endswith("--pipeline_parallel 2")
    message = refusal(min_learning_rate=0.1, learning_rate=0.01)
    assert "min_learning_rate=0.1 is above learning_rate=0.01" in message
    check(Config(min_learning_rate=0.01, learning_rate=0.01), layers=8, positions=256)
    message = refusal(sequence_length=257)
    assert "sequence_length=257" in message and "--sequence_length 256" in message
    check(Config(pipeline_parallel=8, sequence_length=256), layers=8, positions=256)


@pytest.mark.parametrize(
    ("options", "gpus", "want"),
    [
        ({}, 0, Sizes(4, 1, 8, 2, 64)),  # emulated devices
        ({"data_parallel": 2}, 0, Sizes(4, 2, 8, 4, 64)),
        ({"pipeline_parallel": 2, "batch_size": 3}, 0, Sizes(2, 1, 8, 3, 64)),
        ({}, 1, Sizes(1, 1, 8, 2, 64)),  # GPUs
        ({}, 2, Sizes(2, 1, 8, 2, 64)),
        ({}, 8, Sizes(4, 2, 8, 4, 64)),
        ({"data_parallel": 8}, 8, Sizes(1, 8, 8, 16, 64)),
        ({"pipeline_parallel": 2}, 8, Sizes(2, 4, 8, 8, 64)),
        ({"data_parallel": 16}, 8, Sizes(1, 16, 8, 32, 64)),  # too many: the mesh refuses it
        ({"total_batch_size": 768, "batch_size": 2}, 0, Sizes(4, 1, 6, 2, 64)),
        ({"total_batch_size": 192, "sequence_length": 16, "data_parallel": 2}, 0, Sizes(4, 2, 3, 4, 16)),
    ],
)
def test_sizes(options, gpus, want):
    found = sizes(Config(**options), layers=8, positions=256, gpus=gpus)
    assert found == want
    assert found.tokens == want.microbatches * want.rows * want.length


def test_sizes_of_a_small_model():
    assert sizes(Config(), layers=2, positions=64, gpus=8) == Sizes(2, 4, 8, 8, 16)


@pytest.mark.parametrize(
    ("total", "nearest"), [(1000, (768, 1024)), (1023, (768, 1024)), (1, (256,)), (255, (256,)), (257, (256, 512))]
)
def test_total_batch_size_that_does_not_divide(total, nearest):
    options = {"data_parallel": 2, "pipeline_parallel": 1}
    with pytest.raises(
        ValueError, match=f"total_batch_size={total} .* 2 x 2 x 64 = 256: the nearest (is|are)"
    ) as error:
        sizes(Config(total_batch_size=total, **options), layers=8, positions=256)
    assert str(error.value).endswith(" and ".join(map(str, nearest)))
    for fits in nearest:
        assert sizes(Config(total_batch_size=fits, **options), layers=8, positions=256).tokens == fits


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batchsize", "4"], "--batchsize is not an option of train, did you mean --batch_size?"),
        (["--batch-siz=4"], "did you mean --batch_size?"),
        (["--batch", "4"], "--batch is not an option"),  # no abbreviations
        (["--qqq"], "--qqq is not an option of train (see --help)"),
        (["train", "extra"], "extra is not an option of train"),
        (["--json"], "--json is not an option of train"),
        (["tran"], "command='tran' is unknown, did you mean 'train'? (one of train, plan)"),
        (["--batch_size", "four"], "batch_size='four' is not a whole number, for example --batch_size 2"),
        (["--batch-size=1.5"], "batch_size='1.5' is not a whole number, for example --batch_size 2"),
        (["--learning_rate", "fast"], "learning_rate='fast' is not a number, for example --learning_rate 0.002"),
        (["--batch_size"], "batch_size"),
        (["--optimizer", "adam"], "optimizer='adam' is unknown, did you mean 'adamw'? (one of adamw, sgd)"),
        (["--lr_decay_style", "cosin"], "lr_decay_style='cosin' is unknown, did you mean 'cosine'?"),
    ],
)
def test_words_that_are_refused(words, said):
    with pytest.raises(ValueError) as error:
        parse(words, COMMANDS)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"zero_stage": 2}, "zero_stage=3, got 2: use --zero_stage 3"),
        ({"zero_stage": 3, "remat": "none"}, "use --remat dots"),
        ({"zero_stage": 3, "precision_check": "level=1"}, "use --zero_gather step"),
    ],
)
def test_what_gathering_by_layer_needs(options, said):
    with pytest.raises(ValueError, match=said):
        check(Config(zero_gather="layer", **options), layers=8, positions=256)
    check(Config(zero_gather="layer", zero_stage=3), layers=8, positions=256)


def test_more_microbatches_than_a_schedule_has():
    most = MOST_MICROBATCHES * 128
    assert sizes(Config(total_batch_size=most), layers=8, positions=256).microbatches == MOST_MICROBATCHES
    with pytest.raises(
        ValueError, match=f"at most {MOST_MICROBATCHES}: raise batch_size, or use at most --total_batch_size {most}$"
    ):
        sizes(Config(total_batch_size=most + 128), layers=8, positions=256)


@pytest.mark.parametrize(
    ("option", "value", "most", "works"), [("seed", 2**32, 2**32 - 1, 0), ("emulate_devices", 2**32, 1024, 1)]
)
def test_what_would_be_cut_off_is_refused(option, value, most, works):
    assert refusal(**{option: value}) == f"{option}={value} must be at most {most}, for example --{option} {works}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"layer_split": (3, 4)},
            "layer_split=3 4 must be 2 numbers >= 0, of the layers of each chunk, that sum to 8: for example 4 4",
        ),
        (
            {"layer_split": (4, 4), "pipeline_parallel": 4},
            "layer_split=4 4 must be 4 numbers >= 0, of the layers of each chunk, that sum to 8: for example 2 2 2 2",
        ),
        (
            {"layer_split": (3, 3, 2), "virtual_pipeline_parallel": 2},
            "layer_split=3 3 2 must be 2 numbers >= 0, of the layers of each chunk, that sum to 8: for example 4 4",
        ),
        ({"layer_split": (9, -1)}, "layer_split=-1 must be at least 0, for example --layer_split 1"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(options, message):
    assert refusal(**options) == message


@pytest.mark.parametrize(
    ("options", "stages"), [({"layer_split": (5, 3)}, 2), ({"layer_split": (3, 2, 2, 1)}, 4), ({}, 4)]
)
def test_a_split_says_how_many_stages_there_are(options, stages):
    config = Config(**options)
    check(config, layers=8, positions=256)
    assert sizes(config, layers=8, positions=256).pipe == stages
    half = Config(**options, virtual_pipeline_parallel=2)
    if options:
        assert sizes(half, layers=8, positions=256).pipe == stages // 2
