"""A hub repository with this folder gives paceline to every transformers user.

model.generate(**inputs, custom_generate="you/your-repo", trust_remote_code=True, drafter="prompt-lookup")
"""

import paceline


def generate(
    model,
    drafter="prompt-lookup",
    policy=None,
    verifier="auto",
    tokenizer=None,
    streamer=None,
    assistant_model=None,
    **kwargs,
):
    """`drafter`, `policy` and `verifier` as for `paceline.custom_generate`, the rest as for `model.generate`."""
    if assistant_model is not None:
        raise paceline.PacelineError("instead of assistant_model, name it: drafter='draft-model:model=...'")
    fast = paceline.custom_generate(drafter, policy, verifier=verifier, tokenizer=tokenizer, streamer=streamer)
    # The class's own generate: a model loaded from a repository with this folder has this function as `generate`.
    return type(model).generate(model, custom_generate=fast, **kwargs)
