"""A model that transformers has loaded, with its own `generate`: one argument more, the same text.

python examples/in_transformers.py [MODEL]
"""

import sys

import paceline
from paceline.targets.sources import load_model

# Any model that transformers has loaded; here the default one of paceline, so that nothing needs to be fetched.
model, tokenizer = load_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
question = [{"role": "user", "content": "Repeat this sentence five times: The rider at the front takes the wind."}]
inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)

fast = paceline.custom_generate("suffix")  # once: it keeps what it builds for the model
plain = model.generate(**inputs, max_new_tokens=64, do_sample=False)
drafted = model.generate(**inputs, max_new_tokens=64, do_sample=False, custom_generate=fast)

print(tokenizer.decode(drafted[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(f"\n{fast.stats[0].tau:.2f} tokens a pass; the same ids: {drafted.tolist() == plain.tolist()}")
