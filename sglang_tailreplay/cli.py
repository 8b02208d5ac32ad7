"""sglang-tailreplay COMMAND [arguments]

  serve      start a server: SGLang's flags and --tail-replay-*        (python -m sglang_tailreplay.launch_server)
  doctor     say before a start whether it will work, what memory goes where and what a hit should cost
  calibrate  measure on the model what hits lose, and find the settings that lose no more than you allow

and, with a checkout of the repository, what lies in its scripts/:

  demo       stock SGLang and this project serve the same requests; a table shows what came from the cache
  bench      time to first token of hits on this GPU, beside the paper's table                   (scripts/bench_ttft)
  eval       what replaying a tail costs in the quality of answers                         (scripts/eval_quality)

`sglang-tailreplay COMMAND --help` tells more.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts" / "lib"
IN_SCRIPTS = {"demo": "demo.py", "bench": "bench_ttft.py", "eval": "eval_quality.py"}


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
    if command in IN_SCRIPTS:
        return run_script(SCRIPTS / IN_SCRIPTS[command], arguments)
    known = ", ".join(["serve", "doctor", "calibrate", *IN_SCRIPTS])
    print(f"error: unknown command {command!r}; known are {known}", file=sys.stderr)
    return 2


def run_script(script: Path, arguments: Sequence[str]) -> int:
    """Its exit code; 2 where the package was installed without the repository."""
    if not script.exists():
        print(f"error: {script} is not there: this command needs a checkout of the repository, with "
              "'pip install -e .' in it", file=sys.stderr)  # fmt: skip
        return 2
    return subprocess.call([sys.executable, str(script), *arguments])


if __name__ == "__main__":
    sys.exit(main())
