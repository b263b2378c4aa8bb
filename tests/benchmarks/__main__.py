"""`python -m tests.benchmarks`: which benchmarks there are."""

import sys

from tests import benchmarks

print(benchmarks.__doc__)  # noqa: T201
if sys.argv[1:] not in ([], ["--help"]):
    sys.exit(f"{' '.join(sys.argv[1:])}: start a benchmark as python -m tests.benchmarks.NAME")
