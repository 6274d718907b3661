"""python -m nci"""

import sys

from nci.cli import main

sys.exit(main())
