"""A run that tests stop in more ways than chaos does."""

from __future__ import annotations

import signal

import kill_target
import psutil
from kill_target import descendants, survivors

from distill.guardian import guarded_role


class KillTarget(kill_target.KillTarget):
    """Guardians, single signals, and an orderly stop."""

    def kill_guardian(self, role: str) -> int:
        """Kill −9 the guardian of a role; how many of the processes below it outlive it."""
        guardian = next(
            one for one in psutil.Process(self._launcher.pid).children() if guarded_role(one) == role
        )
        below = descendants(guardian.pid)
        self._dead |= below
        guardian.kill()
        return len(survivors(below))

    def below(self) -> set[psutil.Process]:
        """Every process below the launcher."""
        return descendants(self._launcher.pid)

    def signal(self, role: str, number: signal.Signals) -> None:
        """Send a signal to every process of a role."""
        for process in self._role_processes()[role]:
            process.send_signal(number)

    def wait_replaced(self, role: str) -> None:
        """Until a role that was killed has a new process, working or not."""
        self.wait(lambda: bool(set(self._role_processes().get(role, ())) - self._dead), f"another {role}")

    def resume(self, steps: int) -> None:
        """Start it again, to its end so many steps behind the last one that was reported."""
        self._command = [*self._command, "--set", f"run.steps={self.step() + steps}"]
        self.start(resume=True)

    def stop(self) -> int:
        """SIGTERM to the launcher; its exit status."""
        self._role_processes()
        self._launcher.send_signal(signal.SIGTERM)
        return self.ended()
