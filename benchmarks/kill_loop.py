"""Kill a saving run at 20 random moments, and end 5 by SIGTERM: python benchmarks/kill_loop.py

Every start goes on from what the last one left; the losses at the end must be, bit by bit, the unbroken run's.
"""

import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import killing

STEPS = 120


def main() -> None:
    """Three runs of the same steps: unbroken, killed, and stopped."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unbroken = killing.start(folder / "whole", STEPS)
        said, _ = unbroken.communicate()
        assert unbroken.returncode == 0, said
        want = killing.losses(folder / "whole")
        for what, count, number in (("SIGKILL", 20, signal.SIGKILL), ("SIGTERM", 5, signal.SIGTERM)):
            said = killing.kill_and_resume(folder / what, STEPS, count, seed=1, with_signal=number)
            found = killing.losses(folder / what)
            same = found == want
            print(f"{count} x {what}: {len(found)} losses, {'bitwise equal' if same else 'DIFFERENT'}; {said[0]}")


if __name__ == "__main__":
    main()
