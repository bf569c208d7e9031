"""Writes the package's description for PyPI: the README, whose relative links lead to the repository there."""

import re
from pathlib import Path

from setuptools import setup

FILES = "https://github.com/attnmech/attnmech"

text = Path(__file__).with_name("README.md").read_text("utf-8")
text = re.sub(r"(!\[[^]]*\]\()(?!https:)", rf"\1{FILES}/raw/main/", text)
text = re.sub(r"(\]\()(?!https:)", rf"\1{FILES}/blob/main/", text)
setup(long_description=text, long_description_content_type="text/markdown")
