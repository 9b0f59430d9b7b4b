"""A monitor for tests of callbacks, which keeps its reports and checks them."""

from torchao_blockwise.diagnostics import NumericsMonitor


class Monitored:
    """`make` is for a `Numerics` callback. A writer, too: it keeps what it is given to write."""

    def __init__(self, every: int = 2):
        self.every, self.models, self.reports, self.closed = every, [], [], 0

    def make(self, model):
        self.models.append(model)
        return NumericsMonitor(model, every=self.every, writers=[self])

    def write(self, report):
        self.reports.append(report)

    def close(self):
        self.closed += 1

    def check(self, steps, layers):
        """One monitor, closed once, with reports of these steps on x, w and dy of as many layers."""
        assert len(self.models) == self.closed == 1
        assert [report.step for report in self.reports] == steps
        for report in self.reports:
            found = {(tensor.layer, tensor.tensor) for tensor in report.tensors}
            assert {tensor for _, tensor in found} == {"x", "w", "dy"} and len(found) == 3 * layers
            assert report.first_nonfinite is None and report.gradient_to_noise > 1
