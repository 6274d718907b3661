"""python -m nci"""

import sys

from nci.cli import main

if __name__ == "__main__":  # a spawned worker imports this file again
    sys.exit(main())
