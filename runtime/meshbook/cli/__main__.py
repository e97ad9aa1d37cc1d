"""``python -m meshbook.cli`` runs the command where it is not on the PATH."""

import sys

from meshbook.cli import main

sys.exit(main())
