"""sglang-tailreplay COMMAND [arguments]

  serve      start a server: SGLang's flags and --tail-replay-*        (python -m sglang_tailreplay.launch_server)
  doctor     say before a start whether it will work, what memory goes where and what a hit should cost
  calibrate  measure on the model what hits lose, and find the settings that lose no more than you allow

`sglang-tailreplay COMMAND --help` tells more.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Modules are imported when they are needed: a --help takes no SGLang."""
    command, *arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        print(__doc__)
        return 0
    if command == "serve":
        from sglang_tailreplay import launch_server

        launch_server.main(arguments)
        return 0
    if command == "doctor":
        from sglang_tailreplay import doctor

        return doctor.main(arguments)
    if command == "calibrate":
        from sglang_tailreplay import calibrate

        return calibrate.main(arguments)
    print(f"error: unknown command {command!r}; known are serve, doctor and calibrate", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
