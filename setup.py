"""Where packages go; all else is in pyproject.toml. A wheel has them below latentpress/, an editable installation where
they are."""

import sys

from setuptools import find_packages, setup

TOP = ("schemas", "cache", "stages", "trainer")
RECIPES = "latentpress.recipes"  # without a module: stages/configuring reads them
packages = find_packages(include=[pattern for name in TOP for pattern in (name, f"{name}.*")])
if "editable_wheel" in sys.argv:
    setup(packages=["latentpress", *packages])
else:
    setup(
        packages=["latentpress", RECIPES, *(f"latentpress.{name}" for name in packages)],
        package_dir={f"latentpress.{name}": name for name in TOP} | {RECIPES: "examples/recipes"},
        package_data={
            "": ["*.schema.json", "command_lines.json", "*.jinja", "templates/*", "templates/projects/*"],
            RECIPES: ["*.yaml", "*.toml"],
        },
    )
