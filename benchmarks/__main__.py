"""`make bench`: every figure the documentation claims, one table each.

Run all, or some by name: `python -m benchmarks signature overhead`.
"""

from __future__ import annotations

import importlib
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
NOT_TABLES = ("__main__", "__init__")


def names() -> list[str]:
    """Benchmarks of this folder, in alphabetical order."""
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_TABLES)


def main() -> int:
    """Run the named benchmarks, or all."""
    known = names()
    wanted = [name for name in sys.argv[1:] if not name.startswith("-")] or known
    unknown = [name for name in wanted if name not in known]
    if unknown:
        print(f"no benchmark {unknown[0]!r}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    sys.argv[1:] = [word for word in sys.argv[1:] if word.startswith("-")]
    for name in wanted:
        importlib.import_module(f"benchmarks.{name}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
