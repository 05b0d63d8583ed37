"""Steps any trainer through single iterations, by its reward function.

Programs in other environments import it, so it needs only Python.
"""

import os
import sys
import threading
import zlib

PROMPTS, GROUP, PROMPT, ANSWER = 8, 8, 64, 192  # an iteration's prompts, and lengths in tokens
LEARNING_RATE = 1e-6


class Pace:
    """Stops a trainer when an iteration's last completion is rewarded, and waits for the parent.

    Between two stops a trainer learns, publishes and samples once. The parent gets a line at each
    stop, and answers when the trainer may continue.
    """

    def __init__(self) -> None:
        self._rewarded = 0
        self._lock = threading.Lock()
        # Whatever a library prints goes to standard error; the parent reads the rest.
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def reward(self, completions: list[str], **_: object) -> list[float]:
        """Counts and rewards completions: half of all texts, whatever they say."""
        self.count(len(completions))
        return [float(zlib.crc32(text.encode()) % 2) for text in completions]

    def count(self, completions: int) -> None:
        """Counts rewarded completions. Ends the program when the parent has closed its input."""
        with self._lock:
            self._rewarded += completions
            if self._rewarded % (PROMPTS * GROUP):
                return
            print(file=self._out, flush=True)
            if not sys.stdin.readline():
                os._exit(0)
