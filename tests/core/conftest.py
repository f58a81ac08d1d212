"""Examples may take their time: the machine that runs the suite is shared."""

from hypothesis import settings

settings.register_profile("core", deadline=None)
settings.load_profile("core")
