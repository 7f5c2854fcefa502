"""The documentation as a site: ``pip install ".[docs]"``, then ``sphinx-build -W docs build/docs``."""

from importlib.metadata import version as version_of

project = "pyhotexperts"
version = release = version_of("pyhotexperts")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "alabaster"
html_theme_options = {"description": "MoE language models larger than VRAM", "fixed_sidebar": True}
# for developers, read in the repository
exclude_patterns = ["design-notes.md", "promises.md", "releasing.md", "upgrading-llama-cpp.md"]
suppress_warnings = ["myst.xref_missing"]  # links to files of the repository; a test checks them all
myst_heading_anchors = 3
default_role = "code"  # single backquotes in docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_numpy_docstring = True
