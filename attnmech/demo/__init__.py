"""The demo model: a small decoder, and texts in the language of known structure on which it was trained.

>>> from attnmech.demo import model_folder
>>> (model_folder() / "config.json").is_file()
True
"""

from importlib.resources import files
from pathlib import Path


def model_folder() -> Path:
    """Returns the folder of the shipped model, in the Hugging Face format.

    `transformers.AutoModelForCausalLM.from_pretrained(model_folder())` loads it without a network.
    """
    return Path(str(files("attnmech.demo") / "model"))
