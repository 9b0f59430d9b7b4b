"""The site: `python -m sphinx -W --keep-going docs build/docs` builds it; tutorials run as it is built."""

import os
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "extensions")]

# Tutorials run on a CPU, one thread each, and ask no network for anything.
os.environ |= {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
os.environ["PYTHONPATH"] = os.pathsep.join([str(DOCS.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

import code_host  # noqa: E402  # a neighbor of this file
import gallery  # noqa: E402
import gpu_tutorials  # noqa: E402
import reference  # noqa: E402
import results  # noqa: E402

import torchao_blockwise  # noqa: E402

project = "torchao_blockwise"
author = "the torchao_blockwise authors"
copyright = author
version = release = torchao_blockwise.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "built",
    "code_host",
    "docstrings",
    "error_index",
    "gpu_tutorials",
    "llms",
]
exclude_patterns = ["extensions", "tutorials", "examples", "learn/**/*.ipynb", "learn/**/*.py", "learn/**/*.md5"]
suppress_warnings = [
    # Functions that the gallery's configuration holds.
    "config.cache",
]

# Texts of errors keep `--` and straight quotes, by which they are searched.
smartquotes = False

# Pages are read on GitHub too: plain Markdown, headings with GitHub's anchors.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

# `reference` writes the pages: autosummary would look at each inherited member of a tensor, for a minute.
autosummary_generate = False
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True

html_theme = "pydata_sphinx_theme"
html_title = "torchao_blockwise"
html_baseurl = os.environ.get("DOCS_URL", "")
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("search.js", {"defer": "defer"})]
html_show_sourcelink = False
html_theme_options = {
    "header_links_before_dropdown": 6,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "show_prev_next": False,
    "navbar_end": ["theme-switcher"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "pygments_light_style": "tango",
    "pygments_dark_style": "monokai",
}
# A sidebar lists the pages of a section. These sections have one page, or the page has wide tables.
html_sidebars = {"index": [], "convergence": [], "performance": []}
copybutton_prompt_text = r">>> |\$ "
copybutton_prompt_is_regexp = True

sphinx_gallery_conf = gallery.CONFIGURATION

reference.write(DOCS / "api")
results.write(DOCS / "results")
code_host.write(DOCS)
gpu_tutorials.write(DOCS / "gpu")
