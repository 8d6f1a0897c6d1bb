"""A hub repository with this folder gives paceline to every transformers user.

model.generate(**inputs, custom_generate="you/your-repo", trust_remote_code=True, drafter="prompt-lookup")
"""

import copy

import paceline


def generate(
    model,
    drafter="prompt-lookup",
    policy=None,
    verifier="auto",
    tokenizer=None,
    streamer=None,
    assistant_model=None,
    generation_config=None,
    stop_strings=None,
    **kwargs,
):
    """`drafter`, `policy` and `verifier` as for `paceline.custom_generate`, the rest as for `model.generate`."""
    if assistant_model is not None:
        raise paceline.PacelineError("instead of assistant_model, name it: drafter='draft-model:model=...'")
    fast = paceline.custom_generate(drafter, policy, verifier=verifier, tokenizer=tokenizer, streamer=streamer)
    # A configuration's stop strings transformers keeps to itself, but not the tokenizer; the keyword's it hands on.
    if getattr(generation_config, "stop_strings", None) is not None:
        stop_strings = generation_config.stop_strings if stop_strings is None else stop_strings
        generation_config = without_stop_strings(generation_config)
    if model.generation_config.stop_strings is not None:
        stop_strings = model.generation_config.stop_strings if stop_strings is None else stop_strings
        model = copy.copy(model)  # of the same modules: another thread may be reading the model's own configuration
        model.generation_config = without_stop_strings(model.generation_config)
    # The class's own generate: a model loaded from a repository with this folder has this function as `generate`.
    return type(model).generate(
        model, generation_config=generation_config, stop_strings=stop_strings, custom_generate=fast, **kwargs
    )


def without_stop_strings(config):
    config = copy.copy(config)
    config.stop_strings = None
    return config
