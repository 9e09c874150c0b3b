"""The package, as settings.ini describes it."""

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).parent
parser = ConfigParser(delimiters=["="])
parser.read(root / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]
readme = root / "README.md"

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    keywords=cfg["keywords"],
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    license=cfg["license"],
    python_requires=f">={cfg['min_python']}",
    packages=find_packages(include=[cfg["lib_path"], f"{cfg['lib_path']}.*"]),
    install_requires=cfg["requirements"].split(),
    extras_require={name: cfg[f"{name}_requirements"].split() for name in ("hf", "dedup", "ray", "dev")},
    entry_points={
        "console_scripts": cfg["console_scripts"].splitlines(),
        "nbdev": [f"{cfg['lib_name']}={cfg['lib_path']}._modidx:d"],  # lets the docs link `names` to their pages
    },
    zip_safe=False,
)
