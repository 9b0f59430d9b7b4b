"""`python -m torchao_blockwise`: the commands of `torchao_blockwise.cli`."""

import sys

from torchao_blockwise.cli import main

if __name__ == "__main__":
    sys.exit(main())
