"""Build the documentation site: `python -m docs._tools OUTPUT`."""

import sys
from pathlib import Path

from docs._tools.site import build_site

sys.exit(build_site(Path(__file__).parents[2], Path(sys.argv[1])))
