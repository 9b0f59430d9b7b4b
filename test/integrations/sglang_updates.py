"""What stands for engines of SGLang 0.5.23, in this process and behind its HTTP server, has of it."""

from __future__ import annotations


class Updates:
    """Weights are taken between begin and end alone."""

    is_open, updates = False, 0

    def begin_weight_update(self, selector="all"):
        if self.is_open:
            return False, "a weight-update session is already open; call end_weight_update() first"
        self.is_open = True
        return True, "Success"

    def end_weight_update(self):
        if not self.is_open:
            return False, "no weight-update session is open; call begin_weight_update() first"
        self.is_open, self.updates = False, self.updates + 1
        return True, "Success"
