"""The package, as settings.ini describes it."""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).parent
parser = ConfigParser(delimiters=["="])
parser.read(root / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]
readme = (root / "README.md").read_text(encoding="utf-8")
# An index of packages shows it far from its files.
for form, opening in (("raw", r"(!\[[^\]]*\]\()"), ("blob", r"(\]\()")):
    readme = re.sub(rf"{opening}(?![a-z]+:|#)", rf"\1{cfg['git_url']}/{form}/{cfg['branch']}/", readme)

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=readme,
    long_description_content_type="text/markdown",
    keywords=cfg["keywords"],
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    license=cfg["license"],
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        f"Intended Audience :: {cfg['audience']}",
        f"Natural Language :: {cfg['language']}",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=f">={cfg['min_python']}",
    packages=find_packages(include=[cfg["lib_path"], f"{cfg['lib_path']}.*"]),
    package_data={
        cfg["lib_path"]: [
            "py.typed", "app/*.jinja", "app/demo/*.*", "app/demo/1_Pooling/*", "lab/sizes.json",
        ],
    },
    install_requires=cfg["requirements"].split(),
    extras_require={
        key.removesuffix("_requirements"): cfg[key].split() for key in cfg if key.endswith("_requirements")
    },
    entry_points={
        "console_scripts": cfg["console_scripts"].splitlines(),
        "nbdev": [f"{cfg['lib_name']}={cfg['lib_path']}._modidx:d"],  # lets the docs link `names` to their pages
    },
    zip_safe=False,
)
