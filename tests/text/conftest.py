from hypothesis import settings

# A test never asserts times, and machines are shared.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
