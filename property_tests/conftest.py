"""Hypothesis profiles: derandomized for `make test`, many more examples for `make nightly`."""

from hypothesis import HealthCheck, settings

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("default", deadline=None, max_examples=200, derandomize=True, suppress_health_check=_QUIET)
settings.register_profile("nightly", deadline=None, max_examples=100_000, suppress_health_check=_QUIET)
settings.load_profile("default")
