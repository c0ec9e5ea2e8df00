"""What MkDocs is told beyond mkdocs.yml: pages from files above docs/, and links to files that are on no page."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))
#: File of the source tree -> its place on the site.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
PAGES |= {str(path.relative_to(ROOT)): f"recipes/{path.name}" for path in RECIPES}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, target in PAGES.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A link to a file of the source tree that is on no page becomes its text."""
    source = page.file.abs_src_path
    assert source is not None
    here = Path(source).parent

    def on_site(match: re.Match[str]) -> str:
        target = (here / match[3]).resolve()
        if not target.is_relative_to(ROOT) or not target.exists():
            return match[0]  # MkDocs names it
        name = str(target.relative_to(ROOT))
        if name in PAGES:
            path = PAGES[name]
        elif name.startswith("docs/") and files.get_file_from_path(name.removeprefix("docs/")):
            path = name.removeprefix("docs/")
        else:
            return match[2]
        depth = page.file.src_uri.count("/")
        return f"{match[1]}[{match[2]}]({'../' * depth}{path}{match[4] or ''})"

    return _LINK.sub(on_site, markdown)
