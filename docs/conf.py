"""Sphinx builds the site from this folder: ``make docs``.

Pages are Markdown that reads well by itself. ``index.md`` is the contents: each list of links below a heading is a
group of the navigation, so a page is listed once, with a line on what is in it, and is in the sidebar by that.
"""

from __future__ import annotations

import logging
import re
import warnings
from importlib.metadata import version as installed_version
from pathlib import Path

from sphinx.errors import ExtensionError

# A package of the theme's sets up logging at INFO when it is imported.
logging.getLogger("alembic").setLevel(logging.WARNING)
# Of a mixin's declared attributes, which autodoc looks at.
warnings.filterwarnings("ignore", message="Unmanaged access of declarative attribute")

project = "jobsync_orm"
copyright = "the authors of jobsync_orm, MIT licence"
release = version = installed_version("jobsync-orm")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
nitpicky = True
# Types of others, and words like "callable" and "optional" in docstrings, are no links; names of this package must be.
# Nor are its inner modules, which docstrings name for those who read the code.
nitpick_ignore_regex = [(r"py:.*", r"(?!jobsync_orm\.).*"), (r"py:mod", r"jobsync_orm\..*")]

myst_heading_anchors = 4
myst_links_external_new_tab = False

autodoc_typehints = "none"  # the docstrings have them
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
add_module_names = False
python_display_short_literal_types = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "jobsync_orm"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5f8b", "color-brand-content": "#1f5f8b"},
    "dark_css_variables": {"color-brand-primary": "#7fb8e0", "color-brand-content": "#7fb8e0"},
}

ASSET = re.compile(r"""<(?:script|img|link|source|iframe)\b[^>]*?(?:src|href)=["'](?:https?:)?//[^"']+""")
IMPORT = re.compile(r"""(?:url\(|@import)\s*["']?(?:https?:)?//[^"')]+""")
TOP = ("class", "exception", "function")
LINK = re.compile(r"^- \[[^]]+\]\((?!https?:)([\w/.-]+?)(?:\.md|\.rst)\)", re.MULTILINE)


def navigation(text: str) -> str:
    """The toctrees that say in Sphinx's words what the lists of ``text`` say: one for each heading with links."""
    trees = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        caption = section.split("\n", 1)[0]
        if pages := LINK.findall(section):
            trees.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"]))
    return "\n\n".join(trees)


def add_navigation(app, docname, source):
    if docname == "index":
        source[0] += "\n\n" + navigation(source[0]) + "\n"


def resolve_public_name(app, env, node, contnode):
    """A name that a docstring gives with the module it is defined in, while the site has it under its public one."""
    if node.get("refdomain") != "py":
        return None
    domain, name = env.domains["py"], node["reftarget"].rpartition(".")[2]
    found = [
        key
        for key, entry in domain.objects.items()
        if key.rpartition(".")[2] == name and entry.objtype in TOP and not entry.aliased
    ]
    if not node["reftarget"].startswith("jobsync_orm.") or len(found) != 1:
        return None
    return domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], found[0], node, contnode)


def refuse_assets_from_elsewhere(app, failure):
    """The site is readable without a network: no script, style, font or image is somebody else's."""
    if failure is not None or app.builder.format != "html":
        return
    wrong = [
        f"{file.relative_to(app.outdir)}: {found}"
        for pattern, outside in (("**/*.html", ASSET), ("**/*.css", IMPORT))
        for file in sorted(Path(app.outdir).glob(pattern))
        for found in outside.findall(file.read_text(encoding="utf-8"))
    ]
    if wrong:
        raise ExtensionError("assets from elsewhere: " + "; ".join(wrong))


def setup(app):
    app.connect("build-finished", refuse_assets_from_elsewhere)
    app.connect("missing-reference", resolve_public_name)
    app.connect("source-read", add_navigation)
