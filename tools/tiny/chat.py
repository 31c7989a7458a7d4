"""The chat template as Hugging Face renders it, for training and for the oracle."""
import json


def load_template(text):
    """A jinja2 template of `text`, set up as transformers does; render(messages=…, tools=…, add_generation_prompt=…)."""
    import jinja2

    env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return env.from_string(text)
