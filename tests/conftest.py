"""Settings of all unit tests."""

from __future__ import annotations

import hypothesis

# An example may take long on a busy machine; the timeout of the whole test is the limit.
hypothesis.settings.register_profile("scout", deadline=None)
hypothesis.settings.load_profile("scout")
