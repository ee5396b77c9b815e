"""How the site is built: `make docs`. Nothing is fetched from a network."""

import shutil
import sys
from pathlib import Path

import torchrl_agentic

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent / "benchmarks")]

project = "torchrl-agentic"
author = "the torchrl-agentic authors"
version = release = torchrl_agentic.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "links",  # this one and the next two: _ext/
    "plain",
    "tables",
]
exclude_patterns = ["_build", "_ext", "_templates"]
templates_path = ["_templates"]
suppress_warnings = ["config.cache"]  # the gallery's configuration holds functions

html_theme = "furo"
html_title = "torchrl-agentic"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
pygments_style, pygments_dark_style = "friendly", "monokai"
copybutton_exclude = ".linenos, .gp, .go"

myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3

# Docstrings write names in single backticks, as `ToolCompose`: a link where there is a page of that name, and
# else plain code (`links.py`).
default_role = "py:obj"
autosummary_generate = True
autosummary_filename_map = {"torchrl_agentic.tool": "torchrl_agentic.tool-decorator"}  # beside Tool
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_google_docstring, napoleon_numpy_docstring = True, False
add_module_names = False
toc_object_entries = False
nitpicky = True
nitpick_ignore_regex = [("py:(?!obj).*", ".*")]  # types in signatures: of other packages, or of no page

# Tutorials write files where they run: they run in a copy.
TUTORIALS = HERE / "_build" / "run"
shutil.rmtree(TUTORIALS, ignore_errors=True)
shutil.copytree(HERE.parent / "tutorials", TUTORIALS)
sphinx_gallery_conf = {
    "examples_dirs": str(TUTORIALS),
    "gallery_dirs": "tutorials",
    "filename_pattern": r"/\d\d_\w+\.py$",
    "ignore_pattern": r"/(?!\d\d_)\w+\.py$",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "image_scrapers": (),
    "reset_modules": (),
    "remove_config_comments": True,
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
    "min_reported_time": 1_000_000,
    "plot_gallery": "True",
    "reference_url": {"torchrl_agentic": None},
    "default_thumb_file": str(HERE / "_static" / "thumbnail.png"),
}
